"""The sizes of a group's pools: the need, filled from the cheapest pools first.

Pools are ordered by price per speed, and each is used only as far as its price is worth it. A pool that cannot launch
now is skipped, so that more expensive pools fill in. When it can launch again, it replaces them: an expensive machine
ends only when cheaper ones serve. Machines are spread over a pool's places: those of one place are lost together.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleet.policy.need import Market, batch_plan, critical_share, expected_rate, late_speed, missing_speed
from fleet.policy.view import Demand, Plan, PoolPlan, PoolView

BATCH_PERIOD_S: Final = 60.0  # between two looks at all deadlines
ONE_WORKER: Final = 0.5  # of a worker: as much as makes one be wanted
ROUNDING: Final = 0.05  # of a worker: so much less than needed is enough
LATELY_S: Final = 86_400.0  # over which it is learned how much of the cheapest pool could be had
LEAST_HAD: Final = 0.25  # of what was asked for: less is taken for so much
LATELY_STARTS: Final = 2.0  # window of a more expensive pool, in multiples of its start-up time


class Decider:
    """Decides the sizes of one group's pools. Its only state is the recent need."""

    def __init__(self, *, max_wait_s: float, idle_s: float, cool_down_s: float = 0.0) -> None:
        """``max_wait_s``: of interactive requests. ``idle_s``: how long the last worker is kept without requests.

        ``cool_down_s``: minimum time before a pool shrinks.
        """
        self._max_wait_s = max_wait_s
        self._idle_s = idle_s
        self._cool_down_s = cool_down_s
        self._windows: dict[str, _DemandWindow] = {}  # by pool
        self._share, self._batch, self._batch_at_s = 0.5, 0.0, -math.inf
        self._missing = 0.0  # speed that batch deadlines need beyond what the cheapest pool can do
        self._best: deque[tuple[float, float]] = (
            deque()
        )  # recent (time, speed) of the cheapest pool, with falling speeds
        self._asked = self._had = 0.0  # recent requested and received speed: time x speed
        self._needed = 0.0  # of the cheapest pool
        self._most = math.inf  # of it, as far as is known
        self._refused_s = -math.inf  # when it last got no machine anywhere
        self._short_s = math.inf  # since when it has not got what it needs
        self._at_s: float | None = None
        self._began_s: float | None = None

    def decide(self, pools: Sequence[PoolView], demand: Demand, now_s: float) -> Plan:
        """Return the plan of each pool. ``now_s``: from a monotonic clock."""
        if self._began_s is None:
            self._began_s = now_s
        known_s = now_s - self._began_s  # a new controller ends nothing before it knows what is needed
        ordered = sorted(pools, key=lambda pool: (pool.usd_per_token, pool.name))
        self._look_at_batch(ordered, demand, now_s)
        present = sum(pool.size * pool.tokens_per_s for pool in ordered)
        wanted: dict[str, int] = {}
        needs: dict[str, float] = {}
        covered = sum(pool.min_workers * pool.tokens_per_s for pool in ordered)
        cheapest: float | None = None
        for pool in ordered:
            need = self._need(pool, demand, present, known_s, cheapest)
            held = self._windows.setdefault(pool.name, _DemandWindow()).take(
                need - covered, now_s, *self._look_back(pool, demand, is_cheapest=pool is ordered[0])
            )
            needs[pool.name] = held + covered
            size = _size(pool, held)
            if known_s < max(pool.start_s, self._cool_down_s):
                size = max(size, min(pool.size, pool.max_workers))
            covered += (size - pool.min_workers) * pool.tokens_per_s
            cheapest = size * pool.tokens_per_s if cheapest is None else cheapest
            wanted[pool.name] = size
        needed = max(needs.values())
        self._needed = needs[ordered[0].name]
        left = _Remaining(ready=sum(pool.ready * pool.tokens_per_s for pool in ordered), size=present)
        why = _why(demand, self._batch, expected_rate(demand, ordered[0].start_s), needed)
        plans = [
            _plan(pool, wanted[pool.name], needs[pool.name], left, why)
            for pool in reversed(ordered)  # the dearest end first
        ]
        return plans[::-1]

    def _look_at_batch(self, ordered: Sequence[PoolView], demand: Demand, now_s: float) -> None:
        cheapest = ordered[0]
        speed = cheapest.ready * cheapest.tokens_per_s
        elapsed_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        while self._best and self._best[-1][1] <= speed:
            self._best.pop()
        self._best.append((now_s, speed))
        while self._best[0][0] < now_s - LATELY_S:
            self._best.popleft()
        reach = self._best[0][1]
        fading = math.exp(-elapsed_s / LATELY_S)
        asked = min(reach, self._needed)
        self._asked = self._asked * fading + asked * elapsed_s
        if all(place.rests for place in cheapest.places):
            self._refused_s = now_s
            self._short_s = min(self._short_s, now_s)
        elif speed >= asked:
            self._short_s = math.inf
        self._had = self._had * fading + min(speed, asked) * elapsed_s
        if now_s - self._batch_at_s >= BATCH_PERIOD_S:
            least = critical_share(cheapest.usd_per_token, demand.hosted_usd_per_token)
            had = max(LEAST_HAD, self._had / self._asked) if self._asked else 1.0
            self._most = cheapest.max_workers * cheapest.tokens_per_s
            if now_s - self._refused_s < LATELY_S:
                self._most = min(self._most, reach)
            market = Market(self._most, had, speed, max(0.0, now_s - self._short_s))
            self._share, self._batch = batch_plan(demand.batch, demand.expected, demand.surge, least, market)
            self._batch_at_s = now_s
            self._missing = missing_speed(demand.batch, demand.expected, market)

    def _need(self, pool: PoolView, demand: Demand, present: float, known_s: float, cheapest: float | None) -> float:
        """Return the speed that this pool and all cheaper ones should have together.

        ``cheapest``: the speed that the cheapest is to have; None: this is it.
        """
        is_idle = min(demand.idle_s, known_s) >= self._idle_s
        expected = expected_rate(demand, pool.start_s)
        own = critical_share(pool.usd_per_token, demand.hosted_usd_per_token)
        surge = demand.surge(max(own, self._share) if cheapest is None else own)
        need = expected * surge
        if demand.hosted_usd_per_token is None:
            need = max(need, demand.tokens_per_s)
            need += late_speed(
                demand, spare=need - expected, present=present, within_s=pool.start_s, max_wait_s=self._max_wait_s
            )
            # What is there stays for as long as something waits that it could do in time.
            need = max(need, min(present, demand.tokens_per_s + demand.queued_tokens / self._max_wait_s))
        if is_idle and need <= pool.tokens_per_s:
            need = 0.0  # of the last worker: what is expected of this hour did not come
        if cheapest is None:
            need = max(need, self._batch)
        elif self._missing > 0:
            need = max(need, cheapest) + self._missing
        if demand.is_unknown or demand.idle_s < self._idle_s or (pool.size and not is_idle):
            need = max(need, ONE_WORKER * pool.tokens_per_s)
        return need

    def _look_back(self, pool: PoolView, demand: Demand, *, is_cheapest: bool) -> tuple[float, float]:
        """Return how far a pool looks back, and the share of that time which what it gets is to cover.

        The need for the cheapest pool is kept for as long as a launch takes. For a more expensive pool, need comes
        and goes with the cheaper machines' losses: while a hosted API takes what is missing, it gets what is worth its
        price.
        """
        if is_cheapest:
            return max(pool.start_s, self._cool_down_s), 1.0
        return LATELY_STARTS * pool.start_s, critical_share(pool.usd_per_token, demand.hosted_usd_per_token)


