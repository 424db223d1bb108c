"""Requests as they come over a connection, in one piece and cut: heads, bodies, and what follows them."""

import asyncio
import logging
import re
import socket
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from gateway.http.server import Connection, Connections
from gateway.settings import ConnectionSettings
from gateway.telemetry.metrics import RequestSeries
from gateway.telemetry.refusal_records import RefusalRecords
from gateway.telemetry.refusals import RefusalLog
from tests.fuzz.driving import cut_bytes
from tests.fuzz.mutations import Form

FORM: Form = "bytes"
TURNS = 12  # of the loop, in which a request is answered

_HOST = b"Host: a\r\n"
SEEDS = [
    b"GET /v1/models?x=%20 HTTP/1.1\r\n" + _HOST + b"Authorization: Bearer k\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\n"
    + _HOST
    + b"Content-Length: 2\r\nContent-Type: application/json\r\n\r\n{}",
    b"POST /v1 HTTP/1.1\r\n" + _HOST + b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\nTrailer: a\r\n\r\n",
    b"POST /v1 HTTP/1.1\r\n" + _HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + _HOST + b"\r\nGET /b HTTP/1.1\r\n" + _HOST + b"Connection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\n" + _HOST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"GET http://a/b%41?c#d HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET * HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + _HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT a:443 HTTP/1.1\r\n" + _HOST + b"\r\nx",
    b"OPTIONS * HTTP/1.1\r\n" + _HOST + b"X-A: \x80\xff\t b \r\nIdempotency-Key: a\r\nIdempotency-Key: b\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + _HOST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\nGET /b HTTP/1.1\r\n" + _HOST + b"\r\n",
    b"GET /\xff HTTP/1.1\r\n" + _HOST + b"\r\n",
]

_seen: list[tuple[Any, ...]] = []
_errors: list[str] = []


class _Errors(logging.Handler):
    """Keeps what is logged as an error: the gateway takes foreign exceptions for its own faults and answers 500."""

    def emit(self, record: logging.LogRecord) -> None:
        _errors.append(self.format(record))


class _Transport(asyncio.Transport):
    """A client's connection. What is written is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _SOCKET if name == "socket" else default

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """What comes is given by the piece."""

    def resume_reading(self) -> None:
        """Likewise."""


async def _application(scope: Any, receive: Any, send: Any) -> None:
    """Note the request and answer it."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    if message["type"] == "http.request":
        _seen.append((scope["method"], scope["raw_path"], scope["query_string"], tuple(scope["headers"]), body))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


_loop = asyncio.new_event_loop()
_SOCKET, _OTHER_END = socket.socketpair()
_CONFIG = uvicorn.Config(_application, ws="none", lifespan="off", access_log=False, log_config=None)
_SETTINGS = ConnectionSettings()
logging.getLogger("gateway.http").addHandler(_Errors(logging.ERROR))
logging.getLogger("uvicorn.error").addHandler(_Errors(logging.ERROR))


def run(payload: bytes) -> None:
    whole, has_ended = _loop.run_until_complete(_served(payload, len(payload) or 1))
    cut, cut_has_ended = _loop.run_until_complete(_served(payload, cut_bytes(payload)))
    fewer, more = sorted((whole, cut), key=len)
    assert more[: len(fewer)] == fewer, "what is asked depends on how it was cut"
    assert len(fewer) == len(more) or has_ended or cut_has_ended


async def _served(payload: bytes, piece_bytes: int) -> tuple[list[tuple[Any, ...]], bool]:
    """Return the requests that have come to the application, and whether the connection ended before the payload."""
    _seen.clear()
    _errors.clear()
    connections = Connections(
        _SETTINGS,
        RefusalLog(RequestSeries(), RefusalRecords(lambda _id, _record: None, "gateway", lambda name: name)),
        lambda _: True,
    )
    transport, state = _Transport(), ServerState()
    connection = Connection(connections, _CONFIG, state, {}, asyncio.get_running_loop())
    connection.connection_made(transport)
    for start in range(0, len(payload), piece_bytes):
        if transport.is_closed:
            break
        connection.data_received(payload[start : start + piece_bytes])
        await asyncio.sleep(0)
    before = -1
    while before != len(_seen):
        before = len(_seen)
        for _ in range(TURNS):
            await asyncio.sleep(0)
    has_ended = transport.is_closed
    if not has_ended:
        connection.eof_received()
    connection.connection_lost(None)
    while state.tasks:
        await asyncio.sleep(0)
    statuses = [int(status) for status in re.findall(rb"^HTTP/1\.1 (\d{3}) ", transport.written, re.MULTILINE)]
    assert not transport.written or transport.written.startswith(b"HTTP/1.1 ")
    assert not _errors, _errors
    assert 500 not in statuses
    return list(_seen), has_ended
