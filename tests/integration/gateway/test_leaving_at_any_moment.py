"""Hundreds of callers that leave at random moments, against a real worker: nothing of them stays anywhere."""

import asyncio
import gc
import json
import random
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from benchmarks.ports import free_port
from gateway.dispatch.lifecycle import OpenRequest
from gateway.http.exchange import ClientExchange, Exchange
from gateway.idempotency.runs import Run
from pool_worker.settings import ScriptedEngineSettings, WorkerSettings
from protocol import subjects
from protocol.job import Heartbeat, decode_heartbeat
from protocol.nats.bus import Bus
from protocol.usage import AttemptRecord, RequestRecord
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.integration.queued_jobs import queued_jobs, until_queued
from tests.nats_server import NatsServer
from tests.waiting import until

CALLERS = 300
PATIENT = range(0, CALLERS, 10)  # leave once they have got some tokens, however long that takes
AT_ONCE = 60
LONGEST_STAY_S = 0.4
SEQUENCES = 8  # fewer than callers: most leave while they are queued
ANSWER_TOKENS = (10, 8000)  # some are answered in time, and the others would keep the engine busy for half a minute
STEP_S = 0.004


@pytest.fixture
def monitor_port() -> int:
    return free_port()


@pytest.fixture
def nats_server(tmp_path: Path, monitor_port: int) -> Iterator[NatsServer]:
    """A server that also tells who has subscribed to what."""
    folder = tmp_path / "nats-server"
    folder.mkdir()
    server = NatsServer(folder, f'http: "127.0.0.1:{monitor_port}"\n')
    server.start()
    yield server
    server.stop()


