"""Reading a request's body with a bound."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.api.errors import BodyTooLarge, ClientDisconnected

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


async def read_body(receive: Receive, content_length: bytes | None, max_bytes: int) -> bytes:
    """Read the whole body, giving up at the bound. Raises BodyTooLarge or ClientDisconnected."""
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
