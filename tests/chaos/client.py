"""One HTTP exchange with every piece's time of arrival: raw callbacks, so that the client is never the slow part.

Times are ``time.monotonic`` seconds.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httptools


class ConnectionCut(Exception):
    """The connection ended before the answer did."""


@dataclass(slots=True)
class Reply:
    """One answer as it comes in; complete once ``ended_s`` is set."""

    sent_s: float | None = None  # None: nobody was there to send it to
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # (arrival, body bytes)
    ended_s: float | None = None

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    @property
    def request_id(self) -> str | None:
        """The gateway's id of the request; None until the head has come."""
        return self.headers.get("x-request-id")


class _Exchange(asyncio.Protocol):
    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._parser = httptools.HttpResponseParser(self)
        self._now_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionCut(str(exc or "closed before the answer's end")))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self._reply.pieces.append((self._now_s, piece))

    def on_message_complete(self) -> None:
        self._reply.ended_s = self._now_s
        if not self.done.done():
            self.done.set_result(None)


async def exchange(port: int, request: bytes, reply: Reply) -> None:
    """Send a request on a connection of its own and fill ``reply``. Raises ConnectionCut and OSError."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(lambda: _Exchange(reply), "127.0.0.1", port)
    try:
        reply.sent_s = time.monotonic()
        transport.write(request)
        await protocol.done
    finally:
        transport.abort() if reply.ended_s is None else transport.close()


def http_request(path: str, api_key: str, body: dict[str, Any], **headers: str) -> bytes:
    """A whole HTTP request, ready to be written."""
    payload = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: chaos",
        f"Authorization: Bearer {api_key}",
        "Content-Type: application/json",
        f"Content-Length: {len(payload)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + payload
