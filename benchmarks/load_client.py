"""The benchmarks' loads: many requests, all of whose answers must be valid HTTP with status 200."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.http_client import Connection, Exchange

ANSWER_LIMIT_S: Final = 120.0  # for a whole load
START_DELAY_S: Final = 0.05


class LoadError(Exception):
    """An answer was not what the load expects; the message shows it."""


def _send(connection: Connection, request: bytes) -> asyncio.Future[Exchange]:
    return connection.send(request, Exchange(time.monotonic()))


def _checked(answers: Sequence[Exchange]) -> list[Exchange]:
    """Return the answers of a finished load. Raises LoadError if one is not complete with status 200."""
    for answer in answers:
        if answer.ending != "whole" or answer.status != 200:
            raise LoadError(f"HTTP {answer.status}, {answer.ending}: {answer.body[:500]!r}")
    return list(answers)


async def sequential(host: str, port: int, requests: Sequence[bytes]) -> list[Exchange]:
    """Send one request after another on one connection."""
    connection = await Connection.open(host, port)
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            return _checked([await _send(connection, request) for request in requests])
    finally:
        connection.close()


async def concurrent(host: str, port: int, requests: Sequence[bytes]) -> list[Exchange]:
    """Send all requests at once, each on a separate connection."""
    connections = [await Connection.open(host, port) for _ in requests]
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            pairs = zip(connections, requests, strict=True)
            return _checked(await asyncio.gather(*(_send(connection, request) for connection, request in pairs)))
    finally:
        for connection in connections:
            connection.close()


async def closed_loop(host: str, port: int, requests: Sequence[bytes], connections: int) -> list[Exchange]:
    """Send each connection's next request as soon as it has an answer: as fast as the server can."""
    opened = [await Connection.open(host, port) for _ in range(connections)]
    left = iter(requests)

    async def work(connection: Connection) -> list[Exchange]:
        return [await _send(connection, request) for request in left]

    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            done = await asyncio.gather(*map(work, opened))
            return _checked([answer for answers in done for answer in answers])
    finally:
        for connection in opened:
            connection.close()


async def open_loop(
    host: str, port: int, requests: Sequence[bytes], rate_per_s: float, connections: int
) -> list[Exchange]:
    """Send requests at fixed times, whether or not earlier ones have been answered.

    Latency counts from the time at which a request was due, so that a stalling server is charged for every delay (no
    coordinated omission), including the wait for one of the ``connections``.
    """
    opened = [await Connection.open(host, port) for _ in range(connections)]
    idle: asyncio.Queue[Connection] = asyncio.Queue()
    for connection in opened:
        idle.put_nowait(connection)

    async def exchange(request: bytes, due_s: float) -> Exchange:
        connection = await idle.get()
        try:
            return await connection.send(request, Exchange(due_s))
        finally:
            idle.put_nowait(connection)

    loop = asyncio.get_running_loop()
    first_s = time.monotonic() + START_DELAY_S
    due_times_s = [first_s + number / rate_per_s for number in range(len(requests))]
    exchanges: list[asyncio.Task[Exchange]] = []

    def start(number: int) -> None:
        exchanges.append(loop.create_task(exchange(requests[number], due_times_s[number]), name=f"exchange-{number}"))

    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            await asyncio.to_thread(_pace, due_times_s, lambda number: loop.call_soon_threadsafe(start, number))
            await asyncio.sleep(0)  # the pacing thread has scheduled the last start
            return _checked(await asyncio.gather(*exchanges))
    finally:
        for connection in opened:
            connection.close()


def _pace(due_times_s: Sequence[float], tick: Callable[[int], object]) -> None:
    """Call ``tick`` at each time. In a thread, because the event loop's timers have millisecond resolution."""
    for number, due_s in enumerate(due_times_s):
        time.sleep(max(0.0, due_s - time.monotonic()))
        tick(number)


def completion_tokens(answer: Exchange) -> int:
    """Return the output tokens of an unstreamed answer, by its own usage."""
    return int(json.loads(answer.body)["usage"]["completion_tokens"])
