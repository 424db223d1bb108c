"""The worker's entry in the registry."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from engine import types
from pool_worker.consumer import Gate
from pool_worker.credit import Credit
from pool_worker.engines.base import AnyEngine, Engine
from pool_worker.executor import Executor
from pool_worker.settings import WorkerSettings
from protocol import subjects
from protocol.errors import BusError
from protocol.job import PROTOCOL_VERSION, EngineStats, Heartbeat, Histogram, Pace, Revision, encode
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.nats.objects import publish_model_card, revision_of
from protocol.nats.topology import HEARTBEAT_PERIOD_S
from protocol.process import backoff_s

log = logging.getLogger(__name__)


# --- engine stats -----------------------------------------------------------------------------------------------------
#
# Converts an engine's statistics for heartbeats.


def wire_stats(stats: types.EngineStats, waiting_jobs: int) -> EngineStats:
    """Convert statistics; ``waiting_jobs`` are on this worker but not yet in the engine."""
    counters = stats.counters
    return EngineStats(
        running=stats.running,
        waiting=stats.waiting + waiting_jobs,
        kv_usage=stats.kv_usage,
        prompt_tokens=counters.prompt_tokens,
        generated_tokens=counters.generated_tokens,
        step_tokens=_histogram(stats.step_tokens),
        inter_token_s=_histogram(stats.inter_token_s),
        queried_tokens=counters.queried_tokens,
        cached_tokens=counters.cached_tokens,
        drafts=counters.drafts,
        guessed_tokens=counters.guessed_tokens,
        right_tokens=counters.right_tokens,
        preemptions=counters.preemptions,
    )


def _histogram(counts: types.HistogramCounts) -> Histogram:
    return Histogram(counts.bounds, counts.counts, counts.total)


# --- cards ------------------------------------------------------------------------------------------------------------
#
# Publishes how to count and render prompts for the models that this worker serves.

AGAIN_AFTER_S: Final = 1.0  # minimum interval


class ModelCards:
    """Publishes the models' cards, and again whenever the buckets may have been lost."""

    def __init__(self, bus: Bus, engine: Engine, models: tuple[str, ...]) -> None:
        self._bus = bus
        cards = [engine.model_card(model) for model in models]
        self.revisions = {card.model: revision_of(card) for card, _ in cards}
        self._cards = [(card, tokenizer_json) for card, tokenizer_json in cards if tokenizer_json]
        self._is_due = asyncio.Event()

    def publish_again(self) -> None:
        """Publish all cards soon: the buckets may have been lost, or hold the card of a departed worker."""
        self._is_due.set()

    async def run(self) -> None:
        """Publish on request until canceled."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            await self.publish()
            await asyncio.sleep(AGAIN_AFTER_S)

    async def publish(self) -> None:
        """Publish all cards, waiting for the buckets to exist."""
        has_failed = False
        for wait_s in backoff_s():
            try:
                for card, tokenizer_json in self._cards:
                    await publish_model_card(self._bus, card, tokenizer_json)
            except BusError as error:
                if not has_failed:
                    log.warning("cannot publish model cards yet: %s", error)
                has_failed = True
                await asyncio.sleep(wait_s)
            else:
                return


# --- heartbeat --------------------------------------------------------------------------------------------------------

# NATS' key-value buckets mark a deleted entry with this header (ADR-8).
PURGE_HEADERS: Final = {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}


class HeartbeatPublisher:
    """Renews this worker's Heartbeat in the registry until the entry is removed."""

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
        self._busy_s = 0.0  # seconds with at least one job, up to the last heartbeat
        self._is_failing = False

    async def run(self) -> None:
        """Send heartbeats until canceled."""
        while True:
            await self.beat()
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    async def beat(self) -> None:
        """Send one heartbeat."""
        self._note_busy()
        try:
            await self._bus.publish(self._subject, encode(self._heartbeat()))
        except BusError as error:
            if not self._is_failing:
                log.warning("cannot send the heartbeat: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False

    def _note_busy(self) -> None:
        now_s = time.monotonic()
        if self._executor.held:
            self._busy_s += now_s - self._beat_s
        self._beat_s = now_s

    async def remove(self) -> None:
        """Remove the worker from the registry."""
        try:
            await self._bus.publish(self._subject, b"", headers=PURGE_HEADERS)
        except BusError as error:
            log.warning("cannot remove the registry entry; it will expire: %s", error)

    def _heartbeat(self) -> Heartbeat:
        settings, capacity = self._settings, self._credit.capacity
        # Behind a closed gate nothing is free, so that gateways admit no request that will not wait.
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
