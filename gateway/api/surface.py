"""Surfaces: APIs that are translated to chats and back.

    the client's body ──translate──> Translation ──chat──> the body of POST /v1/chat/completions
    pieces of the answer ──EventEncoder──> the client's events;  ──whole──> the client's body

Nothing here reads a clock, draws at random or waits: the same pieces always make the same bytes, however they were
split.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from gateway.api.answers import CollectedChoice, CompleteAnswer, gather
from gateway.api.calls import ChatCall
from gateway.api.events import PieceReader, pieces_of
from gateway.api.fields import encode_json
from gateway.api.sampling import form_of_parts
from gateway.errors import Refused
from gateway.request.mailbox import AnyTokens, Chunks
from gateway.tokenizing.model_tokens import ModelTokens
from protocol.dialects.dialect import AnswerForm
from protocol.dialects.source import Kind, Piece
from protocol.job import Deltas, Tokens


class Usage(NamedTuple):
    """Token counts of an answer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


class AnswerHead(NamedTuple):
    """Fields of an answer that are known before it begins."""

    answer_id: str  # without a prefix
    created_unix_s: int
    model: str
    prompt_tokens: int
    defaults: Mapping[str, float] = {}  # the model's defaults for omitted sampling parameters


class EventEncoder(Protocol):
    """Encodes one streamed answer."""

    def of(self, pieces: Iterable[Piece]) -> bytes:
        """Return the events of the next pieces; may be empty."""
        ...

    def end(self, finish_reason: str, usage: Usage) -> bytes:
        """Return the events at the end of a successful answer. ``finish_reason``: of the chat."""
        ...

    @property
    def last(self) -> bytes:
        """Return the final event, sent after the answer is recorded; may be empty."""
        ...

    def failed(self, error: Refused) -> bytes:
        """Return the event sent before a stream is aborted."""
        ...


class Translation(Protocol):
    """One validated body."""

    adapted: set[str]  # names of changed or omitted fields, for the client
    misspelt: Mapping[str, str]  # unknown fields, each with the known field that it resembles

    @property
    def chat(self) -> dict[str, Any]:
        """Body of the chat."""
        ...

    def events(self, head: AnswerHead) -> EventEncoder:
        """Return the encoder of a streamed answer."""
        ...

    def whole(self, head: AnswerHead, pieces: Sequence[Piece], finish_reason: str, usage: Usage) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        ...


