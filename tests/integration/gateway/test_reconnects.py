"""The gateway loses its connection while jobs wait, for longer than the server knows duplicates as such."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.lifecycle import OpenRequest
from protocol import subjects
from protocol.nats import topology
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import admission, dispatching
from tests.integration.queue.relay import Relay
from tests.integration.queued_jobs import queued_jobs, until_queued
from tests.nats_server import NatsServer
from tests.unit.gateway.admission.controls import ticket_of
from tests.waiting import HANGS_S, until

JOBS = 20


@pytest.fixture
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server forgets at once which messages it has seen."""
    streams = topology.streams

    def with_short_memory(bounds: topology.QueueBounds) -> list[dict[str, Any]]:
        window = {"duplicate_window": topology.NS // 10}
        return [stream | window if "duplicate_window" in stream else stream for stream in streams(bounds)]

    monkeypatch.setattr(topology, "streams", with_short_memory)


async def waiting_jobs(dispatcher: Dispatcher) -> list[OpenRequest]:
    requests = [dispatcher.open(ticket_of(admission(f"r{number}"))) for number in range(JOBS)]
    await until(lambda: all(request.current.stream_sequence for request in requests))
    return requests


def watched(bus: Bus, requests: list[OpenRequest]) -> Callable[[], Awaitable[None]]:
    """Return what waits until the next reconnect has been dealt with: each job's place in the queue is known again."""
    hooks_ran: asyncio.Queue[None] = asyncio.Queue()

    async def after_all_others() -> None:
        hooks_ran.put_nowait(None)

    async def restored() -> None:
        await hooks_ran.get()  # the dispatcher's has forgotten all places
        await until(lambda: all(request.current.stream_sequence for request in requests))

    bus.on_reconnect(after_all_others)
    return restored


@pytest.mark.usefixtures("short_memory")
async def test_jobs_that_wait_through_reconnects_are_in_the_queue_once(nats_server: NatsServer, tmp_path: Path) -> None:
    async with (
        asyncio.timeout(HANGS_S),
        Relay(nats_server.port) as relay,
        dispatching(relay.url, tmp_path) as (one, bus),
    ):
        requests = await waiting_jobs(one)
        restored = watched(bus, requests)
        await asyncio.sleep(0.3)  # longer than the server remembers
        for _ in range(3):
            relay.cut()
            await restored()
        assert await queued_jobs(bus) == JOBS
        assert [request.attempt for request in requests] == [1] * JOBS
        for request in requests:  # each still knows its own: whoever leaves takes it along
            one.close(request, None)
        await until_queued(bus, 0)


@pytest.mark.usefixtures("short_memory")
async def test_jobs_that_wait_through_a_restart_of_the_queue_server_are_in_the_queue_once(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    """It has lost them all."""
    async with asyncio.timeout(HANGS_S), dispatching(nats_server.url, tmp_path) as (one, bus):
        requests = await waiting_jobs(one)
        restored = watched(bus, requests)
        nats_server.kill()
        nats_server.start()
        await restored()
        assert await queued_jobs(bus) == JOBS
        assert [request.attempt for request in requests] == [1] * JOBS


@pytest.mark.usefixtures("short_memory")
async def test_a_job_that_was_taken_while_nobody_listened_goes_on(nats_server: NatsServer, tmp_path: Path) -> None:
    """Its worker has it, and has said so to nobody; the others stay where they are."""
    async with (
        asyncio.timeout(HANGS_S),
        Relay(nats_server.port) as relay,
        dispatching(relay.url, tmp_path) as (one, bus),
    ):
        requests = await waiting_jobs(one)
        await asyncio.sleep(0.3)
        taken = requests[7].current.stream_sequence
        assert taken is not None
        await bus.delete_message(subjects.INTERACTIVE_STREAM, taken)
        restored = watched(bus, requests)
        relay.cut()
        await restored()
        await until_queued(bus, JOBS)
