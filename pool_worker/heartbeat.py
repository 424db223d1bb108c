"""The worker's entry in the registry."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from pool_worker.credit import Credit
from pool_worker.engine_stats import wire_stats
from pool_worker.engines.base import AnyEngine
from pool_worker.executor import Executor
from pool_worker.gate import Gate
from pool_worker.settings import WorkerSettings
from protocol import subjects
from protocol.errors import BusError
from protocol.job import PROTOCOL_VERSION, Heartbeat, Pace, Revision, encode
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.nats.topology import HEARTBEAT_PERIOD_S

# How NATS' key-value buckets mark an entry as deleted, its history too (ADR-8).
PURGE_HEADERS: Final = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}

log = logging.getLogger(__name__)


class HeartbeatPublisher:
    """Puts a Heartbeat into the registry again and again, until the entry is removed."""

    def __init__(
        self,
        settings: WorkerSettings,
        bus: Bus,
        engine: AnyEngine,
        *,
        executor: Executor,
        credit: Credit,
        gate: Gate,
        revisions: Mapping[str, Revision],
        pace: Callable[[], Pace | None],
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._engine = engine
        self._executor = executor
        self._credit = credit
        self._gate = gate
        self._revisions = dict(revisions)
        self._pace = pace
        self._subject = subjects.heartbeat_subject(settings.worker_id)
        self._started_unix_ms = unix_now_ms()
        self._beat_s = time.monotonic()
        self._busy_s = 0.0  # held at least one job when beating: to the heartbeat exact
        self._is_failing = False

    async def run(self) -> None:
        """Beat for ever; cancel it to stop."""
        while True:
            await self.beat()
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    async def beat(self) -> None:
        """Put one heartbeat."""
        self._note_busy()
        try:
            await self._bus.publish(self._subject, encode(self._heartbeat()))
        except BusError as error:
            if not self._is_failing:
                log.warning("no heartbeat can be sent: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    def _note_busy(self) -> None:
        now_s = time.monotonic()
        if self._executor.held:
            self._busy_s += now_s - self._beat_s
        self._beat_s = now_s

    async def remove(self) -> None:
        """Take the worker out of the registry."""
        try:
            await self._bus.publish(self._subject, b"", headers=PURGE_HEADERS)
        except BusError as error:
            log.warning("the registry entry stays until it expires: %s", error)

    def _heartbeat(self) -> Heartbeat:
        settings, capacity = self._settings, self._credit.capacity
        # Behind a closed gate nothing is free: nobody who will not wait is to be let in for the sake of it.
        paused = self._executor.breaker.report(time.monotonic())
        takes_jobs = paused is None and any(map(self._gate.is_open, settings.models))
        return Heartbeat(
            v=PROTOCOL_VERSION,
            worker_id=settings.worker_id,
            pool=settings.pool,
            provider=settings.provider,
            region=settings.region,
            tier=settings.tier,
            engine=self._engine.name,
            models=settings.models,
            usd_per_hour=settings.usd_per_hour,
            max_sequences=capacity.max_sequences,
            max_kv_tokens=capacity.max_kv_tokens,
            free_sequences=self._credit.free_sequences if takes_jobs else 0,
            free_kv_tokens=self._credit.free_kv_tokens if takes_jobs else 0,
            running=len(self._executor.held),
            started_unix_ms=self._started_unix_ms,
            sent_unix_ms=unix_now_ms(),
            draining=self._executor.is_draining,
            jobs_taken=self._executor.jobs_taken,
            tokens_made=self._executor.tokens_made,
            stats=wire_stats(self._engine.stats(), self._executor.waiting_jobs),
            busy_ms=round(self._busy_s * 1000),
            revisions=self._revisions,
            pace=self._pace(),
            takes=self._engine.takes,
            continues=self._engine.continues,
            machine=settings.machine,
            trusted=settings.trusted,
            batch_jobs_taken=self._executor.batch_jobs_taken,
            paused=paused,
        )
