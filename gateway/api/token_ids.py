"""Token ids in the events of a stream."""

from collections.abc import Sequence
from typing import Any

from gateway.api.answer_options import AnswerOptions
from gateway.api.sse import decoded, event
from gateway.request.mailbox import Chunks
from protocol.job import Deltas, Tokens


def with_token_ids(chunks: Chunks, details: AnswerOptions, *, choices: int, prompt_in_choice: bool) -> Chunks:
    """Return the chunks, with token ids in them where requested."""
    if details.prompt_ids is None:
        return chunks
    return WithTokenIds(
        chunks,
        details.prompt_ids,
        choices=choices,
        first_index=details.first_index,
        prompt_in_choice=prompt_in_choice,
    )


class WithTokenIds:
    """``Chunks`` with token ids (vLLM's ``return_token_ids``), added to the events of other ``Chunks``."""

    def __init__(
        self, inner: Chunks, prompt_ids: Sequence[int], *, choices: int, first_index: int, prompt_in_choice: bool
    ) -> None:
        """``prompt_in_choice``: whether an event has the prompt's ids in the choice or beside the choices.

        ``first_index``: see AnswerOptions.
        """
        self.usage = inner.usage
        self._inner = inner
        self._prompt_ids = prompt_ids
        self._first_index = first_index
        self._prompt_in_choice = prompt_in_choice
        self._unsent: list[list[int]] = [[] for _ in range(choices)]
        self._started = [False] * choices

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        self._unsent[frame.index] += frame.token_ids
        bodies = decoded(self._inner.of(frame))
        return b"".join(self._completed(body, is_last=body is bodies[-1]) for body in bodies)

    def _completed(self, body: dict[str, Any], *, is_last: bool) -> bytes:
        choice = body["choices"][0]
        index = choice["index"] - self._first_index
        if not self._started[index]:
            self._started[index] = True
            (choice if self._prompt_in_choice else body)["prompt_token_ids"] = self._prompt_ids
        if is_last:
            choice["token_ids"], self._unsent[index] = self._unsent[index], []
        return event(body)
