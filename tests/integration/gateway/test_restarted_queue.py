"""The queue server loses its memory stream, whose sequence numbers then begin again."""

import asyncio

from gateway.dispatch.dispatcher import Dispatcher
from protocol import job as m
from protocol import subjects
from protocol.job import StepFrame
from protocol.nats.bus import Bus
from protocol.nats.pull import Delivery, PullConsumer
from tests.integration.gateway.conftest import admission
from tests.nats_server import NatsServer
from tests.unit.gateway.admission.controls import ticket_of
from tests.waiting import HANGS_S


async def pulls_from(bus: Bus, lane: str) -> tuple[PullConsumer, asyncio.Queue[Delivery]]:
    taken: asyncio.Queue[Delivery] = asyncio.Queue()
    consumer = subjects.job_consumer("m", lane)
    pulls = PullConsumer(bus, subjects.INTERACTIVE_STREAM, consumer, taken.put, tier="spot")
    await pulls.start()
    return pulls, taken


async def test_a_leaving_caller_takes_nobody_elses_job_along(
    dispatcher: tuple[Dispatcher, Bus], nats_server: NatsServer
) -> None:
    """Request "old" was message 1 before the restart; message 1 is now the job of "new"."""
    gateway, bus = dispatcher
    async with asyncio.timeout(HANGS_S):
        old = gateway.open(ticket_of(admission("old")))
        pulls, taken = await pulls_from(bus, old.ticket.lane)
        await pulls.pull(1)
        await taken.get()
        frame = m.Accepted("old", 1, 0, "w", "p", "p", "r", 0.0)
        await bus.publish(subjects.frames_subject("g"), m.encode(StepFrame(m.PROTOCOL_VERSION, "w", (frame,))))
        while old.worker_id is None:
            await asyncio.sleep(0.01)
        new = gateway.open(ticket_of(admission("new")))
        while new.current.stream_sequence != 2:
            await asyncio.sleep(0.01)
        nats_server.kill()
        nats_server.start()
        while new.current.stream_sequence != 1:
            await asyncio.sleep(0.01)
        gateway.close(old, 200)
        await asyncio.sleep(0.05)  # time for a wrong deletion to leave before our pull does
        pulls, taken = await pulls_from(bus, new.ticket.lane)
        await pulls.pull(1)
        assert m.decode_job((await taken.get()).payload).request_id == "new"
