"""Is an engine slower than it should be? Judged at comparable load, so that a big batch is no fault.

A sample is one second: the mean gap between tokens (TPOT), at so many sequences, so long contexts, and so many prompt
tokens computed beside. Each of these numbers is rounded to a power, and the three make the sample's *class*. What is
*normal* for a class is the fastest stretch that this engine has shown in it, the start's measurement included; a class
is not judged before it has a normal. The *slowdown* is the time that the last half minute's gaps took, over what they
take normally. First tokens are judged likewise, by prompt length and batch.

Limits in milliseconds are of one request alone: they become limits of the slowdown by the start's measurement.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.types import EngineStats
from pool_worker.settings import WatchSettings

TTFT_STRETCH: Final = 10  # requests that make a normal
MIN_SHARE: Final = 0.5  # of a stretch: fewer in the window say nothing, unless they took the share of it, too
MIN_PEERS: Final = 2  # whose measurements at the start make a median worth comparing with
CONTEXT_POWER: Final = 4
SHORT_CONTEXT: Final = 1024  # shorter ones make no difference; nor do fewer prompt tokens a second than the next
PROMPT_POWER: Final = 4
FEW_PROMPT_TOKENS: Final = 64

Class = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartFigures:
    """One request alone, on the idle engine."""

    tpot_s: float
    ttft_s: float


@dataclass(slots=True)
class _Stretch:
    """Measurements of a class: its normal, and the stretch that may become one."""

    normal_s: float | None = None
    total_s: float = 0.0
    count: int = 0


@dataclass(slots=True)
class SlowdownDetector:
    """Durations of one kind beside what is normal for their class."""

    stretch: int
    window_s: float
    classes: dict[Class, _Stretch] = field(default_factory=dict)  # powers are few, so these are, too
    judged: deque[tuple[float, int, float, float]] = field(default_factory=deque)  # when, count, time, normal time

    def seed(self, class_: Class, mean_s: float) -> None:
        """Note a normal that was measured."""
        self.classes[class_] = _Stretch(normal_s=mean_s)

    def add(self, now_s: float, class_: Class, total_s: float, count: int) -> None:
        """Take ``count`` durations of one class."""
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
        """Return the slowdown of the window; None while that holds too little."""
        while self.judged and now_s - self.judged[0][0] > self.window_s:
            self.judged.popleft()
        count = sum(count for _, count, _, _ in self.judged)
        time_s = sum(time_s for _, _, time_s, _ in self.judged)
        normal_s = sum(normal_s for *_, normal_s in self.judged)
        is_enough = count >= self.stretch * MIN_SHARE or time_s >= self.window_s * MIN_SHARE
        return time_s / normal_s if is_enough and normal_s > 0 else None


class Pace:
    """Judges one engine, second by second. Pure: the time and the measurements are passed in."""

    def __init__(self, settings: WatchSettings, kv_tokens: int) -> None:
        self._settings = settings
        self._kv_tokens = kv_tokens
        self._tpot = SlowdownDetector(settings.tpot_stretch, settings.window_s)
        self._ttft = SlowdownDetector(TTFT_STRETCH, settings.window_s)
        self._last: tuple[float, EngineStats] | None = None
        self._slow_s = 0.0
        self._has_news = False  # since it was judged last
        self.start: StartFigures | None = None
        self.slowdown: float | None = None  # of TPOT, as last seen

    def measured(self, start: StartFigures, loads: Sequence[tuple[int, int, float]]) -> None:
        """Take what was measured at the start; ``loads``: (batch, context tokens, TPOT in seconds)."""
        self.start = start
        for batch, context, tpot_s in loads:
            self._tpot.seed(_tpot_class(batch, context, 0), tpot_s)

    def too_slow_at_the_start(self) -> str | None:
        """Say why the node should not even begin; None if it should."""
        settings, start = self._settings, self.start
        if start is None:
            return None
        for name, took_s, limit_ms in (
            ("max_tpot_ms", start.tpot_s, settings.max_tpot_ms),
            ("max_ttft_ms", start.ttft_s, settings.max_ttft_ms),
        ):
            if limit_ms is not None and took_s * 1000 > limit_ms:
                return f"{took_s * 1000:.1f} ms for one request alone, above {name} = {limit_ms:g}"
        return None

    def first_token(self, now_s: float, prefill_s: float, prompt_tokens: int) -> None:
        """Note a request's time in the engine before its first token; ``prompt_tokens``: that were computed for it."""
        running = self._last[1].running if self._last is not None else 0
        self._has_news = True
        self._ttft.add(now_s, (_power(running, 2), _power(prompt_tokens, PROMPT_POWER)), prefill_s, 1)

    def judge(self, now_s: float, stats: EngineStats, peers_tpot_ms: Sequence[float] = ()) -> str | None:
        """Take the engine's statistics, once a second; say why the node should leave, None while it need not.

        ``peers_tpot_ms``: what the other workers of the pool have measured at their start.
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
        if gaps > 0 and first == second:  # while the load changes, it is like no other
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
        return [f"{own_ms:.1f} ms a token alone, where the pool's median is {median_ms:.1f} ms"]


def _tpot_class(running: int, context: float, prompt_tokens: int) -> Class:
    context, prompt_tokens = max(SHORT_CONTEXT, context), max(FEW_PROMPT_TOKENS, prompt_tokens)
    return _power(running, 2), _power(context, CONTEXT_POWER), _power(prompt_tokens, PROMPT_POWER)


def _power(number: float, base: int) -> int:
    """Round up to a power; return its exponent: 0 for 1, -1 for nothing."""
    return -1 if number < 1 else math.ceil(math.log(number, base) - 1e-9)
