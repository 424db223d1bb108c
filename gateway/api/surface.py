"""What a surface is: an API that is translated into chats, and back.

    the client's body ──translate──> Translation ──chat──> the body of POST /v1/chat/completions
    pieces of the answer ──EventEncoder──> the client's events;  ──whole──> the client's body

Nothing here reads a clock, draws at random or waits: the same pieces always make the same bytes, however they were
split.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from gateway.errors import ApiError
from protocol.dialects.source import Kind, Piece


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

    def field_name(self, name: str) -> str:
        """Return what this API calls a field of a chat."""
        ...

    def headers(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the headers that every answer of this API has besides ours."""
        ...


def field_name(param: str, names: Mapping[str, str]) -> str:
    """Return what the client calls a field of the chat.

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


def renamed(error: ApiError, names: Mapping[str, str]) -> tuple[str, str | None]:
    """Return an error's message and the field at fault, as the client knows it; ``names``: see ``field_name``."""
    if error.param is None:
        return error.message, None
    first = error.param.partition(".")[0]
    mentioned = rf"(?<=')({re.escape(first)}(?:\.[^\s']+)?)(?=')"  # it, or what is around it
    if first != error.param:
        mentioned += rf"|(?<![\w.']){re.escape(error.param)}(?![\w'])"
    message = re.sub(mentioned, lambda found: field_name(found.group(), names), error.message)
    return message, field_name(error.param, names)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with those of one kind that follow each other in one; a call never joins another."""
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.kind is found[-1].kind and piece.kind is not Kind.CALL:
            found[-1] = found[-1]._replace(text=found[-1].text + piece.text)
        else:
            found.append(piece)
    return found
