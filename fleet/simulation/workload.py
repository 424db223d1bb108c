"""Traffic: requests by second, from a trace stretched to days or made up, and batch jobs with deadlines."""

import csv
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

DAY_S: Final = 86_400
HOUR_S: Final = 3600
Floats = NDArray[np.float64]

# Arrivals by hour of a working day, UTC, as a share of the busiest: business hours with two peaks, quiet nights.
BUSINESS_DAY: Final = (
    0.18, 0.14, 0.12, 0.11, 0.12, 0.16, 0.27, 0.45, 0.70, 0.90, 1.00, 0.97,
    0.86, 0.92, 0.99, 0.96, 0.88, 0.74, 0.58, 0.47, 0.40, 0.34, 0.28, 0.22,
)  # fmt: skip
WEEKEND_SHARE: Final = 0.45


class BatchJob(Struct, frozen=True):
    """Prompts handed in together."""

    at_s: int
    due_s: int
    tokens: float


class Workload(Struct, frozen=True):
    """What arrives in each second. The first second is a Monday's, at midnight UTC."""

    tokens: Floats  # of interactive requests, by second
    requests: NDArray[np.int64]  # interactive ones, by second
    batch: Sequence[BatchJob]

    @property
    def seconds(self) -> int:
        """Length of the workload."""
        return len(self.tokens)


def read_trace(path: Path) -> tuple[Floats, Floats]:
    """Read arrival times (s, from 0) and tokens (prompt and output) of each request, as Azure publishes them."""
    times, tokens = [], []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            times.append(datetime.fromisoformat(row["TIMESTAMP"].strip()).timestamp())
            tokens.append(int(row["ContextTokens"]) + int(row["GeneratedTokens"]))
    if not times:
        raise ValueError(f"{path}: no requests")
    begun = np.asarray(times) - min(times)
    return begun, np.asarray(tokens, dtype=np.float64)


def stretched(trace: tuple[Floats, Floats], days: int, scale: float, rng: np.random.Generator) -> Workload:
    """Return a trace's traffic as of the peak hour of days of business.

    Each hour repeats the trace from a random place on, as often as an hour needs, with every request kept with the
    probability that the moment of the day has. So bursts within an hour are the trace's own. ``scale`` copies of it run
    beside each other, and no two days are quite alike: the level of each wanders by some percent.
    """
    times, sizes = trace
    length_s = max(float(times[-1]), 1.0)
    tokens, requests = np.zeros(days * DAY_S), np.zeros(days * DAY_S, dtype=np.int64)
    shares = day_shares(days) * _wander(days, rng)
    rounds = math.ceil(HOUR_S / length_s)
    repeated = np.tile(sizes, rounds)
    for hour in range(days * 24):
        for part in _parts(scale):
            shifted = (times + rng.uniform(0.0, length_s)) % length_s
            shifted = np.concatenate([shifted + length_s * number for number in range(rounds)])
            within = shifted < HOUR_S
            seconds = (hour * HOUR_S + shifted[within]).astype(np.int64)
            chosen = rng.random(len(seconds)) < shares[seconds] * part
            np.add.at(tokens, seconds[chosen], repeated[within][chosen])
            np.add.at(requests, seconds[chosen], 1)
    return Workload(tokens, requests, ())


def bursty(days: int, per_s: float, rng: np.random.Generator) -> Workload:
    """Return made-up traffic: business days, on which the rate doubles or triples for some minutes at random moments.

    Sizes are log-normal around 1,300 tokens; bursts come some six times a day, rise within two minutes and last five to
    forty.
    """
    seconds = days * DAY_S
    rates = day_shares(days) * _wander(days, rng) * per_s
    at_s = rng.exponential(DAY_S / 6)
    while at_s < seconds:
        begin, length_s = int(at_s), int(rng.uniform(300, 2400))
        shape = np.minimum(1.0, np.arange(min(length_s, seconds - begin)) / 120)
        rates[begin : begin + len(shape)] *= 1 + rng.uniform(1.0, 2.0) * shape
        at_s += length_s + rng.exponential(DAY_S / 6)
    counts = rng.poisson(rates)
    sizes = rng.lognormal(math.log(1300) - 0.32, 0.8, int(counts.sum()))
    tokens = np.zeros(seconds)
    np.add.at(tokens, np.repeat(np.arange(seconds), counts), sizes)
    return Workload(tokens, counts.astype(np.int64), ())


def with_batch(workload: Workload, share: float, rng: np.random.Generator, *, due_s: int = DAY_S) -> Workload:
    """Add batch jobs that are together ``share`` of all tokens, one an hour or so, each due a day later.

    Those whose deadline lies after the end are left out, so that all can be judged.
    """
    if share <= 0:
        return workload
    last_s = workload.seconds - due_s
    if last_s <= 0:
        raise ValueError(f"batch jobs due after {due_s / HOUR_S:g} h need a longer simulation")
    moments = np.sort(rng.uniform(0, last_s, max(1, round(last_s / HOUR_S))))
    total = workload.tokens.sum() * share / (1 - share)
    parts = rng.dirichlet(np.full(len(moments), 2.0)) * total
    jobs = [BatchJob(int(at_s), int(at_s) + due_s, float(part)) for at_s, part in zip(moments, parts, strict=True)]
    return Workload(workload.tokens, workload.requests, jobs)


def day_shares(days: int) -> Floats:
    """Return the rate of each second of so many days, from a Monday on, as a share of the busiest hour's."""
    hours = np.asarray(
        [BUSINESS_DAY[hour % 24] * (WEEKEND_SHARE if hour // 24 % 7 >= 5 else 1.0) for hour in range(days * 24)]
    )
    shares: Floats = np.interp(np.arange(days * DAY_S), (np.arange(days * 24) + 0.5) * HOUR_S, hours)
    return shares


def _wander(days: int, rng: np.random.Generator) -> Floats:
    """Return factors around 1 that change slowly: what no look at earlier days foretells."""
    steps = days * 24
    walk = np.zeros(steps)
    for step in range(1, steps):
        walk[step] = 0.9 * walk[step - 1] + rng.normal(0.0, 0.04)
    factors: Floats = np.exp(np.interp(np.arange(days * DAY_S), (np.arange(steps) + 0.5) * HOUR_S, walk))
    return factors


def _parts(scale: float) -> list[float]:
    return [1.0] * int(scale) + ([scale % 1] if scale % 1 else [])
