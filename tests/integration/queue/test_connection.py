"""A connection to the queue outlasts whatever the server or the way to it does."""

import asyncio
import contextlib
from typing import Any

import pytest
from nats.aio.msg import Msg

from protocol import subjects
from protocol.errors import BusError
from protocol.nats import topology
from protocol.nats.bus import Bus, LastingClient, shared_credentials
from protocol.nats.pull import Delivery, PullConsumer, ack
from tests.integration.queue.relay import Relay
from tests.nats_server import NatsServer
from tests.waiting import HANGS_S, until

MODEL = "m"
LANE = subjects.HIGH_LANES[0]


def reconnected(bus: Bus) -> asyncio.Event:
    event = asyncio.Event()

    async def on_reconnected() -> None:
        event.set()

    bus.on_reconnect(on_reconnected)
    return event


async def publish_mebibytes(bus: Bus, count: int) -> None:
    async with asyncio.timeout(HANGS_S):
        for _ in range(count):
            await bus.publish("somewhere", bytes(1024 * 1024))


async def test_a_peer_that_vanishes_with_output_unsent_is_left_for_another(nats_server: NatsServer) -> None:
    async with Relay(nats_server.port) as relay:
        options = {"dont_randomize": True, "ping_interval": 0.2}
        bus = await Bus.connect([relay.url, nats_server.url], name="test", options=options)
        is_back = reconnected(bus)
        relay.vanish()
        # Never a pause for the peer's sake, and a bound: nats-py alone would wait ten seconds, then buffer on.
        with pytest.raises(BusError, match="not sent yet"):
            await publish_mebibytes(bus, 100)
        async with asyncio.timeout(HANGS_S):
            await is_back.wait()
        assert relay.connections == 1
        await bus.close()


async def test_closing_towards_a_vanished_peer_ends(nats_server: NatsServer) -> None:
    async with Relay(nats_server.port) as relay:
        bus = await Bus.connect(relay.url, name="test")
        relay.vanish()
        await publish_mebibytes(bus, 20)
        async with asyncio.timeout(HANGS_S):
            await bus.close()


async def test_closing_while_the_server_is_away_ends_with_something_unsent(nats_server: NatsServer) -> None:
    bus = await Bus.connect(nats_server.url, name="test")
    nats_server.kill()
    await until(lambda: not bus.connected)
    await bus.publish("somewhere", b"unsent")
    await bus.close()
    assert bus.client.is_closed


async def test_what_is_published_as_the_connection_is_lost_raises_nothing_else(nats_server: NatsServer) -> None:
    """Regression: uvloop's RuntimeError came out of ``publish``."""
    bus = await Bus.connect(nats_server.url, name="test")
    is_back = reconnected(bus)
    await bus.client.flush()  # nothing else is under way
    bus.client.abort()
    while bus.connected:
        await bus.publish("somewhere", b"unsent")
        await asyncio.sleep(0)
    async with asyncio.timeout(HANGS_S):
        await is_back.wait()
    await bus.close()


async def test_a_consumer_that_stops_as_the_connection_is_lost_does_so(nats_server: NatsServer) -> None:
    """Regression: a worker that drained as its queue server went away ended with a traceback."""
    bus = await Bus.connect(nats_server.url, name="test")
    consumer = PullConsumer(bus, subjects.INTERACTIVE_STREAM, "c", lambda _: asyncio.sleep(0))
    await consumer.start()
    is_back = reconnected(bus)
    bus.client.abort()
    assert bus.connected  # it has not been noticed yet
    await consumer.stop()
    async with asyncio.timeout(HANGS_S):
        await is_back.wait()
    await bus.close()


async def test_a_server_that_turns_clients_away_for_a_while_gets_them_back(nats_server: NatsServer) -> None:
    clients = [await Bus.connect(nats_server.url, name=f"test-{number}") for number in range(2)]
    nats_server.reload("max_connections: 1\n")  # it sends one of them an -ERR, and each of that one's new tries too
    await until(lambda: not all(bus.connected for bus in clients))
    nats_server.reload("max_connections: 10\n")
    await until(lambda: all(bus.connected for bus in clients))
    for bus in clients:
        assert not bus.client.is_closed
        await bus.close()


async def test_an_acknowledgement_is_not_kept_for_a_later_life_of_the_server(nats_server: NatsServer) -> None:
    bus = await Bus.connect(nats_server.url, name="test")
    await topology.apply(bus, [MODEL], topology.QueueBounds(), limit_s=HANGS_S)
    taken: list[Delivery] = []

    async def take(delivery: Delivery) -> None:
        taken.append(delivery)

    name = subjects.job_consumer(MODEL, LANE)
    consumer = PullConsumer(bus, subjects.INTERACTIVE_STREAM, name, take, tier="spot")
    await consumer.start()
    await bus.publish_durable(subjects.job_subject(MODEL, LANE), b"old", message_id="old", ttl_s=60)
    await consumer.pull(1)
    await until(lambda: taken)
    nats_server.kill()
    await until(lambda: not bus.connected)
    await ack(bus, taken[0])
    with pytest.raises(BusError, match="not connected"):  # nor is a job: its tries would be buffered side by side
        await bus.publish_durable(subjects.job_subject(MODEL, LANE), b"old", message_id="old", ttl_s=60)
    assert bus.client.pending_data_size == 0
    nats_server.start()
    await until(lambda: bus.connected)
    await bus.close()


@pytest.mark.parametrize(
    ("servers", "options"),
    [
        (["nats://a:4222", "nats://b:4222"], {}),
        (["nats://me:pw@a:4222", "nats://b:4222"], {"user": "me", "password": "pw"}),
        (["nats://me:pw@a:4222", "nats://me:pw@b:4222"], {"user": "me", "password": "pw"}),
        (["nats://me:pw@a:4222", "nats://you:pw@b:4222"], {}),
        (["nats://secret@a:4222"], {"token": "secret"}),
    ],
)
def test_credentials_of_the_urls_hold_for_servers_learnt_of_later(servers: list[str], options: dict[str, str]) -> None:
    assert shared_credentials(servers) == options


async def test_a_listener_that_raises_gets_the_next_message_also_after_a_restart(nats_server: NatsServer) -> None:
    bus = await Bus.connect(nats_server.url, name="test")
    received: list[bytes] = []

    def handler(message: Msg) -> None:
        received.append(message.data)
        raise ValueError("a mistake of the handler's")

    await bus.listen("somewhere", handler)
    await bus.publish("somewhere", b"1")
    await bus.publish("somewhere", b"2")
    await until(lambda: received == [b"1", b"2"])
    is_back = reconnected(bus)
    nats_server.kill()
    nats_server.start()
    async with asyncio.timeout(HANGS_S):
        await is_back.wait()
    await bus.publish("somewhere", b"3")
    await until(lambda: received == [b"1", b"2", b"3"])
    await bus.close()


async def test_the_first_connection_has_its_limit_also_where_a_cancellation_is_lost() -> None:
    # A gateway and a worker hung at their start, once in some dozens of tries at a server that refused them.
    class Deaf(LastingClient):
        async def connect(self, *_: Any, **__: Any) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(HANGS_S)
            await asyncio.sleep(HANGS_S)

    with pytest.raises(TimeoutError):
        await Deaf().connect_within(0.01, ["nats://127.0.0.1:1"])
