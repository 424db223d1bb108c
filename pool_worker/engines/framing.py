"""How a streamed body is cut into events: one function a framing, and their registry. What they mean is a format's."""

from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Final, Literal

MAX_EVENT_BYTES: Final = 1024 * 1024

Framing = Literal["server-sent events", "lines"]


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
    "lines": lines,
}
