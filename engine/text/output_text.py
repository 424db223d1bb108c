"""The output tokens of one choice as text: detokenization, stop conditions, and the part already sent to the client.

Imports no torch: remote engines return token ids, and their text is produced here as for Spillway's own engine.
"""

from collections.abc import Callable

from engine.text.detokenizer import Detokenizer
from engine.text.stop_strings import stop_strings
from engine.types import ContentFinder, FinishReason
from protocol.generation import SamplingParams


class OutputText:
    """The text state of one choice.

    open ──end token, stop token, stop string, complete grammar, max_tokens──> finished
    """

    __slots__ = (
        "_chars_to_skip",
        "_detokenizer",
        "_eos_ids",
        "_params",
        "_stops",
        "finish_reason",
        "produced_tokens",
        "stop_reason",
    )

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: frozenset[int],
        detokenizer: Detokenizer,
        chars_to_skip: int = 0,
        content_finder: Callable[[], ContentFinder] | None = None,
    ) -> None:
        """Create the state before the first output token.

        ``eos_ids`` are the model's own end tokens, empty with ``ignore_eos``; ``chars_to_skip`` counts the characters
        of the text that the client of a resumed choice already has; ``content_finder``: see ``GenerationRequest``.
        """
        self._params = params
        self._eos_ids = eos_ids
        self._detokenizer = detokenizer
        self._stops = stop_strings(params.stop, content_finder)
        self._chars_to_skip = chars_to_skip
        self.produced_tokens = 0  # read so far
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None  # the stop string or stop token id that ended it

    def read(self, token_id: int, *, is_complete: bool = False) -> str:
        """Append one output token; return new text for the client. ``is_complete``: its grammar allows no more."""
        params = self._params
        self.produced_tokens += 1
        if token_id in self._eos_ids or token_id in params.stop_token_ids:
            text = self._apply_stops(self._detokenizer.push(token_id)) if params.include_stop_str_in_output else ""
            text += self._flush()
            if self.finish_reason is None:
                self.finish_reason = "stop"
                self.stop_reason = token_id if token_id in params.stop_token_ids else None
            return self._skip_sent(text)
        text = self._apply_stops(self._detokenizer.push(token_id))
        if self.finish_reason is None and (is_complete or self.produced_tokens >= params.max_tokens):
            text += self._flush()
            self.finish_reason = self.finish_reason or ("stop" if is_complete else "length")
        return self._skip_sent(text)

    def end(self, reason: FinishReason) -> str:
        """End the choice without a token; return the text that was held back."""
        text = self._flush()
        self.finish_reason = self.finish_reason or reason
        return self._skip_sent(text)

    def _apply_stops(self, text: str) -> str:
        if self.produced_tokens <= self._params.min_tokens:
            return self._stops.skip(text)
        return self._taken(*self._stops.push(text))

    def _taken(self, released: str, stop: str | None) -> str:
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
            if self._params.include_stop_str_in_output:
                released += stop
        return released

    def _flush(self) -> str:
        """Return the text that is held back, unless a stop string has already ended it."""
        text = "" if self.finish_reason is not None else self._apply_stops(self._detokenizer.flush())
        return text if self.finish_reason is not None else text + self._taken(*self._stops.end())

    def _skip_sent(self, text: str) -> str:
        skipped = min(self._chars_to_skip, len(text))
        self._chars_to_skip -= skipped
        return text[skipped:]
