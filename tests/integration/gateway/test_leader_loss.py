"""A cluster loses the server that leads the queue: streams go on, requests wait."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from protocol import subjects
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, Start
from tests.integration.gateway.scripted_worker import Attempt, answer_hello
from tests.nats_server import NatsCluster
from tests.waiting import HANGS_S, until

FRAMES_WITHOUT_LEADER = 5  # an election takes at least four seconds, time for some 40
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def nats_url(nats_cluster: NatsCluster) -> str:
    """One of three servers; it tells its clients of no other, so a test must not kill this one."""
    return nats_cluster.urls[0]


@pytest.fixture
async def bus(nats_cluster: NatsCluster, nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="test")
    await nats_cluster.wait_until_ready(bus)
    yield bus
    await bus.close()


async def follow_the_leader(cluster: NatsCluster, bus: Bus) -> int:
    """The stream's leader, once it is a server that the test's clients are not connected to."""
    async with asyncio.timeout(HANGS_S):
        while not (leader := await cluster.leader_of(bus, subjects.INTERACTIVE_STREAM)):
            await bus.api(f"STREAM.LEADER.STEPDOWN.{subjects.INTERACTIVE_STREAM}")
            await asyncio.sleep(0.2)
    return leader


def is_longer(arrivals: list[bool], than: int) -> bool:
    return len(arrivals) > than


async def test_killing_the_queues_leader_fails_nothing_and_pauses_no_stream(
    nats_cluster: NatsCluster, bus: Bus, start_gateway: Start
) -> None:
    killed = asyncio.Event()
    elected = asyncio.Event()
    enough = asyncio.Event()

    async def long_then_hello(attempt: Attempt) -> None:
        if len(worker.attempts) > 1:
            return await answer_hello(attempt)
        await attempt.accept()
        while not enough.is_set():
            arrived = len(arrivals)
            await attempt.tokens("x", (3,))
            await until(partial(is_longer, arrivals, arrived))  # what were held up would not come in a burst
            await asyncio.sleep(0.05)  # the context has room for some 500 tokens
        await attempt.tokens("", (), finish_reason="stop")
        return await attempt.finish()

    gateway = await start_gateway(queue={"replicas": 3})
    worker = await gateway.add_worker(script=long_then_hello)
    leader = await follow_the_leader(nats_cluster, bus)
    client = gateway.client(timeout=HANGS_S)
    arrivals: list[bool] = []  # of each frame: whether it came before another server led

    async def stream_text() -> None:
        async for _ in await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
            arrivals.append(killed.is_set() and not elected.is_set())
            if len(arrivals) == 10:
                nats_cluster.kill(leader)
                killed.set()

    async def another_leads() -> bool:
        return await nats_cluster.leader_of(bus, subjects.INTERACTIVE_STREAM) not in {None, leader}

    async with asyncio.timeout(HANGS_S):
        running = asyncio.create_task(stream_text())
        await killed.wait()
        asked = [asyncio.create_task(client.chat.completions.create(model=MODEL, messages=MESSAGES)) for _ in range(10)]
        await until(another_leads)
        elected.set()
        answers = await asyncio.gather(*asked)
        enough.set()
        await running
    assert [answer.choices[0].message.content for answer in answers] == ["Hello world"] * 10
    assert sum(arrivals) >= FRAMES_WITHOUT_LEADER
    records = await gateway.records(11)
    assert len({record.request_id for record in records}) == len(records) == 11
    assert {record.outcome for record in records} == {"ok"}
    assert {record.attempts for record in records} == {1}
