"""A streaming caller who takes whatever comes: an exchange ends in a record of how it ended, never in an exception.

One connection a request, as callers behind a load balancer have it. While a load runs, only the pieces of the body are
kept with their times of arrival; what they mean is read when it is over. Times are ``time.perf_counter`` seconds.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

import httptools

HOST: Final = "127.0.0.1"
Ending = Literal["whole", "cut", "idle", "overdue", "left", "unreachable"]


@dataclass(frozen=True, slots=True)
class ReadTimeouts:
    """The limits after which a client gives up."""

    idle_s: float = 60.0  # without a byte: what nginx and AWS's load balancers allow by default
    total_s: float = 600.0  # the official SDKs' default


@dataclass(slots=True)
class Exchange:
    """One request and what came back."""

    due_s: float  # when it should have been sent; latency counts from here
    ending: Ending = "unreachable"  # "whole": the response ended as HTTP says it should
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # (arrival, body bytes)
    ended_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """From due to the end, whatever that was."""
        return self.ended_s - self.due_s


@dataclass(slots=True)
class Answer:
    """The contents of a stream's events."""

    text: str = ""
    texts: list[tuple[float, str]] = field(default_factory=list)  # (arrival, text) of each event that carries some
    comments: list[tuple[float, str]] = field(default_factory=list)  # such as "queued position=…"
    finish_reason: str | None = None
    prompt_tokens: int | None = None  # by its own usage chunk
    completion_tokens: int | None = None  # likewise
    is_done: bool = False  # ended by [DONE]
    error: dict[str, Any] | None = None


class _Connection(asyncio.Protocol):
    """One request on one connection; ``ended`` is set when there is nothing more to come."""

    def __init__(self, request: bytes, exchange: Exchange, on_piece: Callable[[Exchange], None] | None) -> None:
        self.ended = asyncio.Event()
        self.last_byte_s = time.perf_counter()
        self._request = request
        self._exchange = exchange
        self._on_piece = on_piece
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request (called by asyncio)."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its type
        self._transport.write(self._request)
        self._exchange.ending = "cut"  # until it has ended properly

    def data_received(self, data: bytes) -> None:
        """Stamp and parse what has come (called by asyncio)."""
        self.last_byte_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # asyncio fixes the signature
        """Note the end, proper or not (called by asyncio)."""
        self.ended.set()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header (called by the parser)."""
        self._exchange.headers[name.decode().lower()] = value.decode()

    def on_body(self, piece: bytes) -> None:
        """Keep a piece of the body (called by the parser)."""
        self._exchange.pieces.append((self.last_byte_s, piece))
        if self._on_piece is not None:
            self._on_piece(self._exchange)

    def on_headers_complete(self) -> None:
        """Keep the status (called by the parser)."""
        self._exchange.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        """Note the proper end (called by the parser)."""
        self._exchange.ending = "whole"
        self.ended.set()

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()


async def exchange(
    port: int,
    request: bytes,
    patience: ReadTimeouts,
    *,
    due_s: float | None = None,
    leave: asyncio.Event | None = None,
    on_piece: Callable[[Exchange], None] | None = None,
) -> Exchange:
    """Send one request and wait for the end of its answer, or until patience ends or ``leave`` is set."""
    record = Exchange(time.perf_counter() if due_s is None else due_s)
    connection = _Connection(request, record, on_piece)
    try:
        await asyncio.get_running_loop().create_connection(lambda: connection, HOST, port)
    except OSError:
        record.ended_s = time.perf_counter()
        return record
    leaving = None if leave is None else asyncio.create_task(_leave(leave, record, connection), name="leaving")
    try:
        await _wait(connection, record, patience)
    finally:
        if leaving is not None:
            leaving.cancel()
        connection.close()
    record.ended_s = time.perf_counter()
    return record


async def _leave(leave: asyncio.Event, record: Exchange, connection: _Connection) -> None:
    await leave.wait()
    if not connection.ended.is_set():
        record.ending = "left"
        connection.close()
        connection.ended.set()


async def _wait(connection: _Connection, record: Exchange, patience: ReadTimeouts) -> None:
    end_s = record.due_s + patience.total_s
    while not connection.ended.is_set():
        idle_end_s = connection.last_byte_s + patience.idle_s
        now_s = time.perf_counter()
        if now_s >= min(end_s, idle_end_s):
            record.ending = "overdue" if now_s >= end_s else "idle"
            return
        try:
            async with asyncio.timeout(min(end_s, idle_end_s) - now_s):
                await connection.ended.wait()
        except TimeoutError:
            continue


def read(record: Exchange) -> Answer:
    """Take the events of a stream apart, however it ended."""
    answer, rest = Answer(), b""
    for arrived_s, piece in record.pieces:
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            _read_event(answer, arrived_s, event)
    return answer


def _read_event(answer: Answer, arrived_s: float, event: bytes) -> None:
    if event.startswith(b":"):
        answer.comments.append((arrived_s, event[1:].decode().strip()))
    elif event == b"data: [DONE]":
        answer.is_done = True
    elif event.startswith(b"data: "):
        chunk = json.loads(event[6:])
        if "error" in chunk:
            answer.error = chunk["error"]
            return
        if chunk.get("usage"):
            answer.prompt_tokens = chunk["usage"]["prompt_tokens"]
            answer.completion_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            text = choice["delta"].get("content") or ""
            if text:
                answer.text += text
                answer.texts.append((arrived_s, text))
