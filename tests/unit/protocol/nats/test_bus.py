"""The NATS wrapper against a real server."""

import asyncio

import pytest

from protocol import subjects
from protocol.errors import ApiError, BusError, BusTimeout, PayloadTooLarge, StreamFull
from protocol.job import PROTOCOL_VERSION, ModelCard
from protocol.nats import objects, topology
from protocol.nats.bus import Bus
from protocol.nats.pull import Delivery, PullConsumer, ack, nak
from tests.nats_server import NatsServer
from tests.waiting import HANGS_S, until

MODEL = "org/model.v1"


@pytest.fixture
async def bus(nats_url: str):
    bus = await Bus.connect(nats_url, name="test")
    await topology.apply(bus, [MODEL], topology.QueueBounds(max_jobs=5), limit_s=HANGS_S)
    yield bus
    await bus.close()


class Taker:
    """Collects deliveries and lets a test wait for their number."""

    def __init__(self) -> None:
        self.taken: list[Delivery] = []
        self._more = asyncio.Event()

    async def take(self, delivery: Delivery) -> None:
        self.taken.append(delivery)
        self._more.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(HANGS_S):
            while len(self.taken) < count:
                self._more.clear()
                await self._more.wait()


async def consumer_of(bus: Bus, taker: Taker) -> PullConsumer:
    name = subjects.job_consumer(MODEL, subjects.HIGH_LANES[0])
    consumer = PullConsumer(bus, subjects.INTERACTIVE_STREAM, name, taker.take, tier="spot")
    await consumer.start()
    return consumer


async def publish(bus: Bus, number: int) -> int:
    return await bus.publish_durable(
        subjects.job_subject(MODEL, subjects.HIGH_LANES[0]), b"%d" % number, message_id=f"r{number}.1", ttl_s=60
    )


async def test_applying_the_topology_again_changes_nothing_and_loses_nothing(bus: Bus) -> None:
    await publish(bus, 1)
    await topology.apply(bus, [MODEL, "second"], topology.QueueBounds(max_jobs=5), limit_s=HANGS_S)
    info = await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}")
    assert info["state"]["messages"] == 1
    assert await topology.consumer_exists(
        bus, subjects.INTERACTIVE_STREAM, subjects.job_consumer("second", subjects.HIGH_LANES[0])
    )
    assert not await topology.consumer_exists(
        bus, subjects.INTERACTIVE_STREAM, subjects.job_consumer("third", subjects.HIGH_LANES[0])
    )


async def test_changed_bounds_are_applied_to_an_existing_stream(bus: Bus) -> None:
    await topology.apply(bus, [MODEL], topology.QueueBounds(max_jobs=7), limit_s=HANGS_S)
    info = await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}")
    assert info["config"]["max_msgs"] == 7


async def test_a_pull_receives_at_most_the_requested_number(bus: Bus) -> None:
    taker = Taker()
    consumer = await consumer_of(bus, taker)
    for number in range(5):
        await publish(bus, number)
    await consumer.pull(2)
    await taker.wait_for(2)
    await bus.client.flush()
    assert [d.payload for d in taker.taken] == [b"0", b"1"]
    assert consumer.outstanding() == 0
    await consumer.pull(10)
    await taker.wait_for(5)
    assert consumer.outstanding() == 7


async def test_a_parked_pull_expires(bus: Bus) -> None:
    consumer = await consumer_of(bus, Taker())
    await consumer.pull(3, expires_s=0.2)
    assert consumer.outstanding() == 3
    async with asyncio.timeout(HANGS_S):
        while consumer.outstanding():  # the server's 408 clears it
            await asyncio.sleep(0.01)


async def test_acknowledged_messages_leave_the_queue_and_refused_ones_are_redelivered(bus: Bus) -> None:
    taker = Taker()
    consumer = await consumer_of(bus, taker)
    await publish(bus, 1)
    await consumer.pull(5)
    await taker.wait_for(1)
    await nak(bus, taker.taken[0])
    await taker.wait_for(2)
    assert [d.deliveries for d in taker.taken] == [1, 2]
    await ack(bus, taker.taken[1])
    async with asyncio.timeout(HANGS_S):
        while (await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}"))["state"]["messages"]:
            await asyncio.sleep(0.01)


async def test_the_same_message_id_is_stored_once(bus: Bus) -> None:
    assert await publish(bus, 1) == await publish(bus, 1)
    assert (await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}"))["state"]["messages"] == 1