def count_subscriptions(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/connz") as answer:
        return sum(int(connection["subscriptions"]) for connection in json.load(answer)["connections"])


def count_objects(*kinds: type) -> int:
    gc.collect()
    return sum(isinstance(thing, kinds) for thing in gc.get_objects())


class Callers:
    """Raw connections, so that a caller can leave in the middle of anything."""

    def __init__(self, gateway: GatewayUnderTest, seed: int, headers: str = "") -> None:
        self._gateway = gateway
        self._random = random.Random(seed)
        self._places = asyncio.Semaphore(AT_ONCE)
        self._headers = headers

    async def come_and_go(self, number: int) -> None:
        stay_s = self._random.uniform(0, LONGEST_STAY_S)
        sends_all = self._random.random() > 0.1
        is_streamed, max_tokens = self._random.random() < 0.5, self._random.choice(ANSWER_TOKENS)
        async with self._places:
            if number in PATIENT:
                await self._ask(number, _tokens)
            else:
                await self._ask(
                    number,
                    lambda _: asyncio.sleep(stay_s),
                    sends_all=sends_all,
                    stream=is_streamed,
                    max_tokens=max_tokens,
                )

    async def leave_while_queued(self) -> None:
        """As many as fit are served; one more leaves while its job is in the queue, and then they leave, too."""
        served, gone = asyncio.Semaphore(0), asyncio.Event()

        async def stay(reader: asyncio.StreamReader) -> None:
            await _tokens(reader)
            served.release()
            await gone.wait()

        async with asyncio.TaskGroup() as group:
            for number in range(SEQUENCES):
                group.create_task(self._ask(CALLERS + number, stay))
            for _ in range(SEQUENCES):
                await served.acquire()
            await self._ask(CALLERS + SEQUENCES, lambda _: until_queued(self._gateway.bus, 1))
            gone.set()

    async def _ask(
        self,
        number: int,
        stay: Callable[[asyncio.StreamReader], Awaitable[object]],
        *,
        sends_all: bool = True,
        stream: bool = True,
        max_tokens: int = max(ANSWER_TOKENS),
    ) -> None:
        """Ask, and leave after ``stay``."""
        messages = [{"role": "user", "content": f"Caller {number}"}]
        fields = {"model": MODEL, "stream": stream, "max_tokens": max_tokens, "ignore_eos": True}
        body = json.dumps({"messages": messages, **fields}).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {self._gateway.key}\r\nContent-Length: {len(body)}\r\n"
            f"{self._headers.format(number=number)}\r\n"
        )
        address = urlsplit(self._gateway.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(head.encode() + (body if sends_all else body[: len(body) // 2]))
        await writer.drain()
        await stay(reader)
        writer.transport.abort()


async def _tokens(reader: asyncio.StreamReader) -> None:
    """Return once some tokens are there."""
    for _ in range(3):  # the first one has no token
        await reader.readuntil(b"chat.completion.chunk")


class HeartbeatPublisher:
    """The worker's last heartbeat."""

    def __init__(self) -> None:
        self.last: Heartbeat | None = None

    @classmethod
    async def of(cls, bus: Bus) -> "HeartbeatPublisher":
        heart = cls()

        async def on_beat(message: Any) -> None:
            if message.data:
                heart.last = decode_heartbeat(message.data)

        await bus.subscribe(subjects.HEARTBEATS, on_beat)
        return heart

    def is_idle(self) -> bool:
        beat = self.last
        return beat is not None and beat.running == 0 and beat.free_sequences == beat.max_sequences


@pytest.fixture
async def served(start_gateway: Start, nats_url: str) -> AsyncIterator[GatewayUnderTest]:
    """A gateway and a real worker with the scripted engine, on this loop."""
    gateway = await start_gateway(with_card=False, idempotency={"reattach_s": 0.1, "keep_s": 0.1})
    engine = ScriptedEngineSettings(inter_token_s=STEP_S, max_sequences=SEQUENCES)
    settings = WorkerSettings(worker_id="w1", pool="test", nats_urls=(nats_url,), models=(MODEL,), engine=engine)
    async with running_worker(settings):

        async def is_ready() -> bool:
            return not (await readiness(gateway))["models_not_ready"]

        await until(is_ready)
        yield gateway


async def readiness(gateway: GatewayUnderTest) -> dict[str, Any]:
    async with httpx.AsyncClient() as client:
        return dict((await client.get(f"{gateway.url}/readyz")).json())


@pytest.mark.parametrize("headers", ["", "Idempotency-Key: {number}\r\n"], ids=["plain", "keyed"])
async def test_nothing_stays_of_callers_that_leave(served: GatewayUnderTest, monitor_port: int, headers: str) -> None:
    heart = await HeartbeatPublisher.of(served.bus)
    await until(heart.is_idle)
    tasks_before, subscriptions_before = len(asyncio.all_tasks()), count_subscriptions(monitor_port)
    callers = Callers(served, seed=7, headers=headers)
    await callers.leave_while_queued()
    await asyncio.gather(*(callers.come_and_go(number) for number in range(CALLERS)))

    async def is_quiet() -> bool:
        return (await readiness(served))["in_flight"] == 0 and await queued_jobs(served.bus) == 0

    await until(is_quiet)
    heart.last = None
    await until(heart.is_idle)
    await until(lambda: len(asyncio.all_tasks()) <= tasks_before)
    await until(lambda: count_objects(ClientExchange, Exchange, Run) == 0)
    assert count_objects(OpenRequest) <= 1  # the dispatcher's sweep may have looked at it last
    assert count_subscriptions(monitor_port) == subscriptions_before
    await check_records(served)


async def check_records(gateway: GatewayUnderTest) -> None:
    """One record each, of the tokens that the worker made, once."""
    records: list[Any] = []

    async def are_whole() -> bool:
        records[:] = await gateway.usage()
        requests = {r.request_id for r in records if isinstance(r, RequestRecord) and r.attempts and r.pool}
        attempts = {r.request_id for r in records if isinstance(r, AttemptRecord)}
        return requests == attempts

    await until(are_whole)
    rows = [record for record in records if isinstance(record, RequestRecord)]
    made: Counter[str] = Counter()
    for record in records:
        if isinstance(record, AttemptRecord):
            made[record.request_id] += record.completion_tokens
    assert len({row.request_id for row in rows}) == len(rows) >= len(PATIENT)
    left = [row for row in rows if row.outcome == "cancelled"]
    assert any(row.pool is None for row in left), "nobody left while he was queued"
    assert any(row.completion_tokens for row in left), "nobody left while he was served"
    assert {row.request_id: row.completion_tokens for row in rows} == {
        row.request_id: made[row.request_id] for row in rows
    }
