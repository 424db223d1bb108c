"""The outbox against a real server."""

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from protocol import job as m
from protocol import subjects
from protocol.errors import BusTimeout
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.nats.outbox import MESSAGE_RECORDS, Outbox, Spool
from tests.nats_server import NatsServer
from tests.waiting import HANGS_S, until


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="test")
    await topology.apply(bus, [], topology.QueueBounds(), limit_s=HANGS_S)
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
    """Return a small record: the outbox does not parse records, but messages must be readable."""
    return m.encode(number)


async def stored(bus: Bus) -> list[list[int]]:
    """Return the records of each message of the stream."""
    last = int((await bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}"))["state"]["last_seq"])
    answers = [await bus.api(f"STREAM.MSG.GET.{subjects.USAGE_STREAM}", {"seq": n + 1}) for n in range(last)]
    return [msgspec.msgpack.decode(base64.b64decode(answer["message"]["data"])) for answer in answers]


async def test_everything_put_is_stored_once_and_records_share_messages(bus: Bus) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        for number in range(200):
            outbox.put(f"r{number}.1", record(number))
        was_full = outbox.full
        assert was_full
        assert await outbox.flush(20) == 0
        assert not outbox.full
    messages = await stored(bus)
    assert sorted(number for message in messages for number in message) == list(range(200))
    assert max(map(len, messages)) == MESSAGE_RECORDS


async def test_a_single_record_is_not_delayed(bus: Bus) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        outbox.put("r.1", record(1))
        async with asyncio.timeout(HANGS_S):
            while len(outbox):  # without a flush
                await asyncio.sleep(0.01)
    assert await stored(bus) == [[1]]


async def test_an_awaited_record_is_sent_at_once_with_all_waiting_ones(bus: Bus) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10, spacing_s=3600.0)) as outbox:
        await asyncio.wait([outbox.put("first", record(0))], timeout=HANGS_S)
        outbox.put("patient", record(1))
        kept = [outbox.put(f"r{number}", record(number), is_awaited=True) for number in range(2, 6)]
        done, _ = await asyncio.wait(kept, timeout=HANGS_S)
        assert len(done) == 4
    # Two messages were in flight when the last two records arrived, so these share a message.
    assert sorted(await stored(bus)) == [[0], [1, 2], [3], [4, 5]]


async def test_records_survive_a_dead_server(bus: Bus, nats_server: NatsServer) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        nats_server.kill()
        for number in range(500):
            outbox.put(f"r{number}.1", record(number))
        assert await outbox.flush(0.3) == 500
        nats_server.start()
        assert await outbox.flush(30) == 0
    assert sorted(number for message in await stored(bus) for number in message) == list(range(500))


async def test_a_message_with_a_lost_reply_is_stored_once(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_an_unstorable_record_does_not_block_others(bus: Bus) -> None:
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10)) as outbox:
        outbox.put("large", bytes(bus.client.max_payload + 1))
        outbox.put("small", record(1))
        assert await outbox.flush(20) == 0
    assert await stored(bus) == [[1]]


async def has(outbox: Outbox, *, spooled: bool) -> None:
    async with asyncio.timeout(HANGS_S):
        while bool(outbox.spooled_bytes) is not spooled:
            await asyncio.sleep(0.01)


async def lose_the_stream(bus: Bus) -> None:
    """Make the server store nothing, as after a disk write error, which lasts until a restart."""
    await bus.api(f"STREAM.DELETE.{subjects.USAGE_STREAM}")


async def test_unstored_records_go_to_disk_and_then_into_the_stream(bus: Bus, tmp_path: Path) -> None:
    await lose_the_stream(bus)
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10, spool=Spool(tmp_path))) as outbox:
        kept = [outbox.put(f"r{number}", record(number)) for number in range(100)]
        done, _ = await asyncio.wait(kept, timeout=HANGS_S)
        assert len(done) == 100
        assert (len(outbox), outbox.full, outbox.is_behind) == (0, False, True)
        await topology.apply(bus, [], topology.QueueBounds(), limit_s=HANGS_S)
        await until(lambda: not outbox.is_behind)
        await asyncio.wait([outbox.put("last", record(100))], timeout=HANGS_S)
    assert sorted(number for message in await stored(bus) for number in message) == list(range(101))


async def test_a_clean_shutdown_spools_unstored_records(bus: Bus, tmp_path: Path) -> None:
    # Regression: a clean restart of a gateway while the server stored nothing lost 16 of 16 records.
    await lose_the_stream(bus)
    spool = Spool(tmp_path)
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10, spool=spool)) as outbox:
        for number in range(16):
            outbox.put(f"r{number}", record(number))
        assert await outbox.flush(0.01) == 0
    spool.close()
    await topology.apply(bus, [], topology.QueueBounds(), limit_s=HANGS_S)
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 10, spool=Spool(tmp_path))) as heir:
        await has(heir, spooled=False)
    assert await stored(bus) == [list(range(16))]


async def test_without_server_and_disk_it_is_full_before_anything_is_lost(bus: Bus, tmp_path: Path) -> None:
    await lose_the_stream(bus)
    spool = Spool(tmp_path, max_bytes=0)
    async with running(Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 1000, spool=spool)) as outbox:
        kept = outbox.put("r", record(1))
        await until(lambda: outbox.full)
        assert not kept.done()
        await topology.apply(bus, [], topology.QueueBounds(), limit_s=HANGS_S)
        await asyncio.wait([kept], timeout=HANGS_S)
        assert kept.done()
        assert not outbox.full
    assert await stored(bus) == [[1]]


async def test_it_is_full_by_bytes_too(bus: Bus) -> None:
    outbox = Outbox(bus, subjects.ATTEMPT_USAGE_SUBJECT, 1000, capacity_bytes=1000)
    outbox.put("r", bytes(999))
    assert not outbox.full
    outbox.put("s", bytes(1))
    assert outbox.full
