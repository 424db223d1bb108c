"""Detects an engine that is slower than it should be, at comparable load: a large batch is not a fault.

A sample is one second: the mean gap between tokens (TPOT), at a number of sequences, a context length, and a number of
prompt tokens computed in the same second. Each of the three numbers is rounded to a power, and together they form the
sample's *class*. The *normal* of a class is the fastest stretch that this engine has shown in it, including the
measurement at the start; a class without a normal is not judged. The *slowdown* is the time that the gaps of the last
half minute took, divided by their normal time. First tokens are judged the same way, by prompt length and batch.

Limits in milliseconds are for a single request. The measurement at the start converts them to limits of the slowdown.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.types import EngineStats
from pool_worker.settings import WatchSettings

TTFT_STRETCH: Final = 10  # requests for a normal
MIN_SHARE: Final = 0.5  # per stretch: fewer are not judged, unless they fill the minimum share of the window
MIN_PEERS: Final = 2  # measurements at the start that make a median meaningful
CONTEXT_POWER: Final = 4
SHORT_CONTEXT: Final = 1024  # minimum that makes a difference; so is the next, for prompt tokens a second
PROMPT_POWER: Final = 4
FEW_PROMPT_TOKENS: Final = 64

Class = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartFigures:
    """A single request on the idle engine."""

    tpot_s: float
    ttft_s: float


@dataclass(slots=True)
class _Stretch:
    """Measurements of a class: its normal, and the current stretch, which may become the normal."""

    normal_s: float | None = None
    total_s: float = 0.0
    count: int = 0


@dataclass(slots=True)
class SlowdownDetector:
    """Durations of one kind, compared with the normal of their class."""

    stretch: int
    window_s: float
    classes: dict[Class, _Stretch] = field(default_factory=dict)  # bounded, as there are few powers
    judged: deque[tuple[float, int, float, float]] = field(default_factory=deque)  # when, count, time, normal time

    def seed(self, class_: Class, mean_s: float) -> None:
        """Set the normal of a class."""
        self.classes[class_] = _Stretch(normal_s=mean_s)

    def add(self, now_s: float, class_: Class, total_s: float, count: int) -> None:
        """Add ``count`` durations of one class."""
        known = self.classes.setdefault(class_, _Stretch())
        if known.normal_s is not None:
            self.judged.append((now_s, count, total_s, count * known.normal_s))
        known.total_s += total_s
        known.count += count
        if known.count >= self.stretch:
            mean_s = known.total_s / known.count
            known.normal_s = mean_s if known.normal_s is None else min(known.normal_s, mean_s)
            known.total_s, known.count = 0.0, 0

    def value(self, now_s: float) -> float | None:
        """Return the slowdown of the window; None while it holds too little."""
        while self.judged and now_s - self.judged[0][0] > self.window_s:
            self.judged.popleft()
        count = sum(count for _, count, _, _ in self.judged)
        time_s = sum(time_s for _, _, time_s, _ in self.judged)
        normal_s = sum(normal_s for *_, normal_s in self.judged)
        is_enough = count >= self.stretch * MIN_SHARE or time_s >= self.window_s * MIN_SHARE
        return time_s / normal_s if is_enough and normal_s > 0 else None


class Pace:
    """Judges one engine, second by second. Pure: callers pass the time and the measurements."""

    def __init__(self, settings: WatchSettings, kv_tokens: int) -> None:
        self._settings = settings
        self._kv_tokens = kv_tokens
        self._tpot = SlowdownDetector(settings.tpot_stretch, settings.window_s)
        self._ttft = SlowdownDetector(TTFT_STRETCH, settings.window_s)
        self._last: tuple[float, EngineStats] | None = None
        self._slow_s = 0.0
        self._has_news = False  # since the last judgment
        self.start: StartFigures | None = None
        self.slowdown: float | None = None  # latest, of TPOT

    def measured(self, start: StartFigures, loads: Sequence[tuple[int, int, float]]) -> None:
        """Take the measurement at the start; ``loads``: (batch, context tokens, TPOT in seconds)."""
        self.start = start
        for batch, context, tpot_s in loads:
            self._tpot.seed(_tpot_class(batch, context, 0), tpot_s)

    def too_slow_at_the_start(self) -> str | None:
        """Return why the node must not start work; None if it may."""
        settings, start = self._settings, self.start
        if start is None:
            return None
        for name, took_s, limit_ms in (
            ("max_tpot_ms", start.tpot_s, settings.max_tpot_ms),
            ("max_ttft_ms", start.ttft_s, settings.max_ttft_ms),
        ):
            if limit_ms is not None and took_s * 1000 > limit_ms:
                return f"{took_s * 1000:.1f} ms for a single request, above {name} = {limit_ms:g}"
        return None

    def first_token(self, now_s: float, prefill_s: float, prompt_tokens: int) -> None:
        """Note a request's time in the engine before its first token; ``prompt_tokens``: those computed for it."""
        running = self._last[1].running if self._last is not None else 0
        self._has_news = True
        self._ttft.add(now_s, (_power(running, 2), _power(prompt_tokens, PROMPT_POWER)), prefill_s, 1)

    def judge(self, now_s: float, stats: EngineStats, peers_tpot_ms: Sequence[float] = ()) -> str | None:
        """Take the engine's statistics, once a second; return why the node must leave, or None.

        ``peers_tpot_ms``: what the pool's other workers measured at their start.
        """
        last, self._last = self._last, (now_s, stats)
        if last is None:
            return None
        self._take_gaps(now_s, last[1], stats)
        self.slowdown = self._tpot.value(now_s)
        ttft_slowdown = self._ttft.value(now_s)
        reasons = [*self._above_limits(ttft_slowdown), *self._behind_peers(peers_tpot_ms)]
        is_known = reasons or self.slowdown is not None or ttft_slowdown is not None
        if self._has_news and is_known:  # an idle engine is neither slow nor fast
            self._slow_s = self._slow_s + now_s - last[0] if reasons else 0.0
        self._has_news = False
        if reasons and self._slow_s >= self._settings.slow_for_s:
            return f"{reasons[0]}, for {self._slow_s:.0f} s"
        return None

    def _take_gaps(self, now_s: float, before: EngineStats, after: EngineStats) -> None:
        gaps = sum(after.inter_token_s.counts) - sum(before.inter_token_s.counts)
        total_s = after.inter_token_s.total - before.inter_token_s.total
        prompt_tokens = after.counters.prompt_tokens - before.counters.prompt_tokens
        first, second = self._class_of(before, prompt_tokens), self._class_of(after, prompt_tokens)
        if gaps > 0 and first == second:  # a changing load is comparable to none
            self._has_news = True
            self._tpot.add(now_s, second, total_s, gaps)

    def _class_of(self, stats: EngineStats, prompt_tokens: int) -> Class:
        context = stats.kv_usage * self._kv_tokens / max(1, stats.running)
        return _tpot_class(stats.running, context, prompt_tokens)

    def _above_limits(self, ttft_slowdown: float | None) -> list[str]:
        settings, start = self._settings, self.start
        reasons = []
        for name, slowdown, limit_ms, start_s in (
            ("tokens", self.slowdown, settings.max_tpot_ms, start and start.tpot_s),
            ("first tokens", ttft_slowdown, settings.max_ttft_ms, start and start.ttft_s),
        ):
            allowed = settings.max_slowdown
            if limit_ms is not None and start_s:
                allowed = min(allowed, limit_ms / 1000 / start_s)
            if slowdown is not None and slowdown > allowed:
                reasons.append(f"{name} take {slowdown:.1f} times as long as normal at this load, above {allowed:.1f}")
        return reasons

    def _behind_peers(self, peers_tpot_ms: Sequence[float]) -> list[str]:
        if self.start is None or len(peers_tpot_ms) < MIN_PEERS:
            return []
        median_ms, own_ms = statistics.median(peers_tpot_ms), self.start.tpot_s * 1000
        if own_ms <= self._settings.max_slowdown * median_ms:
            return []
        return [f"{own_ms:.1f} ms per token for a single request, while the pool's median is {median_ms:.1f} ms"]


def _tpot_class(running: int, context: float, prompt_tokens: int) -> Class:
    context, prompt_tokens = max(SHORT_CONTEXT, context), max(FEW_PROMPT_TOKENS, prompt_tokens)
    return _power(running, 2), _power(context, CONTEXT_POWER), _power(prompt_tokens, PROMPT_POWER)


def _power(number: float, base: int) -> int:
    """Round up to a power and return its exponent: 0 for 1, -1 for nothing."""
    return -1 if number < 1 else math.ceil(math.log(number, base) - 1e-9)
