"""One choice of a request whose tokens or text an inference server makes."""

import time
from collections.abc import Sequence
from typing import Final

from engine.step_stats import SequenceClock
from engine.text.detokenizer import TokenText
from engine.text.output_text import OutputText
from engine.types import FinishReason, GenerationRequest, ResumePoint, SequenceOutput
from pool_worker.engines.formats.base import Delta, Medium, Scored, ServerFacts, ServerRequest
from pool_worker.engines.framing import MalformedEvent
from pool_worker.engines.text_tokens import AnswerText, TextTokens, UnwritableError
from protocol.generation import TokenLogprob

SEED_STRIDE: Final = 1_000_003  # gives the choices of a seeded request different seeds


class ServerChoice:
    """One choice: its tokens, the state of its text, and what to request from the server."""

    def __init__(self, request: GenerationRequest, index: int, tokens: TokenText, eos_ids: frozenset[int]) -> None:
        """Make a choice of a checked request, resumed if the request says so; see ``replay``."""
        params = request.sampling
        self.request_id = request.request_id
        self.index = index
        self.params = params
        self.prompt_tokens = len(request.prompt_ids)
        self.clock = SequenceClock(added_s=time.monotonic())
        self.streamed_tokens = 0  # received from the server
        self._prompt_ids = request.prompt_ids
        self._cache_salt = request.cache_salt
        resume = next((point for point in request.resume if point.index == index), ResumePoint(index, (), 0))
        self._resumed_ids = resume.token_ids
        self._tokens = tokens
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        detokenizer = tokens.detokenizer(request.prompt_ids, skip_special_tokens=params.skip_special_tokens)
        self.text = OutputText(params, self._eos_ids, detokenizer, resume.text_chars, request.content_finder)
        self._cached_tokens = 0
        self._answer: AnswerText | None = None  # for a server that answers in text

    @property
    def total_tokens(self) -> int:
        """Tokens of its prompt and its output so far."""
        return self.prompt_tokens + self.text.produced_tokens

    @property
    def has_ended(self) -> bool:
        """True once its end has been reported."""
        return self.text.finish_reason is not None

    @property
    def is_resumed(self) -> bool:
        """True if another worker began it."""
        return bool(self._resumed_ids)

    def replay(self) -> SequenceOutput | None:
        """Read the resumed tokens; return their text that the client lacks, or the end if they contain it."""
        text = ""
        for token_id in self._resumed_ids:
            text += self.text.read(token_id)
            if self.text.finish_reason is not None:
                break
        return self._output([], text, None) if text or self.text.finish_reason else None

    def ask(self, facts: ServerFacts, max_model_len: int, text: TextTokens | None, answers_in: Medium) -> ServerRequest:
        """Return the request to the server; ``text`` converts it for a server that takes text.

        Raises RequestRejected or UnwritableError if it cannot be converted.
        """
        params, done = self.params, len(self._resumed_ids)
        written = ""
        if text is not None:
            written, pending = text.to_text(self._prompt_ids, self._resumed_ids)
            if answers_in == "text":
                self._answer = AnswerText(text, pending)
            elif pending:
                raise UnwritableError("the answer was cut inside a character, which this pool's server cannot resume")
        return ServerRequest(
            facts=facts,
            token_ids=[*self._prompt_ids, *self._resumed_ids],
            text=written,
            params=params,
            max_tokens=params.max_tokens - done,
            min_tokens=max(0, params.min_tokens - done),
            seed=None if params.seed is None else params.seed + self.index * SEED_STRIDE,
            max_model_len=max_model_len,
            cache_salt=self._cache_salt,
        )

    def take(self, delta: Delta) -> SequenceOutput | None:
        """Read one event; return its output, or None if there is none. Raises MalformedEvent."""
        self._cached_tokens = max(self._cached_tokens, delta.cached_tokens)
        reported, is_cut = delta.token_ids, False
        if self._answer is not None:
            reported, is_cut = self._answer.read(delta.text, self.params.max_tokens - self.text.produced_tokens)
        self.streamed_tokens += len(reported)
        token_ids: list[int] = []
        text = ""
        for token_id in reported:
            token_ids.append(token_id)
            text += self.text.read(token_id)
            if self.text.finish_reason is not None:
                break
        ended_by = "length" if is_cut else delta.ended_by
        if ended_by is not None and self.text.finish_reason is None:
            text += self._end_as_reported(ended_by, token_ids)
        logprobs = self._logprobs(token_ids, delta.scored)
        if not token_ids and not text and self.text.finish_reason is None:
            return None
        return self._output(token_ids, text, logprobs)

    def _end_as_reported(self, ended_by: str, token_ids: list[int]) -> str:
        """End as the server reports, if the tokens do not show the end yet."""
        if ended_by == "eos" and self._eos_ids:  # not among the ids, but counted like other tokens
            token_id = min(self._eos_ids)
            token_ids.append(token_id)
            return self.text.read(token_id)
        # For answers in text, the server's count differs from ours.
        if ended_by == "length" and self._answer is None and self.text.produced_tokens < self.params.max_tokens:
            raise MalformedEvent(f"it ended at its maximum length after {self.text.produced_tokens} tokens")
        return self.text.end("length" if ended_by == "length" else "stop")

    def _logprobs(self, token_ids: list[int], scored: Sequence[Scored] | None) -> list[TokenLogprob] | None:
        wanted = self.params.logprobs
        if wanted is None:
            return None
        scores = list(scored or ())[: len(token_ids)]
        if len(scores) < len(token_ids):  # for an end token that was not among the ids
            scores += [Scored(0.0)] * (len(token_ids) - len(scores))
        return [self._described(token_id, one, wanted) for token_id, one in zip(token_ids, scores, strict=True)]

    def _described(self, token_id: int, scored: Scored, wanted: int) -> TokenLogprob:
        text_of, bytes_of = self._tokens.text_of, self._tokens.bytes_of
        alternatives = list(scored.top)[:wanted]
        top = tuple((id_, text_of(id_), logprob, bytes_of(id_)) for id_, logprob in alternatives)
        return TokenLogprob(token_id, text_of(token_id), scored.logprob, bytes_of(token_id), top)

    def end(self, reason: FinishReason, error: str | None = None) -> SequenceOutput:
        """End the choice without a token."""
        self.text.finish_reason = reason
        output = self._output([], "", None)
        output.error = error
        output.timings = self.clock.timings()
        return output

    def _output(self, token_ids: list[int], text: str, logprobs: list[TokenLogprob] | None) -> SequenceOutput:
        has_ended = self.text.finish_reason is not None and self.clock.scheduled_s is not None
        return SequenceOutput(
            self.request_id,
            self.index,
            token_ids,
            text,
            logprobs,
            self.text.finish_reason,
            self.text.stop_reason,
            cached_tokens=self._cached_tokens,
            timings=self.clock.timings() if has_ended or self.clock.has_first_token else None,
        )
