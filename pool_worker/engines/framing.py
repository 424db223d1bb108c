"""Framings split a streamed body into events: one function each, and their registry. Formats interpret the events."""

import codecs
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from protocol.wire import UNDECODABLE

MAX_EVENT_BYTES: Final = 1024 * 1024

Framing = Literal[
    "server-sent events",
    "server-sent events to the close",
    "lines",
    "AWS event stream",
    "server-sent events in an AWS event stream",
]
CLOSED: Final = b'{"closed":true}'  # synthetic event: the body ended without being cut
DONE: Final = b"[DONE]"  # sent by servers instead of a last event; unlike all other events, not a JSON object
SHOWN_BYTES: Final = 200  # of a non-event, in the error


class MalformedEvent(Exception):
    """An event violates its format; the rest of the server's answer cannot be trusted."""


class ServerFailure(Exception):
    """The server reports in its stream that the request failed. ``status``: the matching HTTP status, if known."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


async def sse_events(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event, and DONE for ``[DONE]``.

    Events are read as WHATWG specifies them (https://html.spec.whatwg.org/multipage/server-sent-events.html), and three
    deviations of servers are accepted: no blank line between events, none after the last, and JSON instead of a stream.
    Raises MalformedEvent for an event that is too long, and for an answer without events that is not JSON, such as a
    page.
    """
    lines_of_body = _sse_lines(body)
    event, has_begun, ignored = _SseEvent(), False, b""
    async for line in lines_of_body:
        if not (has_begun or ignored) and line.lstrip()[:1] in {b"{", b"["}:
            async for document in _documents(line, lines_of_body):
                yield document
            return
        if not event.continues_with(line) and (data := event.take()) is not None:
            has_begun = True
            yield data
        if not event.read(line):
            ignored = ignored or line[:SHOWN_BYTES]
    if (data := event.take()) is not None:
        yield data
    elif ignored and not has_begun:
        raise MalformedEvent(f"it has no event and begins with {ignored.decode(errors='replace')!r}")


class _SseEvent:
    """The lines of one event."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._bytes = 0
        self._is_error = False

    def continues_with(self, line: bytes) -> bool:
        """Return whether a line belongs to the current event, for servers that omit blank lines."""
        if not line:
            return False
        return len(self._data) != 1 or line.startswith(b":") or not _is_whole(self._data[0])

    def read(self, line: bytes) -> bool:
        """Add a line; return False if it is not an event's line. Raises MalformedEvent for too long an event."""
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._bytes += len(value)
            if self._bytes > MAX_EVENT_BYTES:
                raise MalformedEvent(f"an event has more than {MAX_EVENT_BYTES} bytes")
        elif name == b"event":
            self._is_error = value.strip() == b"error"
        elif name == b"error":  # a custom field of llama.cpp
            self._data, self._is_error = [value.strip()], True
        return name in {b"", b"data", b"event", b"error", b"id", b"retry"}

    def take(self) -> bytes | None:
        """Return the event's data, None if it has none, and begin the next event."""
        data, is_error = b"\n".join(self._data).strip(), self._is_error
        self._data, self._bytes, self._is_error = [], 0, False
        if not data:
            return None
        if is_error:
            return _error_event(data)
        return DONE if data == b"[DONE]" else data


