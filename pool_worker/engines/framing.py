"""Framings split a streamed body into events: one function each, and their registry. Formats interpret the events."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from typing import Any, Final, Literal

import msgspec

MAX_EVENT_BYTES: Final = 1024 * 1024

Framing = Literal[
    "server-sent events",
    "server-sent events to the close",
    "lines",
    "AWS event stream",
    "server-sent events in an AWS event stream",
]
CLOSED: Final = b'{"closed":true}'  # an event of ours: the body is at its end, and was not cut


class MalformedEvent(Exception):
    """An event violates its format; the rest of the server's answer cannot be trusted."""


class ServerFailure(Exception):
    """The server reports in its stream that the request failed."""


async def sse_events(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event but ``[DONE]``. Raises MalformedEvent for one that is too long."""
    async for line in lines(body):
        data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
        if data and data != b"[DONE]":
            yield data


async def sse_events_to_the_close(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the same, and CLOSED after the last event, if there was any, where nothing else tells the answer's end."""
    has_begun = False
    async for data in sse_events(body):
        has_begun = True
        yield data
    if has_begun:
        yield CLOSED


async def lines(body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield each line that is not empty. Raises MalformedEvent for one that is too long."""
    rest = bytearray()  # of a line whose end has not come: added to, as a copy for each of many small pieces takes long
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
    """Yield the server-sent events whose bytes are the events' payloads, cut anywhere. Raises likewise."""

    async def payloads() -> AsyncIterator[bytes]:
        async for _, payload in _aws_messages(body):
            yield payload

    async for data in sse_events(payloads()):
        yield data


async def _aws_messages(body: AsyncIterable[bytes]) -> AsyncIterator[tuple[str, bytes]]:
    """Yield type and payload of each message of ``application/vnd.amazon.eventstream``."""
    # The extra `aws`, which all other pools do without.
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
