"""How a streamed body is cut into events: one function a framing, and their registry. What they mean is a format's."""

from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Final, Literal

MAX_EVENT_BYTES: Final = 1024 * 1024

Framing = Literal["server-sent events", "server-sent events to the close", "lines"]
CLOSED: Final = b'{"closed":true}'  # an event of ours: the body is at its end, and was not cut


class MalformedEvent(Exception):
    """An event of a stream is not what its format says; the server's answer cannot be trusted any further."""


class ServerFailure(Exception):
    """The server says in its stream that the request failed."""


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
    rest = b""
    async for chunk in body:
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise MalformedEvent(f"an event has more than {MAX_EVENT_BYTES} bytes")
        for line in whole:
            if line.strip():
                yield line.strip()
    if rest.strip():
        yield rest.strip()


FRAMINGS: Final[dict[Framing, Callable[[AsyncIterable[bytes]], AsyncIterator[bytes]]]] = {
    "server-sent events": sse_events,
    "server-sent events to the close": sse_events_to_the_close,
    "lines": lines,
}
