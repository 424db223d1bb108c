"""Jobs of a newer gateway: an older worker leaves them to newer workers."""

import asyncio

import msgspec

from protocol import job as m
from protocol import subjects
from protocol.nats.pull import Delivery, PullConsumer, ack
from tests.integration.pool_worker.playing_gateway import MODEL, PlayingGateway, running_worker, settings_for
from tests.waiting import HANGS_S


async def publish_newer(gateway: PlayingGateway, *, lane: str = "h0") -> tuple[str, int]:
    """Publish jobs with unknown fields of unknown meaning."""
    job = gateway.job(request_id="newer")
    fields = msgspec.to_builtins(job) | {"v": m.PROTOCOL_VERSION + 1, "sampling": ["another", "shape"], "later": {}}
    payload = msgspec.msgpack.encode(fields)
    await gateway.bus.publish_durable(subjects.job_subject(MODEL, lane), payload, message_id="newer.1")
    return job.request_id, job.attempt


async def test_a_newer_worker_gets_the_job_and_the_older_one_keeps_working(
    gateway: PlayingGateway, nats_url: str
) -> None:
    taken: asyncio.Queue[Delivery] = asyncio.Queue()
    async with running_worker(settings_for(nats_url)):
        newer = await publish_newer(gateway)
        while not (await gateway.bus.api(f"CONSUMER.INFO.RQ.{subjects.job_consumer(MODEL, 'h0')}"))["num_redelivered"]:
            await asyncio.sleep(0.01)
        attempts = [await gateway.ask(request_id=f"own{number}") for number in range(3)]
        await gateway.end_of_all(attempts)
        assert gateway.last(newer) is None
        pulls = PullConsumer(
            gateway.bus, subjects.INTERACTIVE_STREAM, subjects.job_consumer(MODEL, "h0"), taken.put, tier="spot"
        )
        await pulls.start()
        async with asyncio.timeout(HANGS_S):
            while taken.empty():
                if not pulls.outstanding():
                    await pulls.pull(1, expires_s=1.0)
                await asyncio.sleep(0.05)
        delivery = taken.get_nowait()
        assert m.decode_job_head(delivery.payload).request_id == "newer"
        await ack(gateway.bus, delivery)
        await gateway.wait_until_queue_is_empty()


async def test_a_job_no_worker_can_read_is_declined(gateway: PlayingGateway, nats_url: str) -> None:
    settings = settings_for(nats_url).model_copy(update={"max_unreadable_deliveries": 3})
    async with running_worker(settings):
        last = await gateway.end_of(await publish_newer(gateway))
        assert isinstance(last, m.Failed)
        assert (last.seq, last.code, last.retryable) == (0, "no_workers", False)
        assert f"protocol {m.PROTOCOL_VERSION + 1}" in last.message
        await gateway.wait_until_queue_is_empty()
