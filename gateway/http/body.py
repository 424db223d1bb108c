"""Reading a request's body with bounds."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from gateway.errors import BodyTooLarge, ClientDisconnected, RequestTooSlow, UnsupportedEncoding
from gateway.http.compressed import decoded, encoding_of

LARGE_BODY_BYTES: Final = 16 * 1024  # others must not wait while a larger one is read: the worst takes 250 ns a byte

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read_body(
    receive: Receive,
    headers: Mapping[bytes, bytes],
    max_bytes: int,
    limit_s: float,
    whole_body: Callable[[], bytes | None] = lambda: None,
) -> bytes:
    """Read the whole body and decode it, up to the bounds. ``whole_body``: what takes it where it is here already.

    Raises BodyTooLarge, RequestTooSlow, ClientDisconnected, UnsupportedEncoding, and InvalidParameter for a compressed
    body that is broken.
    """
    encoding = encoding_of(headers.get(b"content-encoding", b""))
    body = await _read_sent(receive, headers, max_bytes, limit_s, whole_body)
    return body if encoding is None else await asyncio.to_thread(decoded, body, encoding, max_bytes)


async def _read_sent(
    receive: Receive,
    headers: Mapping[bytes, bytes],
    max_bytes: int,
    limit_s: float,
    whole_body: Callable[[], bytes | None],
) -> bytes:
    here = whole_body()
    if here is not None:
        if len(here) > max_bytes:
            raise _too_large(max_bytes)
        return here
    try:
        async with asyncio.timeout(limit_s):
            return await _read(receive, headers.get(b"content-length"), max_bytes)
    except TimeoutError as error:
        raise RequestTooSlow(f"The request body did not arrive within {limit_s:g} s.") from error


def refuse_compressed(headers: Mapping[bytes, bytes]) -> None:
    """Raise UnsupportedEncoding for a compressed body."""
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
    if encoding.lower() not in {"", "identity"}:
        raise UnsupportedEncoding(f"The body has the content-encoding '{encoding[:100]}': send it uncompressed.")


async def _read(receive: Receive, content_length: bytes | None, max_bytes: int) -> bytes:
    if content_length is not None and content_length.isdigit() and int(content_length) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body may have at most {max_bytes} bytes.")
