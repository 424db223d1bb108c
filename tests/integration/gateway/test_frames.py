"""A worker's frames do nothing to the requests of others."""

import asyncio

import msgspec
import pytest

from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.lifecycle import OpenRequest, State
from protocol import job as m
from protocol import subjects
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import admission
from tests.unit.gateway.admission.controls import ticket_of
from tests.waiting import HANGS_S, until


async def send(bus: Bus, *frames: object, subject: str = "fr.g") -> None:
    step = [m.PROTOCOL_VERSION, "w", frames]
    await bus.publish(subject, msgspec.msgpack.encode(step))


async def accepted_request(dispatcher: Dispatcher, bus: Bus, request_id: str) -> OpenRequest:
    request = dispatcher.open(ticket_of(admission(request_id)))
    await send(bus, m.Accepted(request_id, 1, 0, "w", "p", "p", "r", 0.0))
    await until(lambda: request.worker_id is not None)
    return request


@pytest.mark.parametrize(
    ("strange", "attempts"),
    [
        (m.Tokens("one", 1, 1, -5, (1,), "x"), 2),
        (m.Tokens("one", 1, 1, 5, (1,), "x"), 2),
        (["t", "one", 1, 1, 0, [-1], "x"], 2),
        (["later", "one", 1, 1, {"what": "ever"}], 1),
    ],
)
async def test_a_strange_frame_takes_no_other_of_its_step_along(
    dispatcher: tuple[Dispatcher, Bus], strange: object, attempts: int
) -> None:
    gateway, bus = dispatcher
    async with asyncio.timeout(HANGS_S):
        one, other = [await accepted_request(gateway, bus, name) for name in ("one", "other")]
        await send(bus, strange, m.Tokens("other", 1, 1, 0, (7,), "y"))
        await until(lambda: other.completion_tokens == 1)
        assert (other.attempt, one.attempt, one.completion_tokens) == (1, attempts, 0)
        if attempts == 1:
            await send(bus, m.Tokens("one", 1, 2, 0, (8,), "z"))
            await until(lambda: one.completion_tokens == 1)
        assert one.state is not State.ENDED


async def test_frames_in_another_workers_name_are_dropped(dispatcher: tuple[Dispatcher, Bus]) -> None:
    """The server checks who may publish on a subject, the gateway that the frames are of the subject's worker."""
    gateway, bus = dispatcher
    async with asyncio.timeout(HANGS_S):
        one, other = [await accepted_request(gateway, bus, name) for name in ("one", "other")]
        forged = subjects.frames_by_worker_subject(subjects.frames_subject("g"), "demo.box.w")
        await send(bus, m.Tokens("one", 1, 1, 0, (7,), "x"), subject=forged)
        own = subjects.frames_by_worker_subject(subjects.frames_subject("g"), "w")
        await send(bus, m.Tokens("other", 1, 1, 0, (7,), "y"), subject=own)
        await until(lambda: other.completion_tokens == 1)
        assert one.completion_tokens == 0
