"""The HTTP client of benchmarks and chaos tests: raw protocol callbacks, so it costs far less than what it measures.

During a load it only keeps the pieces of each body, with their arrival times (about 30 µs of CPU for a short request);
``stream_answer`` interprets them afterwards. A server's behavior never raises: an exchange records how it ended. Times
are ``time.monotonic`` seconds.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self, cast

import httptools

HOST: Final = "127.0.0.1"
Ending = Literal["whole", "cut", "idle", "overdue", "left", "unreachable"]


@dataclass(frozen=True, slots=True)
class ReadTimeouts:
    """The limits after which a client gives up."""

    idle_s: float = 60.0  # without a byte: the default of nginx and AWS's load balancers
    total_s: float = 600.0  # the default of the official SDKs


@dataclass(slots=True)
class Exchange:
    """One request and its response."""

    due_s: float  # when it should have been sent; latency counts from here
    ending: Ending = "unreachable"  # "whole": the response ended as HTTP requires; "cut" while it is open
    status: int = 0
    raw_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # (arrival, body bytes)
    ended_s: float = 0.0  # 0.0 while it is open

    @property
    def latency_s(self) -> float:
        """Return the seconds from due to the end, however it ended."""
        return self.ended_s - self.due_s

    @property
    def body(self) -> bytes:
        """The body as far as it has arrived."""
        return b"".join(piece for _, piece in self.pieces)

    @property
    def headers(self) -> dict[str, str]:
        """The response's headers, with names in lower case; empty until they have arrived."""
        return {name.decode().lower(): value.decode() for name, value in self.raw_headers}

    @property
    def request_id(self) -> str | None:
        """The gateway's id of the request; None until the head has arrived."""
        return self.headers.get("x-request-id")


OnPiece = Callable[[Exchange], None]


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, kept alive if the server agrees; it carries one request at a time.

    It drops the headers: a Python call for each would be a third of the client's cost of a short request.
    """

    def __init__(self) -> None:
        self.last_byte_s = time.monotonic()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None  # None: not connected
        self._exchange = Exchange(0.0)
        self._ended: asyncio.Future[Exchange] | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> Self:
        """Connect. Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def send(self, request: bytes, exchange: Exchange) -> asyncio.Future[Exchange]:
        """Send a request and fill ``exchange``; the future yields it once it has ended, successfully or not."""
        self._exchange = exchange
        self._ended = asyncio.get_running_loop().create_future()
        exchange.ending = "cut"  # until it has ended properly
        if self._transport is None:
            self._end(time.monotonic())
        else:
            self._transport.write(request)
        return self._ended

    def close(self) -> None:
        """Disconnect."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, now_s: float) -> None:
        if self._ended is not None and not self._ended.done():
            self._exchange.ended_s = now_s
            self._ended.set_result(self._exchange)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (called by asyncio)."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one, except for its type

    def data_received(self, data: bytes) -> None:
        """Timestamp and parse data (called by asyncio)."""
        self.last_byte_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end(self.last_byte_s)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio fixes the signature
        """Record the end, proper or not (called by asyncio)."""
        self._transport = None
        self._end(time.monotonic())

    def on_body(self, piece: bytes) -> None:
        """Keep a piece of the body (called by the parser)."""
        self._exchange.pieces.append((self.last_byte_s, piece))

    def on_message_complete(self) -> None:
        """Record the status and the proper end (called by the parser)."""
        self._exchange.status = self._parser.get_status_code()
        self._exchange.ending = "whole"
        self._end(self.last_byte_s)


class AttentiveConnection(Connection):
    """A connection that also records status and headers, and reports each piece."""

    def __init__(self) -> None:
        super().__init__()
        self.on_piece: OnPiece | None = None  # called for each piece of the body

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header (called by the parser)."""
        self._exchange.raw_headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Keep the status (called by the parser)."""
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        """Keep a piece of the body, and report it (called by the parser)."""
        super().on_body(piece)
        if self.on_piece is not None:
            self.on_piece(self._exchange)


async def exchange(
    port: int,
    request: bytes,
    patience: ReadTimeouts,
    *,
    record: Exchange | None = None,
    leave: asyncio.Event | None = None,
    on_piece: OnPiece | None = None,
) -> Exchange:
    """Send one request on a new connection, and wait for its end, a timeout, or ``leave``.

    ``record``: filled meanwhile and returned; default: a new one, due now.
    """
    record = Exchange(time.monotonic()) if record is None else record
    try:
        connection = await AttentiveConnection.open(HOST, port)
    except OSError:
        record.ended_s = time.monotonic()
        return record
    connection.on_piece = on_piece
    ended = connection.send(request, record)
    leaving = None if leave is None else asyncio.create_task(_leave(leave, record, connection), name="leaving")
    try:
        await _wait(connection, ended, record, patience)
    finally:
        if leaving is not None:
            leaving.cancel()
        connection.close()
    record.ended_s = record.ended_s or time.monotonic()
    return record


async def _leave(leave: asyncio.Event, record: Exchange, connection: Connection) -> None:
    await leave.wait()
    if not record.ended_s:
        record.ending = "left"
        connection.close()


async def _wait(
    connection: Connection, ended: asyncio.Future[Exchange], record: Exchange, patience: ReadTimeouts
) -> None:
    end_s = record.due_s + patience.total_s
    while not ended.done():
        idle_end_s = connection.last_byte_s + patience.idle_s
        now_s = time.monotonic()
        if now_s >= min(end_s, idle_end_s):
            record.ending = "overdue" if now_s >= end_s else "idle"
            return
        await asyncio.wait({ended}, timeout=min(end_s, idle_end_s) - now_s)


def post_request(path: str, api_key: str, body: dict[str, Any], **headers: str) -> bytes:
    """Return a complete HTTP request. ``headers``: with ``_`` for ``-``."""
    payload = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {HOST}",
        f"Authorization: Bearer {api_key}",
        "Content-Type: application/json",
        f"Content-Length: {len(payload)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + payload


def get_request(target: str, api_key: str) -> bytes:
    """Return a complete HTTP request without a body. ``target``: path and query."""
    lines = [f"GET {target} HTTP/1.1", f"Host: {HOST}", f"Authorization: Bearer {api_key}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
