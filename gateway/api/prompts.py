"""POST /v1/completions, also with several prompts: each is a request of its own, and their answers are written as one.

Choices are numbered as OpenAI does: prompt 0's first, then prompt 1's. All are admitted together, or none is; the first
that fails ends them all (``gateway.dispatch.group``).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.api.answers import CompleteAnswer
from gateway.api.calls import CompletionCall
from gateway.api.endpoint import JobSpec
from gateway.api.generation import GenerationEndpoint, capture_of
from gateway.api.schema import CompletionRequest
from gateway.dispatch.group import RequestGroup
from gateway.dispatch.request import OpenRequest
from gateway.http.exchange import Exchange
from gateway.limits.request_limits import check_prompts
from gateway.payloads.answers import RecordedAnswer, RecordedChunks
from gateway.request.chunks import Chunks
from gateway.request.mailbox import AnyTokens
from gateway.request.states import State
from protocol.chat import Deltas
from protocol.messages import Tokens
from tokens.model_tokens import ModelTokens


class CompletionsEndpoint(GenerationEndpoint[CompletionCall]):
    """An ASGI application for plain completions."""

    def _calls(self, body: bytes) -> Sequence[CompletionCall]:
        return CompletionCall(body).parts()

    async def _works(self, calls: Sequence[CompletionCall], tokens: ModelTokens) -> Sequence[JobSpec]:
        check_prompts(self._services.settings.limits, len(calls))
        return await super()._works(calls, tokens)

    async def _write_answer(
        self, exchange: Exchange, calls: Sequence[CompletionCall], requests: Sequence[OpenRequest]
    ) -> None:
        if len(requests) == 1:
            await super()._write_answer(exchange, calls, requests)
            return
        group = RequestGroup(requests)
        parts = {
            request.request_id: Part(call, request, self._new_answer(request))
            for call, request in zip(calls, requests, strict=True)
        }
        try:
            await self._write(exchange, MultiPromptAnswer(parts), group, None)
        finally:
            if group.state is State.ENDED and group.outcome == "ok":
                self._keep(parts.values())

    def _new_answer(self, request: OpenRequest) -> RecordedAnswer | None:
        wanted = request.admission.consent is not None
        return self._services.payloads.new_answer(len(request.choices)) if wanted else None

    def _keep(self, parts: Iterable["Part"]) -> None:
        for call, request, answer in parts:
            consent = request.admission.consent
            if consent is not None and answer is not None and answer.is_complete:
                self._services.payloads.take(capture_of(call, request, consent, answer))


class Part(NamedTuple):
    """One prompt."""

    call: CompletionCall
    request: OpenRequest
    answer: RecordedAnswer | None  # what remembers its answer, where that is to be kept


class MultiPromptAnswer:
    """See ``gateway.api.calls.AnswerEncoder``: makes the one answer to several prompts."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        """``parts``: by the ids of their requests, in the order of the prompts."""
        self._parts = parts
        self._first = next(iter(parts.values())).call

    @property
    def request(self) -> CompletionRequest:
        """The first prompt's: they differ in nothing else."""
        return self._first.request

    def chunks(self, answer_id: str, created: int) -> Chunks:
        """See AnswerEncoder."""
        return MultiPromptChunks({name: _chunks(part, answer_id, created) for name, part in self._parts.items()})

    async def whole(
        self, answer_id: str, created: int, frames: Iterable[AnyTokens], usage: dict[str, Any]
    ) -> CompleteAnswer:
        """See AnswerEncoder."""
        by_request: dict[str, list[AnyTokens]] = {name: [] for name in self._parts}
        for frame in frames:
            by_request[frame.request_id].append(frame)
        prompts = []
        for name, (call, _, answer) in self._parts.items():
            prompts.append(await call.rows(by_request.pop(name)))
            if answer is not None:
                answer.add_whole(prompts[-1].told, b"")  # a completion calls no tools
        return self._first.whole_of(answer_id, created, prompts, usage)


def _chunks(part: Part, answer_id: str, created: int) -> Chunks:
    chunks = part.call.chunks(answer_id, created)
    return chunks if part.answer is None else RecordedChunks(chunks, part.answer)


class MultiPromptChunks:
    """``Chunks`` of several requests, each frame's by its own."""

    def __init__(self, chunks: Mapping[str, Chunks]) -> None:
        """``chunks``: by request id."""
        self.usage = next(iter(chunks.values())).usage
        self._chunks = chunks

    def of(self, frame: Tokens | Deltas) -> bytes:
        """See Chunks."""
        return self._chunks[frame.request_id].of(frame)
