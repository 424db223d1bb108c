"""A mistake of ours in the handling of one request ends that request alone: never a loop, a step or the gateway."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gateway.admission.registry import WorkerRegistry
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.lifecycle import OpenRequest, State
from gateway.errors import Failure
from gateway.request.mailbox import Ended
from protocol import job as m
from protocol import subjects
from protocol.errors import ErrorCode
from protocol.job import StepFrame
from protocol.nats.bus import Bus
from protocol.nats.outbox import Outbox
from tests.unit.gateway.admission.controls import admission, gateway_settings, ticket_of
from tests.waiting import HANGS_S, until


class Gateway:
    """A dispatcher at work, and two requests of it."""

    def __init__(self, dispatcher: Dispatcher, bus: Bus, running: asyncio.Task[None]) -> None:
        self.bus, self.running = bus, running
        now_s = asyncio.get_running_loop().time()
        times: dict[str, Any] = {"received_s": now_s, "admitted_s": now_s}
        self.bad, self.good = (dispatcher.open(ticket_of(admission(name, **times))) for name in ("bad", "good"))

    async def step(self, *frames: m.Frame) -> None:
        step = m.encode(StepFrame(m.PROTOCOL_VERSION, "w", frames))
        await self.bus.publish(subjects.frames_subject("g"), step)

    async def accept_both(self) -> None:
        await self.step(*(m.Accepted(name, 1, 0, "w", "p", "p", "r", 0.0) for name in ("bad", "good")))
        await until(lambda: self.bad.worker_id and self.good.worker_id)


@pytest.fixture
async def gateway(nats_url: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    bus = await Bus.connect(nats_url, name="test")
    settings = gateway_settings(nats_urls=(nats_url,), data_dir=tmp_path)
    outbox = Outbox(bus, subjects.REQUEST_USAGE_SUBJECT, 10)
    intents = Outbox(bus, subjects.INTENT_USAGE_SUBJECT, 10)
    dispatcher = Dispatcher(bus, settings, WorkerRegistry(bus), outbox, intents=intents)
    await dispatcher.start()
    running = asyncio.create_task(dispatcher.run())
    yield Gateway(dispatcher, bus, running)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await bus.close()


def breaks(monkeypatch: pytest.MonkeyPatch, *methods: str) -> None:
    """Raise in these methods of the request "bad"."""
    for method in methods:
        real = getattr(OpenRequest, method)

        def broken(request: OpenRequest, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            return _raise() if request.request_id == "bad" else real(request, *args, **kwargs)

        monkeypatch.setattr(OpenRequest, method, broken)


def _raise() -> NoReturn:
    raise ZeroDivisionError("nobody foresaw this")


async def failure_of(request: OpenRequest) -> Failure | None:
    async with asyncio.timeout(HANGS_S):
        while True:
            for event in await request.mailbox.take():
                if isinstance(event, Ended):
                    return event.failure


@pytest.mark.parametrize("broken", [("on_tick",), ("on_tick", "fail")])
async def test_a_tick(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: tuple[str, ...]
) -> None:
    breaks(monkeypatch, *broken)
    failure = await failure_of(gateway.bad)
    assert failure is not None
    assert failure.code is ErrorCode.INTERNAL_ERROR
    await until(lambda: gateway.bad.state is State.ENDED)
    assert "ZeroDivisionError: nobody foresaw this" in caplog.text
    assert not gateway.running.done()
    await gateway.step(m.Accepted("good", 1, 0, "w", "p", "p", "r", 0.0))
    await until(lambda: gateway.good.worker_id is not None)


async def test_a_frame(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of others that came after it in its step were dropped."""
    await gateway.accept_both()
    breaks(monkeypatch, "on_frame")
    await gateway.step(*(m.Tokens(name, 1, 1, 0, (1,), "x") for name in ("bad", "good")))
    await until(lambda: gateway.good.completion_tokens)
    failure = await failure_of(gateway.bad)
    assert failure is not None
    assert failure.code is ErrorCode.INTERNAL_ERROR


async def test_a_lost_worker(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests after it stayed with the worker that was gone."""
    await gateway.accept_both()
    breaks(monkeypatch, "worker_lost")
    await gateway.bus.publish(subjects.heartbeat_subject("w"), b"")  # it has signed off
    await until(lambda: gateway.good.attempt == 2)
    assert await failure_of(gateway.bad) is not None
    assert not gateway.running.done()
