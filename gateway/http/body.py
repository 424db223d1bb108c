"""Reads request bodies within limits."""

import asyncio
import io
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import zstandard

from gateway.errors import (
    BodyTooLarge,
    ClientDisconnected,
    InvalidParameter,
    Overloaded,
    RequestTooSlow,
    UnsupportedEncoding,
)
from gateway.http.asgi import Receive
from gateway.settings import LimitSettings

# --- compressed -------------------------------------------------------------------------------------------------------
#
# Compressed request bodies: gzip and zstd, decoded within limits to stop decompression bombs.

ENCODINGS: Final = {"gzip": "gzip", "x-gzip": "gzip", "zstd": "zstd"}
MAX_RATIO: Final = 100  # decoded bytes per sent byte, above FREE_BYTES
FREE_BYTES: Final = 1024 * 1024  # decoded bytes that are allowed at any ratio
MAX_PARTS: Final = 64  # members or frames of one body: each copies the rest of the body
MAX_WINDOW_BYTES: Final = 8 * 1024 * 1024  # of zstd, the limit of RFC 9659
_GZIP_WBITS: Final = 31


def encoding_of(header: bytes) -> str | None:
    """Return the coding of a content-encoding header; None: not encoded. Raises UnsupportedEncoding."""
    name = header.decode("latin-1").strip().lower()
    if name in {"", "identity"}:
        return None
    if name not in ENCODINGS:
        raise UnsupportedEncoding(
            f"The content-encoding '{name[:100]}' is not supported. Send the body uncompressed, or as gzip or zstd."
        )
    return ENCODINGS[name]


def most_decoded_bytes(sent_bytes: int, max_bytes: int) -> int:
    """Return the maximum decoded size of a compressed body."""
    return min(max_bytes, max(FREE_BYTES, MAX_RATIO * sent_bytes))


