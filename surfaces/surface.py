"""What a surface is: an API that is translated into chats, and back.

    the client's body ──translate──> Translation ──chat──> the body of POST /v1/chat/completions
    pieces of the answer ──EventEncoder──> the client's events;  ──whole──> the client's body

Nothing here reads a clock, draws at random or waits: the same pieces always make the same bytes, however they were
split.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tokens.tools.source import Kind, Piece
from web.errors import ApiError


class Usage(NamedTuple):
    """Token counts of an answer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


class AnswerHead(NamedTuple):
    """What is known of an answer before it begins."""

    answer_id: str  # without a prefix
    created_unix_s: int
    model: str
    prompt_tokens: int
    defaults: Mapping[str, float] = {}  # sampling parameters that the model has where the client names none


class EventEncoder(Protocol):
    """Encodes one streamed answer."""

    def of(self, pieces: Iterable[Piece]) -> bytes:
        """Return the events of the next pieces; may be none."""
        ...

    def end(self, finish_reason: str, usage: Usage) -> bytes:
        """Return the events at the end of an answer that ended well. ``finish_reason``: a chat's."""
        ...

    @property
    def last(self) -> bytes:
        """The very last event, once all that it tells is sure; may be empty."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Return the event before a stream is broken off."""
        ...


class Translation(Protocol):
    """One validated body."""

    adapted: set[str]  # names of what was changed or left out, for the client

    @property
    def chat(self) -> dict[str, Any]:
        """The body of the chat."""
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

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        """Return an error as this API has it."""
        ...

    def headers(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the headers that every answer of this API has besides ours."""
        ...


def renamed(error: ApiError, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Return an error's message and the field at fault; ``names``: of fields of the chat, as the client knows them.

    Objects that chats alone have around a field are named "".
    """
    if error.param is None:
        return error.message, None
    parts = (names.get(part, part) for part in error.param.split("."))
    param = ".".join(part for part in parts if part)
    first = error.param.partition(".")[0]
    message = error.message.replace(f"'{error.param}'", f"'{param}'")
    return message.replace(f"'{first}", f"'{names.get(first) or first}"), param


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with those of one kind that follow each other in one; a call never joins another."""
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.kind is found[-1].kind and piece.kind is not Kind.CALL:
            found[-1] = found[-1]._replace(text=found[-1].text + piece.text)
        else:
            found.append(piece)
    return found
