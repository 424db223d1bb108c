"""A study: one workload and one market under our policy and other policies, compared with the lowest possible cost."""

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from msgspec import Struct

from fleet.policy.decide import Decider
from fleet.simulation.market import Counts
from fleet.simulation.optimum import least_usd
from fleet.simulation.peers import Fixed, Mixed, OneStep, Reactive
from fleet.simulation.workload import Workload
from fleet.simulation.world import Decide, HostedApi, Outcome, SimulatedPool, World

QUARTER_S: Final = 900
PEER_UTILISATION: Final = 0.8
FIXED: Final = "fixed at peak, on demand"
EQUAL_SHARE: Final = 0.01  # by which costs may differ that count as equal
LEAST_UTILISATION, MOST_UTILISATION = 0.2, 4.0
MOST_TRIES: Final = 9


class Equal(Struct, frozen=True):
    """A peer's policy with the headroom at which it costs the same as another policy."""

    utilisation: float  # how full it means machines to be
    outcome: Outcome
    is_equal: bool  # False: no utilization was found that makes it so


class Study(Struct, frozen=True):
    """What is to be compared."""

    workload: Workload
    pools: tuple[SimulatedPool, ...]  # one of them on demand
    market: Mapping[str, Counts]
    hosted: HostedApi | None
    max_wait_s: float = 10.0
    seed: int = 1

    def play(self, decide: Decide) -> Outcome:
        """Play the workload under a policy."""
        world = World(self.workload, self.pools, self.market, decide, hosted=self.hosted, seed=self.seed)
        return world.run(self.max_wait_s)

    def ours(self) -> Outcome:
        """Play it under Spillway's policy."""
        return self.play(Decider(max_wait_s=self.max_wait_s, idle_s=600.0, cool_down_s=60.0).decide)

    def at_equal_cost(self, name: str, usd: float) -> Equal:
        """Play a peer's policy at the utilization at which it costs ``usd``, found by bisection.

        Where none is found, its cost is the nearest of those tried: with too few machines the hosted API costs more
        than they would, so that no policy can be as cheap as one likes.
        """
        low, high = LEAST_UTILISATION, MOST_UTILISATION
        tried: list[Equal] = []
        for _ in range(MOST_TRIES):
            utilisation = math.sqrt(low * high)
            outcome = self.peers(utilisation)[name]()
            is_equal = abs(outcome.usd - usd) <= EQUAL_SHARE * usd
            tried.append(Equal(utilisation, outcome, is_equal))
            if is_equal:
                break
            low, high = (utilisation, high) if outcome.usd > usd else (low, utilisation)
        return min(tried, key=lambda one: abs(one.outcome.usd - usd))

    def peers(self, utilisation: float = PEER_UTILISATION) -> Mapping[str, Callable[[], Outcome]]:
        """Return the policies of others, each to be played. ``utilisation``: how full they mean machines to be."""
        return {
            FIXED: lambda: self.play(Fixed(self._on_demand.name, self._peak(utilisation)).decide),
            "reactive (60 s)": lambda: self.play(Reactive(utilisation).decide),
            "one step at a time": lambda: self.play(OneStep(utilisation).decide),
            "spot mix (SkyServe)": lambda: self.play(Mixed(utilisation).decide),
        }

    def least_usd(self) -> float:
        """Return the clairvoyant's cost. Raises Unsolved, or ImportError without ``highspy``."""
        return least_usd(self.workload, self.pools, self.market, self.hosted)

    @property
    def _on_demand(self) -> SimulatedPool:
        return next(pool for pool in self.pools if pool.tier == "on-demand")

    def _peak(self, utilisation: float) -> int:
        """Return how many on-demand machines the busiest quarter of an hour needs."""
        quarters = self.workload.tokens[: self.workload.seconds // QUARTER_S * QUARTER_S].reshape(-1, QUARTER_S)
        return int(np.ceil(quarters.mean(axis=1).max() / self._on_demand.tokens_per_s / utilisation))


def facts(outcome: Outcome, least: float | None = None) -> dict[str, object]:
    """Return an outcome's figures."""
    return {
        "usd": round(outcome.usd, 2),
        "times_least": None if least is None else round(outcome.usd / least, 3),
        "late_share": round(outcome.late_share, 6),
        "wait_s": dict(outcome.wait_s),
        "gpu_hours": {name: round(hours, 1) for name, hours in outcome.machine_hours.items()},
        "usd_by_pool": {name: round(usd, 2) for name, usd in outcome.usd_by_pool.items()},
        "hosted_tokens": round(outcome.hosted_tokens),
        "lost_machines": outcome.lost_machines,
        "launches": outcome.launches,
        "batch_missed": outcome.batch_missed,
    }