class Surface(Protocol):
    """One API."""

    name: str  # as in RequestRecord.endpoint

    def translate(self, body: bytes) -> Translation:
        """Validate a body. Raises MalformedJson or InvalidParameter."""
        ...

    def error_body(self, error: Refused, request_id: str) -> bytes:
        """Return an error in the format of this API."""
        ...

    def field_name(self, name: str) -> str:
        """Return this API's name for a field of a chat."""
        ...

    def headers(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the additional headers of every answer of this API."""
        ...


def field_name(param: str, names: Mapping[str, str]) -> str:
    """Return the client's name for a field of the chat.

    ``names``: of those fields that the client knows by others, with ``*`` for each index. A field inside one of them
    keeps the rest of its name.
    """
    parts = param.split(".")
    for length in range(len(parts), 0, -1):
        known = names.get(".".join("*" if part.isdecimal() else part for part in parts[:length]))
        if known is not None:
            indexes = iter([part for part in parts[:length] if part.isdecimal()])
            return ".".join([next(indexes) if part == "*" else part for part in known.split(".")] + parts[length:])
    return param


def renamed(error: Refused, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Return an error's message and field with the client's field names; ``names``: see ``field_name``."""
    if error.param is None:
        return error.message, None
    first = error.param.partition(".")[0]
    mentioned = rf"(?<=')({re.escape(first)}(?:\.[^\s']+)?)(?=')"  # the field or its parent
    if first != error.param:
        mentioned += rf"|(?<![\w.']){re.escape(error.param)}(?![\w'])"
    message = re.sub(mentioned, lambda found: field_name(found.group(), names), error.message)
    return message, field_name(error.param, names)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join consecutive pieces of the same kind; calls are never joined."""
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.kind is found[-1].kind and piece.kind is not Kind.CALL:
            found[-1] = found[-1]._replace(text=found[-1].text + piece.text)
        else:
            found.append(piece)
    return found


# --- surface calls ----------------------------------------------------------------------------------------------------
#
# Calls of other APIs: chats, translated by a surface in both directions.

UNKNOWN_REASON: Final = "stop"  # of a choice whose last frame has no reason


class SurfaceCall(ChatCall):
    """A validated body of another API."""

    def __init__(self, surface: Surface, body: bytes) -> None:
        """Validate ``body``. Raises MalformedJson or InvalidParameter."""
        self.name = surface.name
        self._translation: Translation = surface.translate(body)
        self._prompt_tokens = 0
        self._events: EventEncoder | None = None
        chat = {name: value for name, value in self._translation.chat.items() if value is not None}
        super().__init__(encode_json(chat))
        self.misspelt = self._translation.misspelt
        self.adapted |= self._translation.adapted

    async def encode_prompt(self, tokens: ModelTokens) -> list[int]:
        """Implement ``Call``."""
        prompt_ids = await super().encode_prompt(tokens)
        self._prompt_tokens = len(prompt_ids)
        return prompt_ids

    def chunks(self, answer_id: str, created: int) -> Chunks:
        """Implement ``Call``."""
        self._events = self._translation.events(self._head(answer_id, created))
        return _SurfaceChunks(self._events, self._piece_form, answer_id)

    @property
    def done(self) -> bytes:
        """Implement ``AnswerEncoder``."""
        return b"" if self._events is None else self._events.last

    def error_event(self, error: Refused) -> bytes:
        """Implement ``AnswerEncoder``."""
        events = self._events or self._translation.events(self._head("", 0))
        return events.failed(error)

    async def whole(
        self, answer_id: str, created: int, frames: Iterable[AnyTokens], usage: dict[str, Any]
    ) -> CompleteAnswer:
        """Implement ``Call``."""
        [choice] = await gather(frames, 1)
        reader = PieceReader(self._piece_form)
        pieces = [*_pieces_of(choice, reader, answer_id)]
        counted = _usage(usage, choice.reasoning_tokens + reader.reasoning_tokens_of(choice.frames))
        head = self._head(answer_id, created)
        body = self._translation.whole(head, pieces, choice.finish_reason or UNKNOWN_REASON, counted)
        await self.before_end(body)
        return CompleteAnswer(encode_json(body), [], [choice.content])

    @property
    def _piece_form(self) -> AnswerForm:
        return form_of_parts(self.request) if self._parts_form is None else self._parts_form

    def _head(self, answer_id: str, created: int) -> AnswerHead:
        return AnswerHead(answer_id, created, self.request.model, self._prompt_tokens, self._defaults)


class SurfaceCalls:
    """Creates the calls of one surface."""

    def __init__(self, surface: Surface) -> None:
        self.surface = surface
        self.name = surface.name

    def __call__(self, body: bytes) -> SurfaceCall:
        """Validate a body. Raises MalformedJson or InvalidParameter."""
        return SurfaceCall(self.surface, body)


class _SurfaceChunks:
    """The events of one streamed answer."""

    def __init__(self, events: EventEncoder, form: AnswerForm, answer_id: str) -> None:
        self._events = events
        self._reader = PieceReader(form)
        self._call_ids = _CallIds(form.new_call_id, answer_id)
        self._finish_reason = UNKNOWN_REASON

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        self._finish_reason = frame.finish_reason or self._finish_reason
        return self._events.of(self._call_ids.named(self._reader.pieces(frame)))

    def usage(self, usage: dict[str, Any], attempts: int) -> bytes:
        """Implement ``Chunks``: return the last events, including usage."""
        del attempts  # sent as a comment
        return self._events.end(self._finish_reason, _usage(usage, self._reader.reasoning_tokens()))


class _CallIds:
    """Ids of an answer's calls: in the model's format, and deterministic for every encoding of the answer."""

    def __init__(self, new_call_id: Callable[[], str], answer_id: str) -> None:
        self._new_call_id = new_call_id
        self._answer_id = answer_id
        self._count = 0

    def named(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        """Add ids to calls that have none."""
        for piece in pieces:
            yield piece._replace(call_id=self._next()) if piece.kind is Kind.CALL and not piece.call_id else piece

    def _next(self) -> str:
        self._count += 1
        prefix, mark, random = self._new_call_id().rpartition("_")
        digest = hashlib.sha256(f"{self._answer_id}.{self._count}".encode()).hexdigest()
        return f"{prefix}{mark}{digest[: len(random)]}"


def _pieces_of(choice: CollectedChoice, reader: PieceReader, answer_id: str) -> Iterable[Piece]:
    """Return the pieces of a complete choice, from its text and parts."""
    text = reader.parser.push("".join(choice.texts), is_last=True)
    later = pieces_of(choice.parts, calls_before=0, is_single_call=reader.parser.form.is_single_call)
    return _CallIds(reader.parser.form.new_call_id, answer_id).named((*text, *later))


def _usage(usage: dict[str, Any], reasoning_tokens: int) -> Usage:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Usage(usage["prompt_tokens"], cached, usage["completion_tokens"], reasoning_tokens)
