"""Live state from the gateway's memory: one aggregate every two seconds, for any number of viewers."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from console.dashboard import formats
from gateway.api.fields import encode_json
from gateway.errors import Overloaded
from gateway.mount import GatewayParts
from gateway.telemetry.log import Failover
from protocol import subjects
from protocol.job import Heartbeat

PERIOD_S: Final = 2.0
OLDEST_BASE_S: Final = 10.0  # the maximum age of the aggregate that rates are computed against
MAX_STREAMS: Final = 100  # browsers connected to the live numbers
STREAM_LIMIT_S: Final = 600.0  # then the browser reconnects, and its session is checked again
RECENT_FAILOVERS_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class PoolNow:
    """The live workers of one pool."""

    pool: str
    provider: str
    region: str
    tier: str
    engine: str
    workers: tuple[Heartbeat, ...]

    @property
    def running(self) -> int:
        """Number of slots in use."""
        return sum(beat.max_sequences - beat.free_sequences for beat in self.workers)

    @property
    def slots(self) -> int:
        """Number of sequences that its engines run concurrently."""
        return sum(beat.max_sequences for beat in self.workers)

    @property
    def kv_share(self) -> float | None:
        """Share of KV memory in use; None: its engines report none."""
        return kv_share(self.workers)

    @property
    def usd_per_hour(self) -> float:
        """Current cost of its machines."""
        return sum(beat.usd_per_hour for beat in self.workers)

    @property
    def models(self) -> list[str]:
        """Models that its workers serve."""
        return sorted({model for beat in self.workers for model in beat.models})


@dataclass(frozen=True, slots=True)
class QueueNow:
    """The waiting jobs of one queue."""

    name: str  # the model's, or subjects.queue_of those that demand trusted pools
    resuming: int
    interactive: int
    batch: int
    jobs_per_s: float | None  # the rate at which it is served; None: unknown
    workers: int
    fault: str | None = None  # why the model's card cannot be used

    @property
    def waiting(self) -> int:
        """Number of jobs in all lanes."""
        return self.resuming + self.interactive + self.batch


@dataclass(frozen=True, slots=True)
class ModelNow:
    """A configured model, and the live workers that serve it."""

    name: str
    aliases: tuple[str, ...]
    context_length: int | None  # in prompt + output tokens; None: unknown
    engines: tuple[str, ...]
    pools: tuple[str, ...]
    workers: int
    fault: str | None  # why its card cannot be used


@dataclass(frozen=True, slots=True)
class LiveNumbers:
    """One aggregate. Rates are None until there are two of them."""

    in_flight: int  # at this gateway
    waiting: int
    workers: int
    running: int
    slots: int
    kv_share: float | None
    requests_per_s: float | None  # of this gateway
    tokens_per_s: float | None  # output, of all workers
    failovers: int  # of this gateway, in the last RECENT_FAILOVERS_S

    def as_text(self) -> dict[str, str]:
        """Return the formatted numbers by name."""
        return {
            "in_flight": formats.count(self.in_flight),
            "waiting": formats.count(self.waiting),
            "workers": formats.count(self.workers),
            "slots": f"{self.running:,} / {self.slots:,}",
            "kv_share": formats.share(self.kv_share),
            "requests_per_s": formats.NOTHING if self.requests_per_s is None else f"{self.requests_per_s:,.1f}",
            "tokens_per_s": formats.compact(self.tokens_per_s),
            "failovers": formats.count(self.failovers),
        }


def kv_share(workers: Sequence[Heartbeat]) -> float | None:
    """Return the share of these workers' KV memory in use; None: their engines report none."""
    total = sum(beat.max_kv_tokens for beat in workers)
    return 1 - sum(beat.free_kv_tokens for beat in workers) / total if total else None


