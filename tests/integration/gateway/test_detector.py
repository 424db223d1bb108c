"""Workers that count as lost when a connection ends, and those that do not."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from gateway.admission.registry import WorkerRegistry
from gateway.dispatch.losses import LossDetector
from protocol import subjects
from protocol.errors import ErrorCode
from protocol.nats.bus import Bus
from tests.waiting import until

EVENTS = "event.of.a.test"  # the server's own subject may not be published to


class Watched:
    """A detector, the registry that it tells, and whom it has lost."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.registry = WorkerRegistry(bus)
        self.registry.on_lost = lambda worker_id, _code, _reason, _now_s: self.lost.append(worker_id)
        self.lost: list[str] = []
        self.busy: list[str] = []
        self.detector = LossDetector(bus, self.registry, lambda: self.busy)

    def hear(self, *worker_ids: str) -> None:
        for worker_id in worker_ids:
            self.registry.seen(worker_id, time.monotonic())

    def give_work(self, *worker_ids: str) -> None:
        self.busy += worker_ids
        self.detector.on_work()

    async def tell(self, worker_id: str, reason: str) -> None:
        event = {"client": {"name": subjects.connection_name(worker_id)}, "reason": reason}
        await self.bus.publish(EVENTS, json.dumps(event).encode())


@pytest.fixture
async def watched(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(subjects, "DISCONNECTS", EVENTS)
    bus = await Bus.connect(nats_url, name="test")
    watched = Watched(bus)
    await watched.detector.start()
    running = asyncio.create_task(watched.detector.run())
    yield watched
    running.cancel()
    await bus.close()


async def listen(bus: Bus, worker_id: str) -> list[bytes]:
    heard: list[bytes] = []

    async def on_control(message: object) -> None:
        heard.append(message.data)  # type: ignore[attr-defined]

    await bus.subscribe(subjects.control_subject(worker_id), on_control)
    return heard


async def test_the_event_makes_us_ask_and_only_the_absent_are_lost(watched: Watched) -> None:
    """The event may be of an old connection, given up by the server after the worker has made a new one."""
    pings = await listen(watched.bus, "back")
    watched.hear("back", "gone")
    await watched.bus.publish(EVENTS, b"no event")
    await watched.tell("back", "Read Error")
    await watched.tell("gone", "Client Closed")
    await until(lambda: watched.lost)
    assert watched.lost == ["gone"]
    assert len(pings) == 1
    assert watched.registry.alive("back", time.monotonic())


async def test_those_whom_the_server_sends_away_come_back(watched: Watched) -> None:
    watched.hear("sent away", "gone")
    await watched.tell("sent away", "Server Shutdown")
    await watched.tell("gone", "Read Error")
    watched.give_work("sent away")
    await until(lambda: watched.lost)
    assert watched.lost == ["gone"]


async def test_the_silent_are_asked_after_while_they_have_work(watched: Watched) -> None:
    pings = await listen(watched.bus, "thinking")
    watched.hear("thinking", "gone", "idle")
    watched.give_work("thinking", "gone")
    await until(lambda: watched.lost and len(pings) >= 2)
    assert set(watched.lost) == {"gone"}


async def test_nobody_is_lost_while_all_are_forgiven(watched: Watched) -> None:
    watched.hear("gone")
    watched.registry.reset_silence(time.monotonic())
    pings = await listen(watched.bus, "thinking")
    watched.give_work("gone", "thinking")
    await until(lambda: len(pings) >= 2)
    assert watched.lost == []
    watched.registry.lose("gone", ErrorCode.WORKER_DRAINING, "it signed off", time.monotonic())
    assert watched.lost == ["gone"]