def _is_whole(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except UNDECODABLE:
        return data.strip() == b"[DONE]"
    return True


def _error_event(data: bytes) -> bytes:
    """Return an event of the type ``error`` as one with the field ``error``."""
    try:
        decoded = msgspec.json.decode(data)
    except UNDECODABLE:
        decoded = data.decode(errors="replace")
    if isinstance(decoded, dict) and decoded.get("error") is not None:
        return data
    return msgspec.json.encode({"error": decoded})


async def _sse_lines(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield each line without its end (CR, LF or both) and without a byte order mark before the first."""
    is_first, is_after_cr = True, False
    rest = bytearray()  # of an unfinished line: a bytearray, because copying for each small piece is slow
    async for piece in body:
        chunk = piece.removeprefix(b"\n") if is_after_cr else piece
        is_after_cr = chunk.endswith(b"\r") if chunk else is_after_cr and not piece
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *whole, last = chunk.split(b"\n")
        if whole:
            whole[0] = bytes(rest + whole[0])
            rest.clear()
        rest += last
        if len(rest) > MAX_EVENT_BYTES:
            raise MalformedEvent(f"an event has more than {MAX_EVENT_BYTES} bytes")
        for line in whole:
            yield line.removeprefix(codecs.BOM_UTF8) if is_first else line
            is_first = False
    if rest:
        yield bytes(rest).removeprefix(codecs.BOM_UTF8) if is_first else bytes(rest)


async def _documents(first: bytes, more: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield JSON sent instead of events: an object per line, one object over all lines, or a list of objects."""
    if first.lstrip()[:1] == b"{" and _is_whole(first):
        yield first
        async for line in more:
            if line.strip():
                yield line
        return
    document = bytearray(first)
    async for line in more:
        document += b"\n" + line
        if len(document) > MAX_EVENT_BYTES:
            raise MalformedEvent(f"an event has more than {MAX_EVENT_BYTES} bytes")
    if document.lstrip()[:1] == b"{":
        yield bytes(document)
        return
    try:
        elements = msgspec.json.decode(document, type=list[msgspec.Raw])
    except UNDECODABLE as error:
        raise MalformedEvent(f"its JSON is truncated or malformed: {error}") from error
    for element in elements:
        yield bytes(element)


async def sse_events_to_the_close(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield events like ``sse_events``, and CLOSED after the last, if only the close of the stream ends an answer."""
    has_begun = False
    async for data in sse_events(body):
        has_begun = True
        if data != DONE:
            yield data
    if has_begun:
        yield CLOSED


async def lines(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield each non-empty line. Raises MalformedEvent for one that is too long."""
    rest = bytearray()  # of an unfinished line: a bytearray, because copying for each small piece is slow
    async for chunk in body:
        *whole, last = chunk.split(b"\n")
        if whole:
            whole[0] = bytes(rest + whole[0])
            rest.clear()
        rest += last
        if len(rest) > MAX_EVENT_BYTES:
            raise MalformedEvent(f"an event has more than {MAX_EVENT_BYTES} bytes")
        for line in whole:
            if line.strip():
                yield line.strip()
    if rest.strip():
        yield bytes(rest.strip())


async def aws_events(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield ``{"type": payload}`` for each event. Raises MalformedEvent, and ServerFailure for an exception."""
    async for kind, payload in _aws_messages(body):
        yield b"{" + msgspec.json.encode(kind) + b":" + (payload or b"{}") + b"}"


async def sse_events_in_aws_events(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the server-sent events in the payloads of AWS events, split at arbitrary places. Raises likewise."""

    async def payloads() -> AsyncIterator[bytes]:
        async for _, payload in _aws_messages(body):
            yield payload

    async for data in sse_events(payloads()):
        yield data


async def _aws_messages(body: AsyncIterable[bytes]) -> AsyncIterator[tuple[str, bytes]]:
    """Yield type and payload of each message of ``application/vnd.amazon.eventstream``."""
    # Needs the extra `aws`, which other pools do not.
    from botocore.eventstream import EventStreamBuffer, ParserError  # noqa: PLC0415

    buffer = EventStreamBuffer()
    unread_bytes = 0
    async for chunk in body:
        buffer.add_data(chunk)
        unread_bytes += len(chunk)
        try:
            for message in buffer:
                unread_bytes -= message.prelude.total_length
                yield _aws_type(message.headers, message.payload), message.payload
        except ParserError as error:
            raise MalformedEvent(str(error)) from error
        if unread_bytes > MAX_EVENT_BYTES:
            raise MalformedEvent(f"an event has more than {MAX_EVENT_BYTES} bytes")


def _aws_type(headers: Mapping[str, Any], payload: bytes) -> str:
    if headers.get(":message-type") == "error":
        raise ServerFailure(f"{headers.get(':error-code')}: {headers.get(':error-message')}")
    if headers.get(":message-type") == "exception":
        raise ServerFailure(f"{headers.get(':exception-type')}: {payload.decode(errors='replace')}")
    return str(headers.get(":event-type"))


FRAMINGS: Final[dict[Framing, Callable[[AsyncIterable[bytes]], AsyncIterator[bytes]]]] = {
    "server-sent events": sse_events,
    "server-sent events to the close": sse_events_to_the_close,
    "lines": lines,
    "AWS event stream": aws_events,
    "server-sent events in an AWS event stream": sse_events_in_aws_events,
}
