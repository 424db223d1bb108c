"""The simulated and a real queue server give the same replies to the same requests."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from protocol import subjects
from protocol.errors import BusError
from protocol.nats import pull, topology
from protocol.nats.bus import Bus
from protocol.nats.pull import Delivery, PullConsumer
from tests.simulation.network import connect_bus
from tests.simulation.plan import plan_of
from tests.simulation.virtual_time import Process, VirtualLoop, simulated_world
from tests.simulation.world import World

MODEL = "org/model.v1"
LANE = subjects.HIGH_LANES[0]
SUBJECT = subjects.job_subject(MODEL, LANE)
LIMIT_S = 30.0

Connect = Callable[[str], Awaitable[Bus]]


class Taken:
    """A consumer's deliveries, and the ends of its pulls."""

    def __init__(self, bus: Bus, tier: str = "spot") -> None:
        self.deliveries: list[Delivery] = []
        self.ends = 0
        self.changed = asyncio.Event()
        name = subjects.job_consumer(MODEL, LANE)
        self.pulls = PullConsumer(bus, subjects.INTERACTIVE_STREAM, name, self._take, tier=tier, on_end=self._end)

    async def _take(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        self.changed.set()

    def _end(self) -> None:
        self.ends += 1
        self.changed.set()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not done():
                self.changed.clear()
                await self.changed.wait()

    def received(self) -> list[Any]:
        return [(one.payload.decode(), one.stream_sequence, one.deliveries) for one in self.deliveries]


async def publish(bus: Bus, name: str, **rest: Any) -> int:
    return await bus.publish_durable(SUBJECT, name.encode(), message_id=name, **rest)


async def until_offered(bus: Bus, count: int) -> None:
    """Wait until the consumer knows of so many messages: nats-server acknowledges one before it tells consumers."""
    name = f"CONSUMER.INFO.{subjects.INTERACTIVE_STREAM}.{subjects.job_consumer(MODEL, LANE)}"
    async with asyncio.timeout(LIMIT_S):
        while (await bus.api(name))["num_pending"] < count:
            await asyncio.sleep(0.01)


async def failure(work: Awaitable[Any]) -> tuple[str, int]:
    try:
        await work
    except BusError as error:
        return type(error).__name__, getattr(error, "code", 0)
    return "none", 0


async def storing(connect: Connect) -> list[Any]:
    bus = await connect("storing")
    await topology.apply(bus, [MODEL], topology.QueueBounds(max_jobs=3))
    seen: list[Any] = [
        await publish(bus, "a"),
        await publish(bus, "b"),
        await publish(bus, "a"),
        await publish(bus, "c"),
    ]
    seen.append(await failure(publish(bus, "d")))
    found = await bus.get_message(subjects.INTERACTIVE_STREAM, seq=2)
    seen.append(found and (found["subject"], found["seq"], found["data"], found["hdrs"]))
    seen.append(await bus.get_message(subjects.INTERACTIVE_STREAM, seq=99))
    seen.append((await bus.get_message(subjects.INTERACTIVE_STREAM, seq=1, next_by_subj=SUBJECT) or {})["seq"])
    seen += [await bus.delete_message(subjects.INTERACTIVE_STREAM, 2) for _ in range(2)]
    seen.append(await publish(bus, "d"))
    info = await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}", {"subjects_filter": "rq.>"})
    seen.append([info["state"][name] for name in ("messages", "first_seq", "last_seq", "subjects")])
    await topology.apply(bus, [MODEL], topology.QueueBounds(max_jobs=3))
    await topology.apply(bus, [MODEL], topology.QueueBounds(max_jobs=4))
    seen.append((await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}"))["config"]["max_msgs"])
    seen.append(await failure(bus.api("STREAM.INFO.NONE")))
    seen.append(await topology.consumer_exists(bus, subjects.INTERACTIVE_STREAM, "none"))
    seen.append(await failure(bus.request("no.responder", b"", timeout_s=LIMIT_S)))
    await bus.close()
    return seen


async def comparing(connect: Connect) -> list[Any]:
    bus = await connect("comparing")
    await topology.apply(bus, [MODEL], topology.QueueBounds())
    entry = subjects.kv_subject(subjects.QUOTAS_BUCKET, "a")
    seen: list[Any] = []
    for number, expected in enumerate((0, 0, 1, 1, 2)):
        put = bus.publish_durable(entry, b"x%d" % number, message_id=f"n{number}", expected_last_sequence=expected)
        seen.append(await failure(put))
    stream = f"KV_{subjects.QUOTAS_BUCKET}"
    last = await bus.get_message(stream, last_by_subj=entry)
    seen.append(last and (last["seq"], last["data"]))
    info = await bus.api(f"STREAM.INFO.{stream}")
    seen.append(info["state"]["messages"])
    await bus.close()
    return seen


async def pulling(connect: Connect) -> list[Any]:
    bus = await connect("pulling")
    await topology.apply(bus, [MODEL], topology.QueueBounds())
    taken = Taken(bus)
    await taken.pulls.start()
    await taken.pulls.pull(1, expires_s=0)
    await taken.until(lambda: taken.ends == 1)  # no messages
    for name in "abc":
        await publish(bus, name)
    await until_offered(bus, 3)
    await taken.pulls.pull(2, expires_s=0)
    await taken.until(lambda: len(taken.deliveries) == 2)
    first, second = taken.deliveries
    seen: list[Any] = [(first.pending, second.pending), first.ack_subject.split(".")[:7]]
    await pull.ack(bus, first)
    await pull.nak(bus, second)
    await taken.pulls.pull(3, expires_s=1)
    await taken.until(lambda: len(taken.deliveries) == 4)
    seen.append(sorted(taken.received()[2:]))  # the returned one and the last
    for delivery in taken.deliveries[2:]:
        await pull.term(bus, delivery)
    await taken.until(lambda: taken.ends >= 2)
    await publish(bus, "e")
    await taken.pulls.pull(1, expires_s=2)
    await taken.until(lambda: len(taken.deliveries) == 5)
    await taken.pulls.pull(1, expires_s=5)  # not acknowledged: redelivered
    await taken.until(lambda: len(taken.deliveries) == 6)
    seen.append(taken.received()[4:])
    await pull.ack(bus, taken.deliveries[-1])
    async with asyncio.timeout(LIMIT_S):
        while (await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}"))["state"]["messages"]:
            await asyncio.sleep(0.01)
    await bus.close()
    return seen


async def preferring(connect: Connect) -> list[Any]:
    bus = await connect("preferring")
    await topology.apply(bus, [MODEL], topology.QueueBounds())
    expensive, cheap = Taken(bus, "hosted"), Taken(bus, "spot")
    for one in (expensive, cheap):
        await one.pulls.start()
        await one.pulls.pull(1, expires_s=20)
    await bus.client.flush(5)
    await publish(bus, "a")
    await cheap.until(lambda: bool(cheap.deliveries))
    await publish(bus, "b")
    await expensive.until(lambda: bool(expensive.deliveries))
    await bus.close()
    return [cheap.received(), expensive.received()]


async def leaving(connect: Connect) -> list[Any]:
    """Return the remaining worker's jobs after another's connection ended, and a message to the latter's subject."""
    bus, worker = await connect("watcher"), await connect(subjects.connection_name("w"))
    await topology.apply(bus, [MODEL], topology.QueueBounds())
    heard: asyncio.Queue[Any] = asyncio.Queue()
    await bus.subscribe(subjects.control_subject("w"), heard.put)
    gone, here = Taken(worker), Taken(bus)
    for one in (gone, here):
        await one.pulls.start()
        await one.pulls.pull(1, expires_s=20)
    await worker.close()
    await bus.client.flush(5)
    await publish(bus, "a")
    await here.until(lambda: bool(here.deliveries))
    await bus.publish(subjects.control_subject("w"), b"x")
    message = await asyncio.wait_for(heard.get(), LIMIT_S)
    await bus.close()
    return [here.received(), message.data]


@pytest.mark.parametrize("asking", [storing, comparing, pulling, preferring, leaving])
def test_both_servers_answer_the_same(asking: Callable[[Connect], Awaitable[list[Any]]], nats_url: str) -> None:
    async def connect(name: str) -> Bus:
        return await Bus.connect(nats_url, name=name)

    simulated = simulated_answers(asking)
    real: list[Any] = asyncio.run(asking(connect))  # type: ignore[arg-type]
    assert json.dumps(simulated, default=str) == json.dumps(real, default=str)


def simulated_answers(asking: Callable[[Connect], Awaitable[list[Any]]]) -> list[Any]:
    loop = VirtualLoop()
    with simulated_world(loop, 1):
        world = World(loop, plan_of(1).seed)
        process = Process(loop, "asker")

        async def connect(name: str) -> Bus:
            return await connect_bus(world, process, world.host("asker"), name)

        answers: list[Any] = loop.run_until_complete(process.run(asking(connect)))
        assert world.offences == []
        loop.throw_away()
    return answers
