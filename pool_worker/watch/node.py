"""Watches this node's pace and makes it leave if that stays too low."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from engine.types import SequenceOutput
from pool_worker.attempt import Attempt
from pool_worker.engines.base import Capacity, EngineDiedError, TokenEngine
from pool_worker.settings import WatchSettings
from pool_worker.watch.pace import Pace
from pool_worker.watch.start import NotMeasured, StartBenchmark
from protocol.job import Pace as WirePace

log = logging.getLogger(__name__)


class NodeTooSlowError(EngineDiedError):
    """The node left its pool because it was too slow for too long."""


class NodeWatch:
    """One worker's pace. ``reason`` says why it must leave; None until then."""

    def __init__(
        self,
        settings: WatchSettings,
        engine: TokenEngine,
        capacity: Capacity,
        *,
        peers_tpot_ms: Callable[[], Sequence[float]],
    ) -> None:
        """``peers_tpot_ms`` returns the TPOT that the pool's other workers measured at their start."""
        self._settings = settings
        self._engine = engine
        self._pace = Pace(settings, capacity.max_kv_tokens)
        self._benchmark: StartBenchmark | None = StartBenchmark(engine, capacity)
        self._peers_tpot_ms = peers_tpot_ms
        self.reallocates = settings.reallocate
        self.reason: str | None = None

    async def measure(self, model: str) -> None:
        """Measure the idle engine, before there are jobs. A failure to measure is only logged."""
        benchmark, settings = self._benchmark, self._settings
        if benchmark is None:
            return
        try:
            start, loads = await benchmark.run(model, settings.start_limit_s)
        except NotMeasured as error:
            log.warning("could not measure this node's pace; judging it only by its later pace: %s", error)
        else:
            self._pace.measured(start, loads)
            log.info(
                "measured at start: %.1f ms per token, first token after %.0f ms; %s",
                start.tpot_s * 1000,
                start.ttft_s * 1000,
                ", ".join(f"batch of {batch}: {tpot_s * 1000:.1f} ms" for batch, _, tpot_s in loads),
            )
            self._leave(self._pace.too_slow_at_the_start())
        finally:
            self._benchmark = None

    def took(self, outputs: Sequence[SequenceOutput]) -> bool:
        """Report whether outputs of the engine belong to the measurement; while it runs there are no others."""
        if self._benchmark is None:
            return False
        self._benchmark.take(outputs)
        return True

    def ended(self, attempt: Attempt) -> None:
        """Note an attempt's first token."""
        timings = attempt.engine_timings()
        if timings is not None and attempt.ttft_ms is not None:
            computed = attempt.prompt_tokens - attempt.cached_tokens
            self._pace.first_token(time.monotonic(), timings.prefill_ms / 1000, computed)

    async def run(self) -> None:
        """Judge until the node must leave."""
        while self.reason is None:
            await asyncio.sleep(self._settings.period_s)
            if self._benchmark is None:
                self._leave(self._pace.judge(time.monotonic(), self._engine.stats(), self._peers_tpot_ms()))

    def _leave(self, reason: str | None) -> None:
        if reason is not None:
            self.reason = reason
            log.error("this node is too slow and leaves its pool: %s", reason)

    def report(self) -> WirePace:
        """Return the pace for heartbeats."""
        start = self._pace.start
        return WirePace(
            tpot_ms=0.0 if start is None else start.tpot_s * 1000,
            ttft_ms=0.0 if start is None else start.ttft_s * 1000,
            slowdown=self._pace.slowdown or 0.0,
            leaving=self.reason or "",
        )
