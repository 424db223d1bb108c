"""A node of the cluster is told to leave in order: its clients move to the others, and nobody notices."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, Start
from tests.integration.gateway.scripted_worker import Attempt
from tests.nats_server import NatsCluster
from tests.waiting import HANGS_S

STAYS = 1  # the node that the test's own connection, and so its worker, is at
# The shortest that the server allows; with few clients it sends one away each second, and ends after the last.
LEAVING = 'lame_duck_grace_period: "100ms"\nlame_duck_duration: "30s"\n'
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def nats_cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    cluster = NatsCluster(tmp_path / "nats-cluster", LEAVING)
    cluster.start_all()
    yield cluster
    cluster.stop_all()


@pytest.fixture
async def bus(nats_cluster: NatsCluster) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_cluster.urls[STAYS], name="test")
    await nats_cluster.wait_until_ready(bus)
    yield bus
    await bus.close()


@pytest.fixture
def nats_url(nats_cluster: NatsCluster) -> str:
    return nats_cluster.urls[0]


async def test_a_node_that_leaves_in_order_fails_nothing(nats_cluster: NatsCluster, start_gateway: Start) -> None:
    has_left = asyncio.Event()

    async def answer(attempt: Attempt) -> None:
        await attempt.accept()
        while not has_left.is_set():
            await attempt.tokens("x", (3,))
            await asyncio.sleep(0.02)
        await attempt.tokens("", (), finish_reason="stop")
        await attempt.finish()

    urls = [nats_cluster.urls[0], nats_cluster.urls[STAYS]]
    gateways = [await start_gateway(with_card=number == 0, nats_urls=urls, queue={"replicas": 3}) for number in (0, 1)]
    await gateways[0].add_worker(script=answer)
    clients = [gateway.client(timeout=HANGS_S) for gateway in gateways]
    async with asyncio.timeout(HANGS_S):
        asked = [
            asyncio.create_task(clients[number % 2].chat.completions.create(model=MODEL, messages=MESSAGES))
            for number in range(10)
        ]
        leaving = asyncio.create_task(nats_cluster.leave_in_order(0))
        while not leaving.done():
            asked.append(asyncio.create_task(clients[1].chat.completions.create(model=MODEL, messages=MESSAGES)))
            await asyncio.sleep(0.1)
        has_left.set()
        answers = await asyncio.gather(*asked)
    assert all(answer.choices[0].finish_reason == "stop" for answer in answers)
    records = await gateways[0].records(len(asked))
    assert len({record.request_id for record in records}) == len(records)
    assert {(record.outcome, record.attempts) for record in records} == {("ok", 1)}
