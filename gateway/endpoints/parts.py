"""Writing the answers to a call's parts as one, and recording those that are to be kept.

Choices of several prompts are numbered as OpenAI does: prompt 0's first, then prompt 1's.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.api.answers import CompleteAnswer
from gateway.api.calls import CompletionCall, GenerationCall
from gateway.api.schema import GenerationRequest
from gateway.dispatch.lifecycle import OpenRequest
from gateway.payloads import RecordedAnswer, RecordedChunks
from gateway.request.mailbox import AnyTokens, Chunks
from protocol.job import Deltas, Tokens


class Part(NamedTuple):
    """One of a call's requests: usually there is one, of several prompts each has its own."""

    call: GenerationCall[Any]
    request: OpenRequest
    answer: RecordedAnswer | None  # what remembers its answer, where that is to be kept


class PartsAnswer:
    """Encodes the one answer to all parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """``parts``: in their order; several are of plain completions."""
        self._parts = parts
        self._first = parts[0].call
        self.error_event = self._first.error_event
        self.before_end = self._first.before_end

    @property
    def done(self) -> bytes:
        """Implement ``AnswerEncoder``."""
        return self._first.done

    @property
    def request(self) -> GenerationRequest:
        """The first part's: they differ in the prompt alone."""
        request: GenerationRequest = self._first.request
        return request

    def chunks(self, answer_id: str, created: int) -> Chunks:
        """Implement ``AnswerEncoder``."""
        chunks = {part.request.request_id: _chunks(part, answer_id, created) for part in self._parts}
        return chunks[self._parts[0].request.request_id] if len(chunks) == 1 else PartsChunks(chunks)

    async def whole(
        self, answer_id: str, created: int, frames: Iterable[AnyTokens], usage: dict[str, Any]
    ) -> CompleteAnswer:
        """Implement ``AnswerEncoder``."""
        if len(self._parts) > 1:
            return await self._whole_of_several(answer_id, created, frames, usage)
        [(call, _, answer)] = self._parts
        whole = await call.whole(answer_id, created, frames, usage)
        if answer is not None:
            answer.add_whole(whole.contents, whole.body)
        return whole

    async def _whole_of_several(
        self, answer_id: str, created: int, frames: Iterable[AnyTokens], usage: dict[str, Any]
    ) -> CompleteAnswer:
        by_request: dict[str, list[AnyTokens]] = {part.request.request_id: [] for part in self._parts}
        for frame in frames:
            by_request[frame.request_id].append(frame)
        prompts = []
        for call, request, answer in self._parts:
            assert isinstance(call, CompletionCall)  # noqa: S101  # no other has several
            prompts.append(await call.rows(by_request.pop(request.request_id)))
            if answer is not None:
                answer.add_whole(prompts[-1].contents, b"")  # a completion calls no tools
        assert isinstance(self._first, CompletionCall)  # noqa: S101
        return self._first.answer_body(answer_id, created, prompts, usage)


def _chunks(part: Part, answer_id: str, created: int) -> Chunks:
    chunks = part.call.chunks(answer_id, created)
    return chunks if part.answer is None else RecordedChunks(chunks, part.answer)


class PartsChunks:
    """``Chunks`` of several requests, each frame's by its own."""

    def __init__(self, chunks: Mapping[str, Chunks]) -> None:
        """``chunks``: by request id."""
        self.usage = next(iter(chunks.values())).usage
        self._chunks = chunks

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        return self._chunks[frame.request_id].of(frame)
