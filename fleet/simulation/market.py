"""Spot machines: how many can be had at each place, tick by tick, from published traces."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


def read_spot(path: Path) -> tuple[int, Mapping[str, Counts]]:
    """Read a trace of runs: the seconds of a tick, and how many machines there were at each tick, by zone."""
    data: dict[str, Any] = json.loads(path.read_text())
    zones = {zone: np.concatenate([np.full(ticks, machines) for machines, ticks in runs])
             for zone, runs in data["zones"].items()}  # fmt: skip
    return int(data["gap_seconds"]), zones


def by_second(
    spot: tuple[int, Mapping[str, Counts]], seconds: int, *, machines: int, first_tick: int = 0
) -> Mapping[str, Counts]:
    """Return how many can be had at each second, beginning anywhere in the trace and repeating it.

    ``machines``: what the greatest number of the trace stands for, so that a trace of one machine serves a fleet:
    losses stay as correlated as they were.
    """
    gap_s, zones = spot
    most = max(int(counts.max()) for counts in zones.values()) or 1
    ticks = (np.arange(seconds) // gap_s) + first_tick
    return {zone: np.round(counts[ticks % len(counts)] * machines / most).astype(np.int64)
            for zone, counts in zones.items()}  # fmt: skip
