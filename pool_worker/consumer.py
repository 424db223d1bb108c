"""Pulls jobs from the queue, only as many as the engine has room for."""

import asyncio
import logging
import time
from typing import Final

from pool_worker.credit import Credit
from pool_worker.executor import Executor
from protocol import pull, subjects
from protocol.backoff import backoff_s, wait_for
from protocol.bus import Bus
from protocol.errors import BusError, ProtocolError
from protocol.messages import decode_job
from protocol.outbox import Outbox
from protocol.pull import PULL_EXPIRES_S, Delivery, PullConsumer
from protocol.topology import consumer_exists

REFILL_CHECK_S: Final = 0.05  # how often pulls that have expired are noticed
SHARED_PULL_EXPIRES_S: Final = 0.05  # where there is less room than models, they take turns of so long
AFTER_FAILURE_S: Final = 0.5

log = logging.getLogger(__name__)


class _ModelPulls:
    """The pulls for one model, and when they last brought something."""

    def __init__(self, bus: Bus, model: str, lane: str, tier: str, executor: Executor) -> None:
        self._bus = bus
        self._executor = executor
        self.consumer_name = subjects.job_consumer(model, lane)
        self.pulls = PullConsumer(bus, subjects.INTERACTIVE_STREAM, self.consumer_name, self._on_delivery, tier=tier)
        self.delivered_s = 0.0  # monotonic clock
        self.pulled_s = 0.0
        self._expires_s = 0.0  # of the last pull

    async def _on_delivery(self, delivery: Delivery) -> None:
        self.delivered_s = time.monotonic()
        try:
            job = decode_job(delivery.payload)
        except ProtocolError as error:
            log.error("job %d of the queue is given up: %s", delivery.stream_sequence, error)  # noqa: TRY400
            await pull.term(self._bus, delivery)
        else:
            self._executor.offer(job, delivery)

    async def pull(self, batch: int, expires_s: float) -> None:
        """Ask for ``batch`` jobs. Raises BusError."""
        self.pulled_s = time.monotonic()
        self._expires_s = expires_s
        await self.pulls.pull(batch, expires_s=expires_s)

    def was_refused(self) -> bool:
        """Whether the last pull ended with nothing, long before its time: then the consumer is gone."""
        is_early = time.monotonic() - self.pulled_s < self._expires_s / 2
        return is_early and self.delivered_s < self.pulled_s and not self.pulls.outstanding()


class Consumer:
    """Keeps as many jobs asked for as there is room for, over all models that the engine serves."""

    def __init__(
        self,
        bus: Bus,
        models: tuple[str, ...],
        tier: str,
        executor: Executor,
        credit: Credit,
        outbox: Outbox,
        *,
        has_room: asyncio.Event,
    ) -> None:
        """Make a consumer that has asked for nothing; setting ``has_room`` makes it look at the credit again."""
        self._bus = bus
        self._executor = executor
        self._credit = credit
        self._outbox = outbox
        self._models = [_ModelPulls(bus, model, lane, tier, executor) for model in models for lane in subjects.LANES]
        self._has_room = has_room
        self._must_look = asyncio.Event()  # whether the consumers are (still) there

    async def start(self) -> None:
        """Listen for deliveries. Nothing is asked for before ``run``."""
        for model in self._models:
            await model.pulls.start()

    async def stop(self) -> None:
        """Stop pulling; what the server has sent by now still reaches the executor."""
        for model in self._models:
            await model.pulls.stop()

    def forget_pulls(self) -> None:
        """After a reconnect: no pull is parked any more, and maybe the consumers are gone too."""
        for model in self._models:
            model.pulls.forget_pulls()
        self._must_look.set()

    # --- pulling -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pull for ever; cancel it to stop."""
        while True:
            if self._must_look.is_set():
                self._must_look.clear()
                await self.wait_for_consumers()
            try:
                await self._refill()
            except BusError as error:
                log.warning("cannot ask for jobs, will again: %s", error)
                await asyncio.sleep(AFTER_FAILURE_S)
            await wait_for(self._has_room, REFILL_CHECK_S)
            self._has_room.clear()

    async def wait_for_consumers(self) -> None:
        """Return when a gateway has made the consumers of all models."""
        for model in self._models:
            await wait_for_consumer(self._bus, model.consumer_name)

    def room(self) -> int:
        """Return how many jobs may be asked for and not yet be here."""
        is_blocked = self._executor.is_draining or self._executor.has_waiting or self._outbox.full
        if is_blocked or not self._bus.connected:
            return 0
        return self._credit.jobs_to_pull()

    async def _refill(self) -> None:
        """Ask for as many jobs as there is room for.

        The model that had a job last gets the room; each other keeps one pull parked, so that its next job finds it.
        """
        if any(model.was_refused() for model in self._models):
            self._must_look.set()
            await asyncio.sleep(AFTER_FAILURE_S)
            return
        room = self.room()
        free = room - sum(model.pulls.outstanding() for model in self._models)
        if room < len(self._models):
            await self._take_turns(free)
            return
        busiest, *others = sorted(self._models, key=lambda model: model.delivered_s, reverse=True)
        for model in others:
            if free > 0 and not model.pulls.outstanding():
                await model.pull(1, PULL_EXPIRES_S)
                free -= 1
        await self._refill_busiest(busiest, free)

    async def _take_turns(self, free: int) -> None:
        # The one that was asked longest ago comes first; a preference for the busiest would starve it or the others.
        for model in sorted(self._models, key=lambda model: model.pulled_s):
            if free > 0 and not model.pulls.outstanding():
                await model.pull(1, SHARED_PULL_EXPIRES_S)
                free -= 1

    async def _refill_busiest(self, model: _ModelPulls, free: int) -> None:
        outstanding = model.pulls.outstanding()
        if free <= 0 or outstanding > free:
            return  # jobs are scarce; a pull for every slot that frees would only be work
        if outstanding or free == 1:
            await model.pull(free, PULL_EXPIRES_S)
            return
        # Two halves that expire at different times, so that there is always a pull parked.
        await model.pull(free // 2, PULL_EXPIRES_S / 2)
        await model.pull(free - free // 2, PULL_EXPIRES_S)


async def wait_for_consumer(bus: Bus, name: str) -> None:
    """Return when a gateway has made the consumer; log once if that is not so at first."""
    has_logged = False
    for wait_s in backoff_s():
        try:
            if await consumer_exists(bus, subjects.INTERACTIVE_STREAM, name):
                return
            reason = "no gateway has made it yet"
        except BusError as error:
            reason = str(error)
        if not has_logged:
            log.warning("waiting for the consumer %s: %s", name, reason)
            has_logged = True
        await asyncio.sleep(wait_s)