def decoded(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decode a complete body. Raises BodyTooLarge, and InvalidParameter for an invalid encoding."""
    limit = most_decoded_bytes(len(body), max_bytes)
    try:
        plain = _of_gzip(body, limit) if encoding == "gzip" else _of_zstd(body, limit)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise InvalidParameter(f"The body is not valid {encoding}: {error}") from error
    if len(plain) <= limit:
        return plain
    if limit == max_bytes:
        raise BodyTooLarge(f"The request body may have at most {max_bytes} bytes after decoding.")
    raise BodyTooLarge(f"The request body may expand to at most {MAX_RATIO} times its size when decoded.")


def _of_gzip(body: bytes, limit: int) -> bytes:
    plain, rest = bytearray(), body
    parts = 0
    while rest:
        parts = _one_more(parts)
        decoder = zlib.decompressobj(_GZIP_WBITS)
        plain += decoder.decompress(rest, limit + 1 - len(plain))  # decodes at most this many bytes
        if len(plain) > limit:
            break
        if not decoder.eof:
            raise EOFError("it is truncated")
        rest = decoder.unused_data
    return bytes(plain)


def _of_zstd(body: bytes, limit: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
        begun = reader.read(limit + 1)
    if len(begun) > limit:
        return begun
    # The reader limits its output but accepts truncated frames, so check the frame again; its size is known to be fine.
    plain, rest = bytearray(), body
    parts = 0
    while rest:
        parts = _one_more(parts)
        decoder = decompressor.decompressobj()
        plain += decoder.decompress(rest)
        if not decoder.eof:
            raise EOFError("it is truncated")
        rest = decoder.unused_data
    return bytes(plain)


def _one_more(parts: int) -> int:
    if parts == MAX_PARTS:
        raise EOFError(f"it has more than {MAX_PARTS} members or frames")
    return parts + 1


# --- byte room --------------------------------------------------------------------------------------------------------
#
# A memory budget that tenants share.


class MemoryBudget:
    """A memory budget. A tenant can hold at most as much as it leaves free. Use only from the event loop."""

    def __init__(self, max_bytes: int, limit_s: float) -> None:
        """``limit_s``: maximum wait for memory."""
        self._max_bytes = max_bytes
        self._limit_s = limit_s
        self._by_tenant: Counter[str] = Counter()  # bytes
        self._total = 0
        self._waiting: deque[asyncio.Future[None]] = deque()  # at most one per connection

    @asynccontextmanager
    async def held(self, tenant: str, size: int, what: str) -> AsyncIterator[None]:
        """Hold bytes. Raises Overloaded if they are not free in time. ``what``: names their purpose in the error."""
        await self._enter(tenant, size, what)
        try:
            yield
        finally:
            self._leave(tenant, size)

    async def _enter(self, tenant: str, size: int, what: str) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                while not self._has_room(tenant, size):
                    turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.append(turn)
                    await turn
        except TimeoutError as error:
            raise Overloaded(f"There was no memory to read {what} within {self._limit_s:g} s.") from error
        self._total += size
        self._by_tenant[tenant] += size

    def _has_room(self, tenant: str, size: int) -> bool:
        """Return whether the tenant would hold no more than it leaves free, as in admission."""
        return self._by_tenant[tenant] + size <= self._max_bytes - self._total - size

    def _leave(self, tenant: str, size: int) -> None:
        self._total -= size
        self._by_tenant[tenant] -= size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        waiting, self._waiting = self._waiting, deque()
        for turn in waiting:  # wake all: the first waiter's tenant must not block other tenants
            if not turn.done():
                turn.set_result(None)


# --- body -------------------------------------------------------------------------------------------------------------

LARGE_BODY_BYTES: Final = 16 * 1024  # larger ones would block the event loop: up to 250 ns per byte


async def read_body(
    receive: Receive,
    headers: Mapping[bytes, bytes],
    max_bytes: int,
    limit_s: float,
    whole_body: Callable[[], bytes | None] = lambda: None,
) -> bytes:
    """Read and decode the body within the limits. ``whole_body``: returns the body if it has already arrived.

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
        raise UnsupportedEncoding(
            f"The content-encoding '{encoding[:100]}' is not supported here. Send the body uncompressed."
        )


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


# --- body reader ------------------------------------------------------------------------------------------------------
#
# Bodies of hot requests of all connections, within one memory budget.
#
# While there is no memory for a body, its connection is not read: the sender waits instead of failing.


class BodyReader:
    """Reads bodies. Use only from the event loop."""

    def __init__(self, limits: LimitSettings, limit_s: float) -> None:
        """``limit_s``: maximum wait for memory, and again for the body to arrive."""
        self._max_body_bytes = limits.max_body_bytes
        # Otherwise the largest body would never fit.
        self._room = MemoryBudget(max(limits.max_reading_bytes, 2 * limits.max_body_bytes), limit_s)
        self._limit_s = limit_s

    async def read(
        self,
        tenant: str,
        receive: Receive,
        headers: Mapping[bytes, bytes],
        whole_body: Callable[[], bytes | None] = lambda: None,
    ) -> bytes:
        """Read a body. ``whole_body``: returns a small body if it has already arrived.

        Raises like ``read_body``, and Overloaded if there is no memory in time.
        """
        size = self._most(headers)
        if size <= LARGE_BODY_BYTES:  # small enough to need no budget: connections are limited
            return await read_body(receive, headers, self._max_body_bytes, self._limit_s, whole_body)
        async with self._room.held(tenant, size, "the request's body"):
            return await read_body(receive, headers, self._max_body_bytes, self._limit_s)

    def _most(self, headers: Mapping[bytes, bytes]) -> int:
        length = headers.get(b"content-length", b"")
        if not length.isdigit():
            return self._max_body_bytes
        if headers.get(b"content-encoding"):
            return most_decoded_bytes(int(length), self._max_body_bytes)
        return min(int(length), self._max_body_bytes)
