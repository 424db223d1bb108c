"""Keeps an expensive pool from taking jobs while a cheaper tier does well.

Pull priorities alone give every job to the cheapest worker that has room for it; the gate also lets jobs wait a little
for a cheaper worker to get room. Requests that resume pass every gate.
"""

import asyncio
import datetime as dt
import logging
from collections.abc import Callable
from typing import Final

from pool_worker.peers import Peers
from pool_worker.settings import GateSettings, Tier
from protocol import subjects
from protocol.errors import BusError, NoResponders
from protocol.nats.bus import Bus
from protocol.nats.topology import oldest_job, read_backlog
from protocol.process import wait_for
from protocol.subjects import queue_of

GATE_POLL_S: Final = 0.25
OLDEST_LIMIT_S: Final = 1.0  # for a gateway to tell since when the oldest job of a lane has waited

log = logging.getLogger(__name__)


class Gate:
    """Decides, by model, whether a worker may take jobs. Without settings it always may."""

    def __init__(
        self,
        settings: GateSettings | None,
        bus: Bus,
        peers: Peers,
        *,
        tier: Tier,
        models: tuple[str, ...],
        trusted: bool = False,
        on_open: Callable[[], None],
    ) -> None:
        """Make a gate, closed where there are settings; ``on_open`` is called when it has opened for a model."""
        self._settings = settings
        self._bus = bus
        self._peers = peers
        self._tier = tier
        self._trusted = trusted
        self._is_open = dict.fromkeys(models, settings is None)
        self._on_open = on_open
        self._must_look = asyncio.Event()
        peers.on_change(self._must_look.set)

    def is_open(self, model: str) -> bool:
        """Report whether jobs of this model may be taken now."""
        return self._is_open[model]

    async def run(self) -> None:
        """Open and close for ever; cancel it to stop. Returns at once where there is nothing to gate."""
        if self._settings is None:
            return
        while True:
            self._must_look.clear()
            for model in self._is_open:
                await self._look(model, self._settings)
            await wait_for(self._must_look, GATE_POLL_S)

    async def _look(self, model: str, settings: GateSettings) -> None:
        is_needed = self._peers.is_informed and not self._peers.cheaper_serving(model, self._tier)
        if not is_needed:
            try:
                is_needed = await is_behind(self._bus, queue_of(model, trusted=self._trusted), settings)
            except BusError as error:
                log.warning("the gate for %s stays as it is: %s", model, error)
                return
        if is_needed == self._is_open[model]:
            return
        self._is_open[model] = is_needed
        log.info("the gate for %s is %s", model, "open" if is_needed else "closed")
        if is_needed:
            self._on_open()


async def is_behind(bus: Bus, queue: str, settings: GateSettings) -> bool:
    """Report whether too many interactive jobs of a queue wait, or one for too long. Raises BusError."""
    backlog = await read_backlog(bus, queue)
    interactive = {lane: subjects.job_subject(queue, lane) for lane in (subjects.RESUME_LANE, *subjects.HIGH_LANES)}
    waiting = {lane: backlog.jobs[subject] for lane, subject in interactive.items() if subject in backlog.jobs}
    if settings.backlog_jobs is not None and sum(waiting.values()) > settings.backlog_jobs:
        return True
    if settings.oldest_s is None:
        return False
    stored_before = backlog.server_time - dt.timedelta(seconds=settings.oldest_s)
    for lane in waiting:
        stored = await _oldest(bus, queue, lane)
        if stored is not None and stored < stored_before:
            return True
    return False


async def _oldest(bus: Bus, queue: str, lane: str) -> dt.datetime | None:
    """Return when the stream took the first job of a lane that it still has; None if it has none any more.

    Gateways tell: a worker may have no right to read jobs that it is not given. Those of an older release do not.
    """
    try:
        reply = await bus.request(subjects.oldest_job_subject(queue, lane), b"", timeout_s=OLDEST_LIMIT_S)
        stored = reply.data.decode()
    except NoResponders:
        stored = await oldest_job(bus, subjects.job_subject(queue, lane))
    return dt.datetime.fromisoformat(stored) if stored else None