async def test_a_full_stream_refuses(bus: Bus) -> None:
    for number in range(5):
        await publish(bus, number)
    with pytest.raises(StreamFull):
        await publish(bus, 6)


async def test_a_deleted_message_is_gone_and_deleting_again_says_so(bus: Bus) -> None:
    sequence = await publish(bus, 1)
    assert await bus.delete_message(subjects.INTERACTIVE_STREAM, sequence) is True
    assert await bus.delete_message(subjects.INTERACTIVE_STREAM, sequence) is False


async def test_errors_have_specific_types(bus: Bus) -> None:
    with pytest.raises(BusTimeout):
        await bus.request("no.responder", b"", timeout_s=5)
    with pytest.raises(ApiError):
        await bus.api("STREAM.INFO.NOPE")
    with pytest.raises(PayloadTooLarge):
        await bus.publish("x", bytes(9 * 1024 * 1024))
    with pytest.raises(BusError, match="cannot connect to NATS at nats://127.0.0.1:1 ") as caught:
        await Bus.connect("nats://me:secret@127.0.0.1:1", name="test", first_limit_s=0.3)
    assert "secret" not in str(caught.value)


async def test_after_a_crash_of_the_server_the_hooks_run_and_the_queue_works_again(
    bus: Bus, nats_server: NatsServer
) -> None:
    restored = asyncio.Event()

    async def apply_again() -> None:
        await topology.apply(bus, [MODEL], topology.QueueBounds(), limit_s=HANGS_S)
        restored.set()

    bus.on_reconnect(apply_again)
    taker = Taker()
    consumer = await consumer_of(bus, taker)
    await publish(bus, 1)
    nats_server.kill()
    nats_server.start()
    async with asyncio.timeout(HANGS_S):
        await restored.wait()
    consumer.forget_pulls()
    await publish(bus, 1)  # the server lost the memory stream and its duplicate window
    await consumer.pull(1)
    await taker.wait_for(1)


async def test_a_deletion_does_not_outlive_its_connection(bus: Bus, nats_url: str, nats_server: NatsServer) -> None:
    other = await Bus.connect(nats_url, name="other")
    sequence = await publish(bus, 1)
    nats_server.kill()
    await until(lambda: not (bus.connected or other.connected))
    with pytest.raises(BusError, match="not connected"):
        await bus.delete_message(subjects.INTERACTIVE_STREAM, sequence)
    nats_server.start()
    await until(lambda: bus.connected and other.connected)
    await topology.apply(other, [MODEL], topology.QueueBounds(), limit_s=HANGS_S)
    assert await publish(other, 1) == sequence  # another job has the sequence now
    await bus.client.flush()
    assert await other.delete_message(subjects.INTERACTIVE_STREAM, sequence)  # it still existed
    await other.close()


async def test_model_cards_and_tokenizers_are_stored_once_and_found(bus: Bus) -> None:
    tokenizer = b'{"a": "' + b"x" * 300_000 + b'"}'
    card = ModelCard(PROTOCOL_VERSION, MODEL, 1024, objects.tokenizer_object_name(tokenizer), "{{ messages }}")
    assert await objects.read_model_card(bus, MODEL) is None
    for _ in range(2):
        await objects.publish_model_card(bus, card, tokenizer)
    assert await objects.read_model_card(bus, MODEL) == card
    assert await objects.get_object(bus, subjects.ARTIFACTS_BUCKET, card.tokenizer_object) == tokenizer
    with pytest.raises(BusError, match="nothing-here"):
        await objects.get_object(bus, subjects.ARTIFACTS_BUCKET, "nothing-here")


async def test_an_object_without_its_chunks_fails_at_once(bus: Bus) -> None:
    await objects.put_object(bus, subjects.ARTIFACTS_BUCKET, "t", b"data")
    await bus.api(f"STREAM.PURGE.OBJ_{subjects.ARTIFACTS_BUCKET}", {"filter": f"$O.{subjects.ARTIFACTS_BUCKET}.C.>"})
    with pytest.raises(BusError, match="chunks are missing"):
        await objects.get_object(bus, subjects.ARTIFACTS_BUCKET, "t")


async def test_deleting_an_object_is_idempotent(bus: Bus) -> None:
    await objects.put_object(bus, subjects.PROMPTS_BUCKET, "p", b"data")
    for _ in range(2):
        await objects.delete_object(bus, subjects.PROMPTS_BUCKET, "p")
    with pytest.raises(BusError):
        await objects.get_object(bus, subjects.PROMPTS_BUCKET, "p")
