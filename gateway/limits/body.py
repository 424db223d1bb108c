"""Reading a request's body with bounds."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.api.errors import BodyTooLarge, BodyTooSlow, ClientDisconnected

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read_body(receive: Receive, content_length: bytes | None, max_bytes: int, limit_s: float) -> bytes:
    """Read the whole body, giving up at the bounds. Raises BodyTooLarge, BodyTooSlow or ClientDisconnected."""
    try:
        async with asyncio.timeout(limit_s):
            return await _read(receive, content_length, max_bytes)
    except TimeoutError as error:
        raise BodyTooSlow(f"The request body did not arrive within {limit_s:g} s.") from error


async def _read(receive: Receive, content_length: bytes | None, max_bytes: int) -> bytes:
    too_large = BodyTooLarge(f"The request body may have at most {max_bytes} bytes.")
    if content_length is not None and content_length.isdigit() and int(content_length) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
