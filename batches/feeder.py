"""The feeder of one gateway: takes batches by a lease, feeds them, and passes on what it cannot finish.

Any gateway takes any batch whose lease is free, those first that are due first; where a holder dies, its lease ends.
Two that both believe to hold one do no harm: SQL takes commits of the later only (``epoch``), and the other one stops.
"""

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Final

from batches.run import BatchRun, Feeding, Stop
from batches.states import OVER, Status
from batches.storage.base import StorageError
from batches.store import Batch, Lost
from db.errors import SQL_ERRORS, describe
from protocol import subjects
from protocol.backoff import wait_for
from protocol.bus import Bus
from protocol.clock import unix_now_ms
from protocol.errors import BusError
from protocol.lease import Lease
from webhooks.events import EventType, publish_finished

RENEW_PART: Final = 0.25  # of a lease's time
RETRY_S: Final = 5.0  # after a run that failed
SWEEP_PERIOD_S: Final = 600.0
TOLD_AGAIN_MS: Final = 900_000  # batches that are over since then are told of again where a gateway starts
INDEX_AGE_S: Final = 24 * 3600.0
LEAVE_LIMIT_S: Final = 10.0  # to commit what is done

_EVENTS: Final[dict[str, EventType]] = {
    Status.COMPLETED: "batch.completed",
    Status.FAILED: "batch.failed",
    Status.EXPIRED: "batch.expired",
    Status.CANCELLED: "batch.cancelled",
}
_AWAY: Final[tuple[type[Exception], ...]] = (*SQL_ERRORS, BusError, StorageError)

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

    def __init__(self, feeding: Feeding, bus: Bus, gateway_id: str, changed: asyncio.Event) -> None:
        """``changed``: set when a batch is there, or has changed."""
        self._feeding = feeding
        self._bus = bus
        self._gateway_id = gateway_id
        self._held: dict[str, _Held] = {}
        self._rests: dict[str, float] = {}  # batches that wait for their next try, and until when (monotonic clock)
        self._changed = changed
        self._leaving = False

    async def run(self) -> None:
        """Feed; never returns."""
        swept_s, has_told = float("-inf"), False
        while True:
            try:
                if not has_told:
                    await self._tell_again()
                    has_told = True
                await self._look()
                if time.monotonic() - swept_s >= SWEEP_PERIOD_S:
                    swept_s = time.monotonic()
                    await asyncio.to_thread(_remove_old, self._feeding.folder)
                    await self._feeding.files.sweep()
            except _AWAY as error:
                log.warning("batches wait: %s", describe(error))
            await wait_for(self._changed, self._feeding.settings.poll_s)
            self._changed.clear()

    def leave(self) -> None:
        """Open no more lines: what is open may end."""
        self._leaving = True
        for held in self._held.values():
            held.run.stop(Stop.LEAVING)

    async def close(self) -> None:
        """Commit what is done, and let others go on."""
        tasks = [held.task for held in self._held.values() if held.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=LEAVE_LIMIT_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=LEAVE_LIMIT_S)

    async def _look(self) -> None:
        batches = await self._feeding.batches.open_batches()
        self._feeding.series.open_batches = len(batches)
        now_ms, now_s = unix_now_ms(), time.monotonic()
        for batch in batches:
            held = self._held.get(batch.id)
            if held is not None:
                _stop_where_due(held.run, batch, now_ms)
                await self._renew(held)
            elif self._has_room and self._rests.get(batch.id, 0.0) <= now_s:
                await self._take(batch)
        still = {batch.id for batch in batches}
        self._rests = {name: until_s for name, until_s in self._rests.items() if name in still}

    @property
    def _has_room(self) -> bool:
        return len(self._held) < self._feeding.settings.max_running and not self._leaving

    async def _take(self, batch: Batch) -> None:
        settings = self._feeding.settings
        lease = Lease(self._bus, subjects.BATCHES_BUCKET, batch.id, self._gateway_id, lease_s=settings.lease_s)
        if not await lease.renew():
            self._rests[batch.id] = time.monotonic() + settings.lease_s * RENEW_PART
            return
        try:
            taken = await self._feeding.batches.take(batch.id, self._gateway_id)
        except Lost:
            return
        log.info("batch %s is fed here, in epoch %d", taken.id, taken.epoch)
        run = BatchRun(self._feeding, taken)
        _stop_where_due(run, taken, unix_now_ms())
        held = self._held[taken.id] = _Held(run, lease)
        held.task = asyncio.create_task(self._feed(held), name=taken.id)

    async def _renew(self, held: _Held) -> None:
        if time.monotonic() - held.renewed_s < self._feeding.settings.lease_s * RENEW_PART:
            return
        try:
            if await held.lease.renew():
                held.renewed_s = time.monotonic()
            else:
                held.run.stop(Stop.LOST)
        except BusError as error:  # nobody else can take it meanwhile, either
            log.warning("the lease of %s cannot be renewed: %s", held.run.batch.id, error)

    async def _feed(self, held: _Held) -> None:
        batch_id = held.run.batch.id
        is_over = False
        try:
            with self._feeding.series.feeding(held.run):
                is_over = await held.run.run()
        except* Lost:
            log.warning("batch %s has been taken by another gateway", batch_id)
        except* _AWAY as errors:
            log.warning("batch %s is tried again: %s", batch_id, describe(errors.exceptions[0]))
        except* Exception as errors:
            log.exception("batch %s is tried again", batch_id, exc_info=errors)
        finally:
            self._rests[batch_id] = time.monotonic() + RETRY_S
            del self._held[batch_id]
            with contextlib.suppress(BusError):
                await held.lease.release()
        if is_over:
            batch = await self._feeding.batches.find(batch_id)
            if batch is not None:
                self._feeding.series.ended(batch.status)
                await self._tell(batch)
        self._changed.set()

    # --- webhooks -----------------------------------------------------------------------------------------------------

    async def _tell(self, batch: Batch) -> None:
        event = _EVENTS.get(batch.status)
        if event is None or batch.over_unix_ms is None:
            return
        log.info("batch %s is %s: %d of %d lines answered", batch.id, batch.status, batch.completed, batch.total)
        try:
            await publish_finished(self._bus, batch.team_id, event, batch.id, created_unix_s=batch.over_unix_ms // 1000)
        except BusError as error:
            log.warning("the end of %s could not be told: %s", batch.id, error)

    async def _tell_again(self) -> None:
        """Tell of batches whose gateway may have died in between: what has been told is told nobody twice."""
        for batch in await self._feeding.batches.over_since(unix_now_ms() - TOLD_AGAIN_MS):
            await self._tell(batch)


def _stop_where_due(run: BatchRun, batch: Batch, now_ms: int) -> None:
    if batch.status in OVER:
        run.stop(Stop.LOST)
    elif batch.status == Status.CANCELLING:
        run.stop(Stop.CANCELLED)
    elif now_ms >= batch.expires_unix_ms:
        run.stop(Stop.EXPIRED)


def _remove_old(folder: Path) -> None:
    """Remove indexes of gateways that died before they had opened them."""
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - INDEX_AGE_S:
                path.unlink()
