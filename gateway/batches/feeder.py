"""The feeder of a gateway: takes batches by a lease, feeds them, and releases the ones it cannot finish.

A gateway takes any batch whose lease is free, earliest due first. The lease of a dead gateway expires.
If two gateways believe that they hold a batch, SQL accepts commits only of the later one (``epoch``); the other stops.
No tenant waits while another has several batches here: one of those is paused. A batch that fails repeatedly for
the same reason is given up.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from db.engine import SQL_ERRORS, describe
from gateway.batches.index import NoRoomForIndex
from gateway.batches.run import BatchRun, FeederDeps, Stop
from gateway.batches.storage.base import StorageError
from gateway.batches.store import OVER, Batch, Lost, Status
from protocol import subjects
from protocol.errors import BusError
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.nats.lease import Lease
from protocol.process import wait_for

RENEW_PART: Final = 0.25  # part of the duration of a lease
MAX_TRIES: Final = 3  # of a run that fails for the same reason
MAX_TAKES: Final = 50  # of a batch that never opened a line: it seems to crash gateways
SWEEP_PERIOD_S: Final = 600.0
TOLD_AGAIN_MS: Final = 900_000  # a starting gateway announces batches that ended within this time again
INDEX_AGE_S: Final = 24 * 3600.0
LEAVE_LIMIT_S: Final = 10.0  # to commit completed lines

_AWAY: Final[tuple[type[Exception], ...]] = (*SQL_ERRORS, BusError, StorageError, NoRoomForIndex)

Finished = Callable[[str, str, str, int], Awaitable[None]]  # team, status, id, ended_unix_s; raises BusError

log = logging.getLogger(__name__)


class _Held:
    """A batch that this gateway feeds."""

    def __init__(self, run: BatchRun, lease: Lease) -> None:
        self.run = run
        self.lease = lease
        self.renewed_s = time.monotonic()
        self.task: asyncio.Task[None] | None = None


class Feeder:
    """Run ``run`` as a supervised task."""

    def __init__(
        self, deps: FeederDeps, bus: Bus, gateway_id: str, changed: asyncio.Event, *, finished: Finished
    ) -> None:
        """``changed``: set when a batch was created or changed.

        ``finished`` is called with each ended batch, at least once.
        """
        self._deps = deps
        self._finished = finished
        self._bus = bus
        self._gateway_id = gateway_id
        self._held: dict[str, _Held] = {}
        self._rests: dict[str, float] = {}  # when batches are retried (monotonic clock)
        self._failures: dict[str, tuple[str, int]] = {}  # reason and number of the last consecutive failures of a batch
        self._changed = changed
        self._leaving = False

    async def run(self) -> None:
        """Feed batches; never return."""
        swept_s, has_told = float("-inf"), False
        while True:
            try:
                if not has_told:
                    await self._tell_again()
                    has_told = True
                await self._look()
                if time.monotonic() - swept_s >= SWEEP_PERIOD_S:
                    swept_s = time.monotonic()
                    await asyncio.to_thread(_remove_old, self._deps.folder)
                    await self._deps.files.sweep(OVER)
                await self._deps.set_aside.flush()  # of all parts of this gateway
            except _AWAY as error:
                log.warning("batches are paused: %s", describe(error))
            await wait_for(self._changed, self._deps.settings.poll_s)
            self._changed.clear()

    def leave(self) -> None:
        """Open no more lines; open lines can end."""
        self._leaving = True
        for held in self._held.values():
            held.run.stop(Stop.LEAVING)

    async def close(self) -> None:
        """Commit completed lines, and release the batches."""
        tasks = [held.task for held in self._held.values() if held.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=LEAVE_LIMIT_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=LEAVE_LIMIT_S)

    async def _look(self) -> None:
        batches = await self._deps.batches.open_batches()
        self._deps.series.open_batches = len(batches)
        now_ms, now_s = unix_now_ms(), time.monotonic()
        for batch in batches:
            held = self._held.get(batch.id)
            if held is not None:
                _stop_where_due(held.run, batch, now_ms)
                await self._renew(held)
            elif self._rests.get(batch.id, 0.0) <= now_s and self._has_room_for(batch.tenant):
                await self._take(batch)
        still = {batch.id for batch in batches}
        self._rests = {name: until_s for name, until_s in self._rests.items() if name in still}
        self._failures = {name: failure for name, failure in self._failures.items() if name in still}

    def _has_room_for(self, tenant: str) -> bool:
        """Return whether there is a slot, or a tenant with several batches can pause one for a tenant without any."""
        if self._leaving:
            return False
        if len(self._running) < self._deps.settings.max_running:
            return True
        return all(held.run.batch.tenant != tenant for held in self._held.values()) and self._to_rest() is not None

    @property
    def _running(self) -> list[_Held]:
        return [held for held in self._held.values() if not held.run.is_leaving]

    def _to_rest(self) -> _Held | None:
        """Return the newest batch of the tenant with the most batches; None: no tenant has several."""
        by_tenant: dict[str, list[_Held]] = {}
        for held in self._running:
            by_tenant.setdefault(held.run.batch.tenant, []).append(held)
        most = max(by_tenant.values(), key=len, default=[])
        return most[-1] if len(most) > 1 else None

    async def _take(self, batch: Batch) -> None:
        settings = self._deps.settings
        lease = Lease(self._bus, subjects.BATCHES_BUCKET, batch.id, self._gateway_id, lease_s=settings.lease_s)
        if not await lease.renew():
            self._rests[batch.id] = time.monotonic() + settings.lease_s * RENEW_PART
            return
        try:
            taken = await self._deps.batches.take(batch.id, self._gateway_id)
        except Lost:
            return
        log.info("feeding batch %s, epoch %d", taken.id, taken.epoch)
        run = BatchRun(self._deps, taken)
        _stop_where_due(run, taken, unix_now_ms())
        held = self._held[taken.id] = _Held(run, lease)
        held.task = asyncio.create_task(self._feed(held), name=taken.id)
        resting = self._to_rest() if len(self._running) > settings.max_running else None
        if resting is not None:
            log.info("pausing batch %s: another tenant has no batch on this gateway", resting.run.batch.id)
            resting.run.stop(Stop.LEAVING)

    async def _renew(self, held: _Held) -> None:
        if time.monotonic() - held.renewed_s < self._deps.settings.lease_s * RENEW_PART:
            return
        try:
            if await held.lease.renew():
                held.renewed_s = time.monotonic()
            else:
                held.run.stop(Stop.LOST)
        except BusError as error:  # no other gateway can take it either
            log.warning("the lease of %s cannot be renewed: %s", held.run.batch.id, error)

    async def _feed(self, held: _Held) -> None:
        batch_id = held.run.batch.id
        is_over = False
        try:
            with self._deps.series.feeding(held.run):
                is_over = await self._run(held.run)
                self._failures.pop(batch_id, None)
        except* Lost:
            log.warning("batch %s was taken over by another gateway", batch_id)
        except* _AWAY as errors:
            log.warning("retrying batch %s: %s", batch_id, describe(errors.exceptions[0]))
            if held.run.is_ending:  # its end must not wait forever, e.g. for a deleted file
                self._note_failure(batch_id, errors)
        except* Exception as errors:
            log.exception("retrying batch %s", batch_id, exc_info=errors)
            self._note_failure(batch_id, errors)
        finally:
            self._rests[batch_id] = time.monotonic() + self._deps.settings.retry_s
            del self._held[batch_id]
            with contextlib.suppress(BusError):
                await held.lease.release()
        if is_over:
            batch = await self._deps.batches.find(batch_id)
            if batch is not None:
                self._deps.series.ended(batch.status)
                await self._tell(batch)
        self._changed.set()

    async def _run(self, run: BatchRun) -> bool:
        """Feed a batch, or give it up and end it."""
        kind, tries = self._failures.get(run.batch.id, ("", 0))
        if tries < MAX_TRIES and run.batch.in_progress_unix_ms is None and run.batch.epoch > MAX_TAKES:
            kind, tries = "every gateway that took it stopped before it opened a line", run.batch.epoch - 1
        if tries < MAX_TRIES:
            return await run.run()
        log.error("giving up batch %s after %d attempts: %s", run.batch.id, tries, kind)
        await run.set_aside(tries, kind)
        return True

    def _note_failure(self, batch_id: str, errors: BaseExceptionGroup[Exception]) -> None:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        kind = type(first).__name__
        before, tries = self._failures.get(batch_id, (kind, 0))
        self._failures[batch_id] = (kind, tries + 1 if before == kind else 1)

    # --- telling of ends ----------------------------------------------------------------------------------------------

    async def _tell(self, batch: Batch) -> None:
        if batch.status not in OVER or batch.over_unix_ms is None:
            return
        log.info("batch %s ended as %s: %d of %d lines answered", batch.id, batch.status, batch.completed, batch.total)
        try:
            await self._finished(batch.team_id, batch.status, batch.id, batch.over_unix_ms // 1000)
        except BusError as error:
            log.warning("the end of batch %s could not be announced: %s", batch.id, error)

    async def _tell_again(self) -> None:
        """Announce recently ended batches again, in case their gateway died first. Events are deduplicated."""
        for batch in await self._deps.batches.over_since(unix_now_ms() - TOLD_AGAIN_MS):
            await self._tell(batch)


def _stop_where_due(run: BatchRun, batch: Batch, now_ms: int) -> None:
    if batch.status in OVER:
        run.stop(Stop.LOST)
    elif batch.status == Status.CANCELLING:
        run.stop(Stop.CANCELLED)
    elif now_ms >= batch.expires_unix_ms:
        run.stop(Stop.EXPIRED)


def _remove_old(folder: Path) -> None:
    """Delete indexes left by gateways that died before opening them."""
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - INDEX_AGE_S:
                path.unlink()
