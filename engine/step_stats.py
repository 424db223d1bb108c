"""Statistics of an engine's steps, at the cost of a few operations per step. Imports no torch.

Another thread may take a snapshot at any time: it may miss the step in progress, and never sees a number fall.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from engine.types import EngineCounters, EngineStats, HistogramCounts, SequenceTimings

# vLLM's buckets, and smaller ones for models that take a few milliseconds per step.
INTER_TOKEN_BOUNDS_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
STEP_TOKENS_BOUNDS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's


class Histogram:
    """Counts of values in buckets; each bucket includes its upper bound, and the last one has none."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that occurred `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> HistogramCounts:
        """Return the counts so far."""
        return HistogramCounts(self._bounds, tuple(self._counts), self._total)


@dataclass(slots=True)
class SequenceClock:
    """The times at which a sequence entered each phase, on the monotonic clock."""

    added_s: float = 0.0
    scheduled_s: float | None = None  # the first time
    first_token_s: float | None = None  # made by this engine
    last_token_s: float | None = None
    preemptions: int = 0

    @property
    def has_first_token(self) -> bool:
        """True if it has yielded one token and no more, or all of them in one step."""
        return self.first_token_s is not None and self.first_token_s == self.last_token_s

    def timings(self) -> SequenceTimings:
        """Return the time spent in each phase; the current phase ends at the last token, or now if there is none."""
        if self.scheduled_s is None:
            return SequenceTimings(_ms(self.added_s, time.monotonic()), 0.0, 0.0, self.preemptions)
        queue_ms = _ms(self.added_s, self.scheduled_s)
        if self.first_token_s is None or self.last_token_s is None:
            return SequenceTimings(queue_ms, _ms(self.scheduled_s, time.monotonic()), 0.0, self.preemptions)
        prefill_ms, decode_ms = _ms(self.scheduled_s, self.first_token_s), _ms(self.first_token_s, self.last_token_s)
        return SequenceTimings(queue_ms, prefill_ms, decode_ms, self.preemptions)


class StepStats:
    """Tokens computed in each step, and the gaps between the tokens of each sequence."""

    def __init__(self) -> None:
        self.step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)
        self._last_s: float | None = None  # time of the last step's tokens

    def snapshot(self, *, running: int, waiting: int, kv_usage: float, counters: EngineCounters) -> EngineStats:
        """Return an engine's statistics at this moment."""
        steps, gaps = self.step_tokens.snapshot(), self.inter_token_s.snapshot()
        return EngineStats(running, waiting, kv_usage, replace(counters), steps, gaps)

    def record_tokens(self, clocks: Iterable[SequenceClock], now_s: float) -> None:
        """Record that the sequence of each clock has now yielded one token, or several in one step.

        Sequences that also had one in the last step, usually all, have the same gap, which is counted once for all.
        """
        last_s, steady = self._last_s, 0
        for clock in clocks:
            if clock.last_token_s is None:
                clock.first_token_s = now_s
            elif clock.last_token_s == last_s:
                steady += 1
            else:  # it was preempted, or the step's budget was used up
                self.inter_token_s.observe(now_s - clock.last_token_s)
            clock.last_token_s = now_s
        if steady and last_s is not None:
            self.inter_token_s.observe(now_s - last_s, steady)
        self._last_s = now_s


def _ms(start_s: float, end_s: float) -> float:
    return (end_s - start_s) * 1000
