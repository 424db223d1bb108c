"""The outbox against a real server."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from protocol import messages as m
from protocol import subjects, topology
from protocol.bus import Bus
from protocol.errors import BusTimeout
from protocol.outbox import MESSAGE_RECORDS, Outbox
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


def record(number: int) -> bytes:
    """Small values: the outbox does not look into a record, but its message must be readable."""
    return m.encode(number)


async def stored(bus: Bus) -> list[list[int]]:
    """What each message of the stream holds."""
    last = int((await bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}"))["state"]["last_seq"])
    answers = [await bus.api(f"STREAM.MSG.GET.{subjects.USAGE_STREAM}", {"seq": n + 1}) for n in range(last)]
    return [msgspec.msgpack.decode(base64.b64decode(answer["message"]["data"])) for answer in answers]


async def test_everything_put_is_stored_once_and_records_share_messages(bus: Bus) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        for number in range(200):
            outbox.put(f"r{number}.1", record(number))
        assert outbox.full
        assert await outbox.flush(20) == 0
        assert not outbox.full
    messages = await stored(bus)
    assert sorted(number for message in messages for number in message) == list(range(200))
    assert max(map(len, messages)) == MESSAGE_RECORDS


async def test_a_record_alone_is_not_kept_waiting_for_company(bus: Bus) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        outbox.put("r.1", record(1))
        async with asyncio.timeout(20):
            while len(outbox):  # nobody flushes
                await asyncio.sleep(0.01)
    assert await stored(bus) == [[1]]


async def test_records_survive_a_dead_server(bus: Bus, nats_server: NatsServer) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        nats_server.kill()
        for number in range(500):
            outbox.put(f"r{number}.1", record(number))
        assert await outbox.flush(0.3) == 500
        nats_server.start()
        assert await outbox.flush(30) == 0
    assert sorted(number for message in await stored(bus) for number in message) == list(range(500))


async def test_a_message_whose_answer_was_lost_is_stored_once(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_durable = bus.publish_durable
    tries: list[str] = []

    async def losing_the_first_answer(*args: object, message_id: str, **options: object) -> int:
        sequence = await publish_durable(*args, message_id=message_id, **options)  # type: ignore[arg-type]
        tries.append(message_id)
        if len(tries) == 1:
            raise BusTimeout("lost")
        return sequence

    monkeypatch.setattr(bus, "publish_durable", losing_the_first_answer)
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        for number in range(3):
            outbox.put(f"r{number}.1", record(number))
        assert await outbox.flush(20) == 0
    assert tries == ["r0.1+2", "r0.1+2"]
    assert await stored(bus) == [[0, 1, 2]]


async def test_a_record_no_server_can_take_does_not_block_the_others(bus: Bus) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        outbox.put("large", bytes(bus.client.max_payload + 1))
        outbox.put("small", record(1))
        assert await outbox.flush(20) == 0
    assert await stored(bus) == [[1]]