class _DemandWindow:
    """The recent need for a pool."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque()  # (time, need)

    def take(self, need: float, now_s: float, length_s: float, share: float) -> float:
        """Add a need, and return what covers such a share of the last ``length_s``."""
        self._values.append((now_s, need))
        while self._values[0][0] < now_s - length_s:
            self._values.popleft()
        ordered = sorted(value for _, value in self._values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _size(pool: PoolView, missing: float) -> int:
    """Return the pool's size that gives the missing speed, as far as it can be had."""
    more = max(0, math.ceil(missing / pool.tokens_per_s - ROUNDING))
    size = min(pool.min_workers + more, pool.max_workers)
    if all(place.rests for place in pool.places):
        size = min(size, max(pool.size, pool.min_workers))
    return size


@dataclass
class _Remaining:
    """The speed that is left once the machines that may end have ended: of what serves, and of all that is there."""

    ready: float
    size: float

    def end(self, pool: PoolView, surplus: int, need: float) -> int:
        """Return how many of a pool's machines may end, those that are starting first.

        ``need``: the speed that is worth this pool's price. What is missing elsewhere is not given up before it has
        been launched there, nor what serves before it serves; what only cheaper machines are worth keeps none of these.
        """
        starting = min(surplus, pool.starting, _whole((self.size - need) / pool.tokens_per_s))
        self.size -= starting * pool.tokens_per_s
        ready = 0
        if starting == pool.starting:
            spare = min(self.ready, self.size) - need
            ready = min(surplus - starting, pool.ready, _whole(spare / pool.tokens_per_s))
        self.ready -= ready * pool.tokens_per_s
        self.size -= ready * pool.tokens_per_s
        return starting + ready


def _whole(workers: float) -> int:
    return max(0, math.floor(workers + ROUNDING))


def _plan(pool: PoolView, wanted: int, need: float, left: _Remaining, why: str) -> PoolPlan:
    if wanted >= pool.size:
        return PoolPlan(pool.name, wanted, _spread(pool, wanted - pool.size), 0, why)
    ends = left.end(pool, pool.size - wanted, need)
    return PoolPlan(pool.name, pool.size - ends, {}, ends, why)


def _spread(pool: PoolView, count: int) -> Mapping[str, int]:
    """Return how many machines to launch at each place: always where there are fewest, the best of those."""
    there = {place.name: place.ready + place.starting for place in pool.places if not place.rests}
    launches: Counter[str] = Counter()
    if there:
        for _ in range(count):
            name = min(there, key=lambda one: there[one])
            there[name] += 1
            launches[name] += 1
    return launches


def _why(demand: Demand, batch: float, expected: float, needed: float) -> str:
    """Explain the need in one sentence."""
    if demand.is_unknown:
        parts = ["one worker is needed first, to publish how the model's tokens are counted"]
    elif expected < 1 and not batch and not demand.queued_tokens:
        parts = [
            "no demand expected" + ("; one worker is kept until the model has been idle for idle_s" if needed else "")
        ]
    else:
        parts = [f"{expected:,.0f} tokens/s expected, capacity for {needed:,.0f} is worth its cost"]
    if demand.queued_tokens >= 1:
        parts.append(f"{demand.queued_tokens:,.0f} tokens queued")
    if batch:
        parts.append(f"batch deadlines need {batch:,.0f} tokens/s")
    return "; ".join(parts)
