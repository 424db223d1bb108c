"""A load client that costs far less than what it measures: raw protocol callbacks, keep-alive, parsing done afterwards.

While a load runs, the client only keeps each piece of a body with its time of arrival (about 30 µs of CPU for a short
request); what the pieces mean is looked at when the load is over. Times are ``time.perf_counter`` seconds.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httptools

ANSWER_LIMIT_S: Final = 120.0  # for a whole load
START_DELAY_S: Final = 0.05


class LoadError(Exception):
    """An answer was not what the load expects; the message shows it."""


@dataclass(slots=True)
class Answer:
    """One answer, as it came in."""

    due_s: float  # when the request should have been sent; latency counts from here
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)  # (arrival, body bytes)
    ended_s: float = 0.0

    @property
    def latency_s(self) -> float:
        """From due to complete."""
        return self.ended_s - self.due_s

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(piece for _, piece in self.pieces)


class Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection; it carries one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer = Answer(0.0)
        self._done: asyncio.Future[Answer] | None = None
        self._now_s = 0.0

    @classmethod
    async def open(cls, host: str, port: int) -> "Connection":
        """Connect. Raises OSError."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def send(self, request: bytes, due_s: float | None = None) -> asyncio.Future[Answer]:
        """Send a request; the future yields its answer, or raises LoadError or ConnectionError."""
        assert self._transport is not None
        self._answer = Answer(time.perf_counter() if due_s is None else due_s)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (called by asyncio)."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its type

    def data_received(self, data: bytes) -> None:
        """Stamp and parse what has come (called by asyncio)."""
        self._now_s = time.perf_counter()
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the open request (called by asyncio)."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(exc or ConnectionError("the server closed the connection before its answer ended"))

    def on_body(self, piece: bytes) -> None:
        """Keep a piece of the body (called by the parser)."""
        self._answer.pieces.append((self._now_s, piece))

    def on_message_complete(self) -> None:
        """Hand the answer over (called by the parser)."""
        answer, done = self._answer, self._done
        answer.status, answer.ended_s = self._parser.get_status_code(), self._now_s
        if done is None or done.done():
            return
        if answer.status == 200:
            done.set_result(answer)
        else:
            done.set_exception(LoadError(f"HTTP {answer.status}: {answer.body[:500]!r}"))


def chat_request(path: str, host: str, api_key: str, body: dict[str, Any]) -> bytes:
    """A whole HTTP request, ready to be written."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


async def sequential(host: str, port: int, requests: Sequence[bytes]) -> list[Answer]:
    """One request after the other on one connection."""
    connection = await Connection.open(host, port)
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            return [await connection.send(request) for request in requests]
    finally:
        connection.close()


async def concurrent(host: str, port: int, requests: Sequence[bytes]) -> list[Answer]:
    """All requests at once, each on a connection of its own."""
    connections = [await Connection.open(host, port) for _ in requests]
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            pairs = zip(connections, requests, strict=True)
            return await asyncio.gather(*(connection.send(request) for connection, request in pairs))
    finally:
        for connection in connections:
            connection.close()


async def closed_loop(host: str, port: int, requests: Sequence[bytes], connections: int) -> list[Answer]:
    """Each connection sends its next request as soon as it has an answer: as fast as the server can."""
    opened = [await Connection.open(host, port) for _ in range(connections)]
    left = iter(requests)

    async def work(connection: Connection) -> list[Answer]:
        return [await connection.send(request) for request in left]

    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            done = await asyncio.gather(*map(work, opened))
            return [answer for answers in done for answer in answers]
    finally:
        for connection in opened:
            connection.close()


async def open_loop(
    host: str, port: int, requests: Sequence[bytes], rate_per_s: float, connections: int
) -> list[Answer]:
    """Requests at fixed times, whether or not the earlier ones have been answered.

    Latency counts from the time at which a request was due, so that a server which stalls is charged for everything
    that it made wait (no coordinated omission), also for the wait for one of the ``connections``.
    """
    opened = [await Connection.open(host, port) for _ in range(connections)]
    idle: asyncio.Queue[Connection] = asyncio.Queue()
    for connection in opened:
        idle.put_nowait(connection)

    async def exchange(request: bytes, due_s: float) -> Answer:
        connection = await idle.get()
        try:
            return await connection.send(request, due_s)
        finally:
            idle.put_nowait(connection)

    loop = asyncio.get_running_loop()
    first_s = time.perf_counter() + START_DELAY_S
    due_times_s = [first_s + number / rate_per_s for number in range(len(requests))]
    exchanges: list[asyncio.Task[Answer]] = []

    def start(number: int) -> None:
        exchanges.append(loop.create_task(exchange(requests[number], due_times_s[number]), name=f"exchange-{number}"))

    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            await asyncio.to_thread(_pace, due_times_s, lambda number: loop.call_soon_threadsafe(start, number))
            await asyncio.sleep(0)  # the last start was handed over by a thread
            return await asyncio.gather(*exchanges)
    finally:
        for connection in opened:
            connection.close()


def _pace(due_times_s: Sequence[float], tick: Callable[[int], object]) -> None:
    """Call ``tick`` when each time has come. In a thread, since the event loop's timers only know milliseconds."""
    for number, due_s in enumerate(due_times_s):
        time.sleep(max(0.0, due_s - time.perf_counter()))
        tick(number)


@dataclass(frozen=True, slots=True)
class Stream:
    """The contents of a streamed answer."""

    text_arrivals_s: list[float]  # of each event that carries text
    completion_tokens: int  # by its own usage chunk


def read_stream(answer: Answer) -> Stream:
    """Take a streamed answer apart. Raises LoadError if it is incomplete or tells of an error."""
    arrivals_s: list[float] = []
    completion_tokens, rest, done = 0, b"", False
    for arrived_s, piece in answer.pieces:
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                done = True
            elif event.startswith(b"data: "):
                chunk = json.loads(event[6:])
                if "error" in chunk:
                    raise LoadError(f"the stream ended in an error: {chunk['error']}")
                completion_tokens = (chunk.get("usage") or {}).get("completion_tokens", completion_tokens)
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    arrivals_s.append(arrived_s)
    if not done or not arrivals_s:
        raise LoadError(f"the stream is incomplete: {answer.body[-300:]!r}")
    return Stream(arrivals_s, completion_tokens)


def completion_tokens(answer: Answer) -> int:
    """Output tokens of an answer that was not streamed, by its own usage."""
    return int(json.loads(answer.body)["usage"]["completion_tokens"])
