"""Streams that are not there any more, or cannot be made as they should be, while the gateway runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.lifecycle import OpenRequest
from protocol import subjects
from protocol.errors import BusError
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.nats.topology import QueueBounds
from tests.integration.gateway.conftest import admission
from tests.nats_server import NatsServer
from tests.unit.gateway.admission.controls import ticket_of
from tests.waiting import HANGS_S, until

RQ = subjects.INTERACTIVE_STREAM


@asynccontextmanager
async def running(dispatcher: Dispatcher) -> AsyncIterator[None]:
    work = asyncio.create_task(dispatcher.run())
    try:
        yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def stored_requests(bus: Bus) -> list[str]:
    state = (await bus.api(f"STREAM.INFO.{RQ}", {"subjects_filter": ">"}))["state"]
    return sorted(state.get("subjects", {}))


async def test_deleted_streams_are_made_again_with_the_first_publish(dispatcher: tuple[Dispatcher, Bus]) -> None:
    gateway, bus = dispatcher
    names = set((await bus.api("STREAM.NAMES"))["streams"])
    async with running(gateway), asyncio.timeout(HANGS_S):
        for name in names:
            await bus.api(f"STREAM.DELETE.{name}")
        request = gateway.open(ticket_of(admission("new")))
        await until(lambda: request.current.stream_sequence)
        while set((await bus.api("STREAM.NAMES"))["streams"] or ()) != names:
            await asyncio.sleep(0.01)
        assert await topology.consumer_exists(bus, RQ, subjects.job_consumer("m", request.ticket.lane))
        assert await topology.consumer_exists(bus, subjects.USAGE_STREAM, subjects.LEDGER_CONSUMER)


async def test_a_job_in_a_deleted_stream_goes_into_the_new_one(dispatcher: tuple[Dispatcher, Bus]) -> None:
    gateway, bus = dispatcher
    async with running(gateway), asyncio.timeout(HANGS_S):
        request = gateway.open(ticket_of(admission("waiting")))
        await until(lambda: request.current.stream_sequence)
        await bus.api(f"STREAM.DELETE.{RQ}")
        await until(lambda: request.attempt == 2 and request.current.stream_sequence)
        assert await stored_requests(bus) == [subjects.job_subject("m", subjects.RESUME_LANE)]


async def test_what_is_withdrawn_is_not_what_has_taken_its_number(dispatcher: tuple[Dispatcher, Bus]) -> None:
    """Another gateway has made the deleted stream again, and its job is now message 1."""
    gateway, bus = dispatcher
    async with asyncio.timeout(HANGS_S):
        old = gateway.open(ticket_of(admission("old")))
        await until(lambda: old.current.stream_sequence == 1)
        await bus.api(f"STREAM.DELETE.{RQ}")
        await topology.apply(bus, ["m"], QueueBounds())
        job = subjects.job_subject("m", subjects.HIGH_LANES[0])
        assert await bus.publish_durable(job, b"another gateway's", message_id="new.1") == 1
        gateway.close(old, None)
        await until(lambda: not gateway._background)
        assert await stored_requests(bus) == [job]


async def is_stored(request: OpenRequest, bus: Bus) -> bool:
    sequence = request.current.stream_sequence
    try:
        return sequence is not None and await bus.get_message(RQ, seq=sequence) is not None
    except BusError:  # the queue server has just begun again
        return False


@pytest.mark.parametrize("bad", [subjects.DEAD_LETTER_STREAM, subjects.USAGE_STREAM])
async def test_a_stream_that_cannot_be_made_keeps_no_request_from_being_restored(
    bad: str, dispatcher: tuple[Dispatcher, Bus], nats_server: NatsServer
) -> None:
    gateway, bus = dispatcher
    async with asyncio.timeout(HANGS_S):
        config = (await bus.api(f"STREAM.INFO.{bad}"))["config"]
        await bus.api(f"STREAM.DELETE.{bad}")
        refused = {**config, "retention": "workqueue"}  # the server does not let this be changed
        await bus.api(f"STREAM.CREATE.{bad}", refused)
        waiting = gateway.open(ticket_of(admission("waiting")))
        await until(lambda: waiting.current.stream_sequence)
        nats_server.kill()
        nats_server.start()
        await until(lambda: is_stored(waiting, bus))  # its stream was in memory, and began empty
        running_one = gateway.open(ticket_of(admission("next")))
        await until(lambda: running_one.current.stream_sequence)
