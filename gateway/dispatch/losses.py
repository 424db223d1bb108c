"""Detects a lost worker long before its heartbeats are missed.

    the server's disconnect event ──┐
    silence in the middle of work ──┴──> Ping to the worker's control subject ──503──> lost

A process that is killed loses its connection at once. The server tells so of itself where its configuration imports
the event into our account, and in any case when asked: a message with a reply subject that nobody listens to is
answered "no responders". A live worker does not answer a Ping, so it costs one message and some 20 µs on each side.
Sent only to workers that have work of ours and say nothing, and at most every ``PING_PERIOD_S``, a hundred of them in
long prefills take 1% of a core. The event is not believed but only makes us ask: it may tell of an old connection that
the server has given up after the worker has long made a new one.
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
SUSPECT_S: Final = 0.1  # longer than nearly every engine step; only then is the silent one asked after
PING_PERIOD_S: Final = 0.2  # for each worker
# How a connection ends when the node leaves in order or cuts somebody off: the worker lives, and comes back.
_SERVER_REASONS: Final = (
    "Server Shutdown",
    "Slow Consumer",
    "Kicked",
    "Authentication Expired",
    "Credentials Revoked",
    "Cluster",
)


class LossDetector:
    """Reports workers whose connections are gone to the registry. ``start`` it and run ``run`` as a supervised task."""

    def __init__(self, bus: Bus, registry: WorkerRegistry, busy: Callable[[], Iterable[str]]) -> None:
        """``busy`` names the workers that have work of this gateway."""
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
        """Note that a worker has work of this gateway."""
        self._has_work.set()

    async def run(self) -> None:
        """Look for silent workers while any has work; never returns."""
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
        except BusError as error:  # asked again soon; the connection's own trouble is logged elsewhere
            log.debug("worker %s could not be asked after: %s", worker_id, error)

    async def _on_reply(self, message: Msg) -> None:
        if (message.headers or {}).get("Status") == "503":
            worker_id = message.subject.removeprefix(f"{self._inbox}.")
            self._registry.lose(worker_id, ErrorCode.WORKER_LOST, "its connection is gone", time.monotonic())

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