class Live:
    """Reads the gateway's memory. Used by the event loop only."""

    def __init__(self, gateway: GatewayParts) -> None:
        self._gateway = gateway
        self._last: tuple[float, int, dict[str, int]] | None = None  # time, requests ended, tokens by worker
        self._numbers: LiveNumbers | None = None
        self._streams = 0

    def numbers(self) -> LiveNumbers:
        """Return the current aggregate, at most PERIOD_S old."""
        now_s = time.monotonic()
        if self._numbers is None or self._last is None or now_s - self._last[0] >= PERIOD_S * 0.9:
            self._numbers = self._aggregate(now_s)
        return self._numbers

    def stream(self) -> AsyncIterator[bytes]:
        """Stream the numbers as server-sent events for STREAM_LIMIT_S. Raises Overloaded before the first event."""
        if self._streams >= MAX_STREAMS:
            raise Overloaded("Too many browsers are connected to this gateway.")
        return self._events()

    async def _events(self) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            until_s = time.monotonic() + STREAM_LIMIT_S
            while time.monotonic() < until_s and not self._gateway.dispatcher.draining:
                yield b"data: " + encode_json(self.numbers().as_text()) + b"\n\n"
                await asyncio.sleep(PERIOD_S)
        finally:
            self._streams -= 1

    def pools(self) -> list[PoolNow]:
        """Return all pools with a live worker, in alphabetical order."""
        by_pool: dict[tuple[str, str, str, str, str], list[Heartbeat]] = {}
        for beat in self._gateway.dispatcher.live_workers():
            by_pool.setdefault((beat.pool, beat.provider, beat.region, beat.tier, beat.engine), []).append(beat)
        return [
            PoolNow(*names, tuple(sorted(beats, key=lambda beat: beat.worker_id)))
            for names, beats in sorted(by_pool.items())
        ]

    def queues(self) -> list[QueueNow]:
        """Return the queues of the configured models, the longest first."""
        workers = Counter(queue for beat in self._gateway.dispatcher.live_workers() for queue in beat.queues)
        queues = [self._queue(name, workers[name]) for name in self._gateway.admission_control.queues]
        return sorted(queues, key=lambda queue: (-queue.waiting, -queue.workers, queue.name))

    def failovers(self) -> list[Failover]:
        """Return the latest failovers of this gateway, the newest first."""
        return list(reversed(self._gateway.failovers.latest))

    def models(self) -> list[str]:
        """Return the configured models."""
        return sorted(self._gateway.catalog.models)

    def models_now(self) -> list[ModelNow]:
        """Return the configured models with their workers, in alphabetical order."""
        catalog, beats = self._gateway.catalog, self._gateway.dispatcher.live_workers()
        return [
            ModelNow(
                name,
                catalog.models[name].aliases,
                catalog.context_length(name),
                tuple(sorted({beat.engine for beat in beats if name in beat.models})),
                tuple(sorted({beat.pool for beat in beats if name in beat.models})),
                sum(name in beat.models for beat in beats),
                catalog.unusable.get(name),
            )
            for name in sorted(catalog.models)
        ]

    def _queue(self, name: str, workers: int) -> QueueNow:
        waiting = self._gateway.admission_control.waiting_by_lane(name)
        resuming, batch = waiting.pop(subjects.RESUME_LANE), waiting.pop(subjects.LOW_LANE)
        rate = self._gateway.admission_control.jobs_per_s(name)
        fault = self._gateway.catalog.unusable.get(subjects.model_of(name))
        return QueueNow(name, resuming, sum(waiting.values()), batch, rate, workers, fault)

    def _aggregate(self, now_s: float) -> LiveNumbers:
        beats, control = self._gateway.dispatcher.live_workers(), self._gateway.admission_control
        ended, tokens = self._gateway.series.ended_requests(), {beat.worker_id: beat.tokens_made for beat in beats}
        requests_per_s = tokens_per_s = None
        if self._last is not None and now_s - self._last[0] <= OLDEST_BASE_S:
            then_s, ended_then, tokens_then = self._last
            made = sum(max(0, count - tokens_then.get(worker, count)) for worker, count in tokens.items())
            requests_per_s, tokens_per_s = (ended - ended_then) / (now_s - then_s), made / (now_s - then_s)
        self._last = (now_s, ended, tokens)
        recent_unix_ms = time.time() * 1000 - RECENT_FAILOVERS_S * 1000
        return LiveNumbers(
            in_flight=self._gateway.dispatcher.in_flight,
            waiting=sum(sum(control.waiting_by_lane(queue).values()) for queue in control.queues),
            workers=len(beats),
            running=sum(beat.max_sequences - beat.free_sequences for beat in beats),
            slots=sum(beat.max_sequences for beat in beats),
            kv_share=kv_share(beats),
            requests_per_s=requests_per_s,
            tokens_per_s=tokens_per_s,
            failovers=sum(failover.at_unix_ms >= recent_unix_ms for failover in self._gateway.failovers.latest),
        )
