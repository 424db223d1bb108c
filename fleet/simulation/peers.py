"""Policies of others, as they are published, for comparison under the same traffic and the same losses.

- *fixed*: as many on-demand machines as the busiest quarter of an hour needs, all the time.
- *reactive*: llm-d's Workload Variant Autoscaler looks once a minute at the load there is and sizes for it
  (https://github.com/llm-d-incubation/workload-variant-autoscaler); no forecast, the cheapest kind first.
- *one step*: SkyPilot's autoscaler (sky/serve/autoscalers.py, RequestRateAutoscaler): a decision must hold for 300 s to
  grow and for 1200 s to shrink; pools grow and shrink by one machine at a time.
- *mixed*: SkyServe (https://arxiv.org/abs/2411.01438): the same rate rule over spot machines, two more than needed, and
  on-demand ones for each spot machine that is not ready (``dynamic_ondemand_fallback``).
"""

import math
from collections.abc import Sequence
from typing import Final

from fleet.policy.view import Demand, Plan, PoolPlan, PoolView

UPSCALE_DELAY_S: Final = 300.0
DOWNSCALE_DELAY_S: Final = 1200.0
LOOK_S: Final = 60.0


class Fixed:
    """A constant number of machines of one pool."""

    def __init__(self, pool: str, size: int) -> None:
        self._pool, self._size = pool, size

    def decide(self, pools: Sequence[PoolView], demand: Demand, now_s: float) -> Plan:  # noqa: ARG002
        """Return the plan."""
        [pool] = [one for one in pools if one.name == self._pool]
        return [_to(pool, self._size)]


class Reactive:
    """Sizes for the load of the last minute, once a minute."""

    def __init__(self, utilisation: float) -> None:
        self._utilisation = utilisation
        self._at_s = -math.inf
        self._sizes: dict[str, int] = {}

    def decide(self, pools: Sequence[PoolView], demand: Demand, now_s: float) -> Plan:
        """Return the plan."""
        if now_s - self._at_s >= LOOK_S:
            self._at_s = now_s
            self._sizes = _cheapest_first(pools, _load(demand) / self._utilisation)
        return [_to(pool, self._sizes[pool.name]) for pool in pools]


class OneStep:
    """Moves by one machine at a time, once a need has held for long enough."""

    def __init__(self, utilisation: float) -> None:
        self._utilisation = utilisation
        self._since_s: tuple[int, float] = (0, 0.0)  # the direction that is wanted, and since when

    def decide(self, pools: Sequence[PoolView], demand: Demand, now_s: float) -> Plan:
        """Return the plan."""
        wanted = _cheapest_first(pools, _load(demand) / self._utilisation)
        there = sum(pool.size for pool in pools)
        step = max(-1, min(1, sum(wanted.values()) - there))
        if step != self._since_s[0]:
            self._since_s = (step, now_s)
        delay_s = UPSCALE_DELAY_S if step > 0 else DOWNSCALE_DELAY_S
        if step == 0 or (now_s - self._since_s[1] < delay_s and there > 0):
            return [_to(pool, pool.size) for pool in pools]
        self._since_s = (0, now_s)
        changed = [pool for pool in pools if (wanted[pool.name] - pool.size) * step > 0]
        return [_to(pool, pool.size + (step if pool is changed[0] else 0)) for pool in pools]


class Mixed:
    """SkyServe's rule: spot machines with two to spare, on-demand ones for those that are not ready."""

    def __init__(self, utilisation: float, extra: int = 2) -> None:
        self._utilisation, self._extra = utilisation, extra
        self._target, self._since_s = 0, 0.0

    def decide(self, pools: Sequence[PoolView], demand: Demand, now_s: float) -> Plan:
        """Return the plan."""
        spot = min(pools, key=lambda pool: pool.usd_per_token)
        [on_demand] = [pool for pool in pools if pool.tier == "on-demand"]
        wanted = math.ceil(_load(demand) / self._utilisation / spot.tokens_per_s)
        if wanted == self._target:
            self._since_s = now_s
        delay_s = UPSCALE_DELAY_S if wanted > self._target else DOWNSCALE_DELAY_S
        if now_s - self._since_s >= delay_s or self._target == 0:
            self._target, self._since_s = wanted, now_s
        fallback = max(0, min(self._target, self._target + self._extra - spot.ready))
        plans = [_to(spot, min(spot.max_workers, self._target + self._extra)), _to(on_demand, fallback)]
        return plans + [_to(pool, 0) for pool in pools if pool not in (spot, on_demand)]


def _load(demand: Demand) -> float:
    """Return the speed that what arrives, waits and is due asks for, without a look ahead."""
    batch = max((one.tokens / max(one.due_in_s, 600.0) for one in demand.batch), default=0.0)
    return demand.tokens_per_s + demand.queued_tokens / LOOK_S + batch


def _cheapest_first(pools: Sequence[PoolView], need: float) -> dict[str, int]:
    sizes = {}
    for pool in sorted(pools, key=lambda one: one.usd_per_token):
        size = min(pool.max_workers, max(0, math.ceil(need / pool.tokens_per_s)))
        if all(place.rests for place in pool.places):
            size = min(size, pool.size)
        sizes[pool.name] = size
        need -= size * pool.tokens_per_s
    return sizes


def _to(pool: PoolView, size: int) -> PoolPlan:
    """Return the plan that brings a pool to a size, round robin over places that are to be had."""
    there = {place.name: place.ready + place.starting for place in pool.places if not place.rests}
    launches: dict[str, int] = {}
    for _ in range(size - pool.size if there else 0):
        name = min(there, key=lambda one: there[one])
        there[name] += 1
        launches[name] = launches.get(name, 0) + 1
    return PoolPlan(pool.name, size, launches, max(0, pool.size - size), "")
