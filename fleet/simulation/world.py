"""The simulated fleet: machines that start, serve, get lost and end; requests that wait; batch work beside them.

Work flows as a fluid through each second: interactive work first, in order of arrival, then batch work by deadline.
Machines are simulated one by one, each with its own start-up time. The work of a lost machine is computed again on
another machine, which costs work but loses no request.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from fleet.policy.forecast import Forecast
from fleet.policy.surges import Surges
from fleet.policy.view import BatchWork, Demand, PlaceView, Plan, PoolView
from fleet.simulation.market import Counts
from fleet.simulation.workload import DAY_S, Workload

REWORK_S: Final = 5.0  # of a machine's work: prompts and tokens of what it ran, computed again
START_SPREAD: Final = 0.25  # of start-up times, log-normal
MINUTE_S: Final = 60
PERCENTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


class SimulatedPool(Struct, frozen=True):
    """One pool of the simulation. Its places are those of ``market``; "": as many as wanted, always."""

    name: str
    tier: str
    usd_per_hour: float
    tokens_per_s: float
    start_s: float
    max_workers: int
    places: tuple[str, ...] = ("",)
    rest_s: float = 120.0
    min_workers: int = 0


class HostedApi(Struct, frozen=True):
    """The last tier: takes what would wait for longer than ``after_s``."""

    usd_per_million_tokens: float
    after_s: float


class _Machine(Struct):
    pool: SimulatedPool
    place: str
    launched_s: int
    ready_s: int


class Outcome(Struct, frozen=True):
    """What happened. Series are by minute."""

    usd: float
    usd_by_pool: Mapping[str, float]
    machine_hours: Mapping[str, float]
    hosted_tokens: float
    requests: int
    late: int  # interactive requests that waited for longer than ``max_wait_s``
    wait_s: Mapping[str, float]  # percentiles
    lost_machines: int
    launches: int
    batch_missed: int
    arriving: Sequence[float]  # tokens per second
    ready: Mapping[str, Sequence[float]]  # tokens per second, by pool
    queued: Sequence[float]  # tokens

    @property
    def late_share(self) -> float:
        """Share of interactive requests that were late."""
        return self.late / max(1, self.requests)


Decide = Callable[[Sequence[PoolView], Demand, float], Plan]


class World:
    """One run of a workload under a policy."""

    def __init__(
        self,
        workload: Workload,
        pools: Sequence[SimulatedPool],
        market: Mapping[str, Counts],
        decide: Decide,
        *,
        period_s: int = 5,
        hosted: HostedApi | None = None,
        seed: int = 1,
        begun_s: float = 4 * DAY_S,  # a Monday's midnight since the epoch
    ) -> None:
        self._workload = workload
        self._pools = {pool.name: pool for pool in pools}
        self._market = market
        self._decide = decide
        self._period_s = period_s
        self._hosted = hosted
        self._rng = np.random.default_rng(seed)
        self._begun_s = begun_s
        self._forecast = Forecast()
        self._start_s = max(pool.start_s for pool in pools)
        self._surges = Surges(self._start_s)
        self._machines: list[_Machine] = []
        self._starting: list[tuple[int, int, _Machine]] = []  # by the second at which each is ready
        self._rests_until: dict[tuple[str, str], float] = defaultdict(lambda: -1.0)
        self._speed = 0.0  # of what is ready
        self._usd: dict[str, float] = defaultdict(float)
        self._hours: dict[str, float] = defaultdict(float)
        self._queue = self._rework = self._hosted_tokens = 0.0
        self._launches = self._lost = 0
        self._batch: list[tuple[int, float]] = []  # a heap of (due, tokens left)
        self._batch_missed = 0
        self._changes = self._market_changes()

    def run(self, max_wait_s: float) -> Outcome:
        """Play the whole workload. ``max_wait_s``: beyond it a request is late."""
        seconds = self._workload.seconds
        tokens = self._workload.tokens.tolist()
        served = np.zeros(seconds)
        taken = np.zeros(seconds)  # of what arrived, by our own machines
        queued = np.zeros(seconds)
        jobs = sorted(self._workload.batch, key=lambda job: job.at_s)
        job_at = 0
        by_pool = {name: np.zeros(seconds // 60 + 1) for name in self._pools}
        tokens_until = np.cumsum(self._workload.tokens).tolist()
        for now in range(seconds):
            while job_at < len(jobs) and jobs[job_at].at_s <= now:
                heapq.heappush(self._batch, (jobs[job_at].due_s, jobs[job_at].tokens))
                job_at += 1
            if now in self._changes:
                self._lose(now)
            while self._starting and self._starting[0][0] <= now:
                self._speed += heapq.heappop(self._starting)[2].pool.tokens_per_s
            arrived = tokens[now]
            self._observe(tokens_until, now)
            if now % self._period_s == 0:
                self._act(now)
            if now % 60 == 0:
                for machine in self._machines:
                    if machine.ready_s <= now:
                        by_pool[machine.pool.name][now // 60] += machine.pool.tokens_per_s
            sent = self._overflow(arrived)
            fresh = min(sent, arrived)
            self._queue += arrived - sent
            taken[now], served[now] = arrived - fresh, sent - fresh
            again = min(self._rework, self._speed)
            self._rework -= again
            done = min(self._queue, self._speed - again)
            self._queue -= done
            served[now] += done
            queued[now] = self._queue
            self._serve_batch(self._speed - again - done, now)
        self._finish(seconds)
        waits = _waits(taken, served, self._workload.requests, seconds)
        return Outcome(
            usd=sum(self._usd.values()) + self._hosted_usd,
            usd_by_pool={**self._usd, **({"hosted": self._hosted_usd} if self._hosted else {})},
            machine_hours=dict(self._hours),
            hosted_tokens=self._hosted_tokens,
            requests=int(self._workload.requests.sum()),
            late=int(self._workload.requests[waits > max_wait_s].sum()),
            wait_s=_percentiles(waits, self._workload.requests),
            lost_machines=self._lost,
            launches=self._launches,
            batch_missed=self._batch_missed,
            arriving=_by_minute(self._workload.tokens),
            ready={name: series.tolist() for name, series in by_pool.items()},
            queued=_by_minute(queued),
        )

    @property
    def _hosted_usd(self) -> float:
        return 0.0 if self._hosted is None else self._hosted_tokens * self._hosted.usd_per_million_tokens / 1e6

    def _market_changes(self) -> set[int]:
        """Return the seconds at which fewer machines can be had somewhere than before."""
        changes: set[int] = set()
        for counts in self._market.values():
            changes.update((np.flatnonzero(np.diff(counts) < 0) + 1).tolist())
        return changes

    def _observe(self, tokens_until: Sequence[float], now: int) -> None:
        """Learn from what has come by now."""
        at_s = self._begun_s + now
        if now % self._period_s == self._period_s - 1:
            self._forecast.observe(at_s, _since(tokens_until, now, self._period_s), self._period_s)
        if now % MINUTE_S == MINUTE_S - 1:
            self._surges.observe(at_s, _since(tokens_until, now, MINUTE_S))
            self._surges.expect(at_s + self._start_s, self._forecast.at(at_s, self._start_s))

    def _lose(self, now: int) -> None:
        """Take away what a place no longer has, the newest first."""
        for place, counts in self._market.items():
            there = [one for one in self._machines if one.place == place]
            for machine in there[int(counts[now]) :]:
                self._end(machine, now)
                self._lost += 1
                self._rests_until[machine.pool.name, place] = now + machine.pool.rest_s
                if machine.ready_s <= now:
                    self._rework += REWORK_S * machine.pool.tokens_per_s

    def _end(self, machine: _Machine, now: int) -> None:
        self._machines.remove(machine)
        hours = (now - machine.launched_s) / 3600
        self._usd[machine.pool.name] += hours * machine.pool.usd_per_hour
        self._hours[machine.pool.name] += hours
        if machine.ready_s <= now:
            self._speed -= machine.pool.tokens_per_s
        else:
            self._starting = [entry for entry in self._starting if entry[2] is not machine]
            heapq.heapify(self._starting)

    def _launch(self, pool: SimulatedPool, place: str, now: int) -> None:
        if place in self._market:
            there = sum(one.place == place for one in self._machines)
            if there >= self._market[place][now]:
                self._rests_until[pool.name, place] = now + pool.rest_s
                return
        start_s = pool.start_s * float(np.exp(self._rng.normal(0.0, START_SPREAD)))
        machine = _Machine(pool, place, now, now + max(1, round(start_s)))
        self._launches += 1
        self._machines.append(machine)
        heapq.heappush(self._starting, (machine.ready_s, self._launches, machine))

    def _act(self, now: int) -> None:
        views = [self._view(pool, now) for pool in self._pools.values()]
        for plan in self._decide(views, self._demand(now), now):
            pool = self._pools[plan.pool]
            for place, count in plan.launches.items():
                for _ in range(count):
                    self._launch(pool, place, now)
            theirs = sorted(
                (one for one in self._machines if one.pool is pool), key=lambda one: (one.ready_s <= now, -one.ready_s)
            )
            for machine in theirs[: plan.ends]:
                self._end(machine, now)

    def _view(self, pool: SimulatedPool, now: int) -> PoolView:
        ready: dict[str, int] = defaultdict(int)
        starting: dict[str, int] = defaultdict(int)
        for machine in self._machines:
            if machine.pool is pool:
                (ready if machine.ready_s <= now else starting)[machine.place] += 1
        places = tuple(
            PlaceView(place, ready[place], starting[place], self._rests_until[pool.name, place] > now)
            for place in pool.places
        )
        return PoolView(
            pool.name, pool.tier, pool.usd_per_hour, pool.tokens_per_s, pool.start_s, pool.min_workers,
            pool.max_workers, places,
        )  # fmt: skip

    def _demand(self, now: int) -> Demand:
        at_s = self._begun_s + now
        batch = tuple(BatchWork(max(0.0, due - now), tokens) for due, tokens in sorted(self._batch))
        return Demand(
            queued_tokens=self._queue,
            tokens_per_s=self._forecast.latest_tokens_per_s,
            expected=lambda ahead_s: self._forecast.at(at_s, ahead_s),
            surge=self._surges.quantile,
            batch=batch,
            hosted_usd_per_token=None if self._hosted is None else self._hosted.usd_per_million_tokens / 1e6,
        )

    def _overflow(self, arrived: float) -> float:
        """Return how much of what arrives and waits goes to the hosted API, because it would wait for too long."""
        if self._hosted is None:
            return 0.0
        bound = self._hosted.after_s * self._speed
        sent = max(0.0, self._rework + self._queue + arrived - self._speed - bound)
        self._hosted_tokens += sent
        again = min(sent, self._rework)
        self._rework -= again
        return min(sent - again, self._queue + arrived)

    def _serve_batch(self, room: float, now: int) -> None:
        while self._batch and room > 0:
            due, left = self._batch[0]
            if left > room:
                heapq.heapreplace(self._batch, (due, left - room))
                return
            room -= left
            heapq.heappop(self._batch)
            self._batch_missed += now > due

    def _finish(self, seconds: int) -> None:
        for machine in list(self._machines):
            self._end(machine, seconds)
        self._batch_missed += len(self._batch)


def _since(until: Sequence[float], now: int, length_s: int) -> float:
    """Return the mean rate of the last ``length_s``, from what had come by the end of each second."""
    return (until[now] - (until[now - length_s] if now >= length_s else 0.0)) / length_s


def _waits(taken: np.ndarray, served: np.ndarray, requests: np.ndarray, seconds: int) -> np.ndarray:
    """Return how long what arrived in each second waited until it was served, in seconds; first come, first served."""
    arrived, done = np.cumsum(taken), np.cumsum(served)
    ends = np.searchsorted(done, arrived - 1e-6 * np.maximum(1.0, arrived))
    waits = np.minimum(ends, seconds) - np.arange(seconds)
    return np.where(requests > 0, np.maximum(0, waits), 0).astype(np.float64)


def _percentiles(waits: np.ndarray, requests: np.ndarray) -> dict[str, float]:
    order = np.argsort(waits)
    shares = np.cumsum(requests[order]) / max(1, requests.sum())
    return {
        name: float(waits[order][min(len(order) - 1, int(np.searchsorted(shares, share)))])
        for name, share in PERCENTILES.items()
    }


def _by_minute(series: np.ndarray) -> list[float]:
    whole = len(series) // 60 * 60
    return [float(value) for value in series[:whole].reshape(-1, 60).mean(axis=1)]
