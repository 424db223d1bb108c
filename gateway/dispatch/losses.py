"""Detects a lost worker long before its heartbeats are overdue.

    the server's disconnect event ──┐
    silence in the middle of work ──┴──> Ping to the worker's control subject ──503──> lost

A killed process loses its connection at once. The server publishes an event if its configuration imports events into
our account. It also answers "no responders" (503) to a request on a subject without subscribers. A live worker does not
answer a Ping, which costs one message and about 20 µs on each side. Pings go only to silent workers that run this
gateway's requests, at most every ``PING_PERIOD_S``: a hundred workers in long prefills take 1% of a core. The event
only triggers a Ping, because it may refer to an old connection of a worker that has already reconnected.
"""

import logging
import time
from asyncio import Event, sleep
from collections.abc import Callable, Iterable
from typing import Final

from nats.aio.msg import Msg

from gateway.admission.registry import WorkerRegistry
from protocol import subjects
from protocol.errors import BusError, ErrorCode, ProtocolError
from protocol.gateways import decode_disconnect
from protocol.job import Ping, encode
from protocol.nats.bus import Bus

log = logging.getLogger(__name__)


LOOK_PERIOD_S: Final = 0.05
SUSPECT_S: Final = 0.1  # silence before a Ping; longer than almost every engine step
PING_PERIOD_S: Final = 0.2  # for each worker
# Reasons of a server that shuts down or disconnects a client: the worker is alive and reconnects.
_SERVER_REASONS: Final = (
    "Server Shutdown",
    "Slow Consumer",
    "Kicked",
    "Authentication Expired",
    "Credentials Revoked",
    "Cluster",
)


class LossDetector:
    """Reports workers with closed connections to the registry. ``start`` it and run ``run`` as a supervised task."""

    def __init__(self, bus: Bus, registry: WorkerRegistry, busy: Callable[[], Iterable[str]]) -> None:
        """``busy``: returns the workers that run requests of this gateway."""
        self._bus = bus
        self._registry = registry
        self._busy = busy
        self._inbox = bus.client.new_inbox()
        self._pinged_s: dict[str, float] = {}
        self._ping = encode(Ping())
        self._has_work = Event()

    async def start(self) -> None:
        """Subscribe. Raises BusError."""
        await self._bus.subscribe(f"{self._inbox}.>", self._on_reply)
        await self._bus.subscribe(subjects.DISCONNECTS, self._on_disconnect)

    def on_work(self) -> None:
        """Note that a worker runs a request of this gateway."""
        self._has_work.set()

    async def run(self) -> None:
        """Ping silent workers while any is busy; never returns."""
        while True:
            if not any(True for _ in self._busy()):
                self._has_work.clear()
                await self._has_work.wait()
            await sleep(LOOK_PERIOD_S)
            if self._bus.connected:
                await self._ask_the_silent(time.monotonic())

    async def _ask_the_silent(self, now_s: float) -> None:
        busy = list(self._busy())
        for worker_id in busy:
            is_due = now_s - self._pinged_s.get(worker_id, float("-inf")) >= PING_PERIOD_S
            if is_due and self._registry.silence_s(worker_id, now_s) >= SUSPECT_S:
                await self._ask(worker_id, now_s)
        if len(self._pinged_s) > len(busy):
            self._pinged_s = {worker_id: self._pinged_s[worker_id] for worker_id in busy if worker_id in self._pinged_s}

    async def _ask(self, worker_id: str, now_s: float) -> None:
        self._pinged_s[worker_id] = now_s
        try:
            await self._bus.publish(subjects.control_subject(worker_id), self._ping, reply=f"{self._inbox}.{worker_id}")
        except BusError as error:  # pinged again soon; connection errors are logged elsewhere
            log.debug("cannot ping worker %s: %s", worker_id, error)

    async def _on_reply(self, message: Msg) -> None:
        if (message.headers or {}).get("Status") == "503":
            worker_id = message.subject.removeprefix(f"{self._inbox}.")
            self._registry.lose(worker_id, ErrorCode.WORKER_LOST, "its connection closed", time.monotonic())

    async def _on_disconnect(self, message: Msg) -> None:
        try:
            event = decode_disconnect(message.data)
        except ProtocolError as error:
            log.warning("%s", error)
            return
        if event is None:
            return
        now_s = time.monotonic()
        if event.reason.startswith(_SERVER_REASONS):
            self._registry.excuse(event.worker_id, now_s)
        elif self._registry.knows(event.worker_id):
            await self._ask(event.worker_id, now_s)
