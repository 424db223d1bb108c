"""The queue server loses its memory stream, whose sequence numbers then begin anew."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.dispatch.admission import Admission
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.registry import WorkerRegistry
from gateway.metrics.requests import RequestSeries
from gateway.settings import GatewaySettings, ModelSettings
from protocol import messages as m
from protocol import subjects
from protocol.bus import Bus
from protocol.outbox import Outbox
from protocol.pull import Delivery, PullConsumer
from tests.nats_server import NatsServer
from tests.unit.gateway.admission.controls import ticket_of

LIMIT_S = 20


def admission(request_id: str) -> Admission:
    now_s = time.monotonic()
    sampling = m.Sampling(max_tokens=9)
    prompt = m.pack_token_ids([1])
    return Admission(
        request_id,
        "chat.completions",
        "m",
        "k",
        "k",
        "t",
        True,
        prompt,
        1,
        "messages",
        sampling,
        now_s,
        0,
        now_s,
        600.0,
    )


@pytest.fixture
async def dispatcher(nats_url: str, tmp_path: Path) -> AsyncIterator[tuple[Dispatcher, Bus]]:
    bus = await Bus.connect(nats_url, name="test")
    settings = GatewaySettings(
        gateway_id="g",
        nats_urls=(nats_url,),
        database_url="sqlite:///unused",
        data_dir=tmp_path,
        key_pepper=SecretStr("unused"),
        models={"m": ModelSettings()},
    )
    registry = WorkerRegistry(bus)
    outbox = Outbox(bus, subjects.REQUEST_USAGE_SUBJECT, 10)
    dispatcher = Dispatcher(bus, settings, registry, outbox, series=RequestSeries())
    await dispatcher.start()
    yield dispatcher, bus
    await bus.close()


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
    async with asyncio.timeout(LIMIT_S):
        old = gateway.open(ticket_of(admission("old")))
        pulls, taken = await pulls_from(bus, old.ticket.lane)
        await pulls.pull(1)
        await taken.get()
        frame = m.Accepted("old", 1, 0, "w", "p", "p", "r", 0.0)
        await bus.publish(subjects.frames_subject("g"), m.encode(m.StepFrame(m.PROTOCOL_VERSION, "w", (frame,))))
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
