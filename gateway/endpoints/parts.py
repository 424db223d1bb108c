"""Joins the answers of a call's parts, and records those to be stored.

Choices are numbered like OpenAI's: all of prompt 0, then all of prompt 1, and so on.
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
    """A request of a call: usually the only one; a call with several prompts has one per prompt."""

    call: GenerationCall[Any]
    request: OpenRequest
    answer: RecordedAnswer | None  # records the answer if it is to be stored


class PartsAnswer:
    """Encodes the joined answer of all parts."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """``parts``: in order; more than one only for completions."""
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
        """The request of the first part; the others differ only in the prompt."""
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
                answer.add_whole(prompts[-1].contents, b"")  # completions have no tool calls
        assert isinstance(self._first, CompletionCall)  # noqa: S101
        return self._first.answer_body(answer_id, created, prompts, usage)


def _chunks(part: Part, answer_id: str, created: int) -> Chunks:
    chunks = part.call.chunks(answer_id, created)
    return chunks if part.answer is None else RecordedChunks(chunks, part.answer)


class PartsChunks:
    """``Chunks`` of several requests: each frame is encoded by the chunks of its request."""

    def __init__(self, chunks: Mapping[str, Chunks]) -> None:
        """``chunks``: by request id."""
        self.usage = next(iter(chunks.values())).usage
        self._chunks = chunks

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        return self._chunks[frame.request_id].of(frame)
