"""A line as a request: through the gateway's own ASGI application, as if it had come over HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any, Final

from db.accounts.principal import Principal
from gateway.batches.answers import Answer
from gateway.http.pages import PRINCIPAL_KEY

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
_NOBODY: Final = ("127.0.0.1", 0)


def as_batch(principal: Principal) -> Principal:
    """Return the principal whose requests take what interactive ones leave."""
    return replace(principal, key_policy=replace(principal.key_policy, priority="batch"))


async def call(
    application: Application, path: str, body: bytes, principal: Principal, *, deadline_ms: int, gone: asyncio.Event
) -> Answer | None:
    """Make a request and wait for its answer; None: there is none, such as when ``gone`` was set meanwhile."""
    rest: bytes | None = body
    head: Message = {}
    parts: list[bytes] = []
    is_complete = False

    async def receive() -> Message:
        nonlocal rest
        if rest is not None:
            whole, rest = rest, None
            return {"type": "http.request", "body": whole, "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal is_complete
        if message["type"] == "http.response.start":
            head.update(message)
        else:
            parts.append(message.get("body", b""))
            is_complete = not message.get("more_body", False)

    scope: Message = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-spillway-deadline-ms", b"%d" % deadline_ms),
        ],
        "client": _NOBODY,
        "server": None,
        PRINCIPAL_KEY: as_batch(principal),
    }
    await application(scope, receive, send)
    return Answer(head["status"], dict(head.get("headers", ())), b"".join(parts)) if is_complete else None
