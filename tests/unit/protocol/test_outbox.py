"""The outbox against a real server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from protocol import subjects, topology
from protocol.bus import Bus
from protocol.outbox import Outbox
from tests.nats_server import NatsServer


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="test")
    await topology.apply(bus, [], topology.QueueBounds())
    yield bus
    await bus.close()


@contextlib.asynccontextmanager
async def running(outbox: Outbox) -> AsyncIterator[Outbox]:
    task = asyncio.create_task(outbox.run())
    yield outbox
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def stored(bus: Bus) -> int:
    return int((await bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}"))["state"]["messages"])


async def test_everything_put_is_stored_once(bus: Bus) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        for number in range(200):
            outbox.put(f"r{number % 150}.1", b"x")
        assert outbox.full
        assert await outbox.flush(20) == 0
        assert not outbox.full
    assert await stored(bus) == 150


async def test_records_survive_a_dead_server(bus: Bus, nats_server: NatsServer) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        nats_server.kill()
        for number in range(50):
            outbox.put(f"r{number}.1", b"x")
        assert await outbox.flush(0.3) == 50
        nats_server.start()
        assert await outbox.flush(30) == 0
    assert await stored(bus) == 50


async def test_a_record_no_server_can_take_does_not_block_the_others(bus: Bus) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        outbox.put("large", bytes(bus.client.max_payload + 1))
        outbox.put("small", b"x")
        assert await outbox.flush(20) == 0
    assert await stored(bus) == 1
