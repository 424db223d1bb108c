"""Percentiles and histograms, of histograms that merge by adding up: within 2 % of the exact value."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db.models import HistogramRow
from gateway.ledger import histogram
from gateway.ledger.histogram import Counts, Measure
from gateway.ledger.queries.reading import Group, read
from gateway.ledger.queries.window import NO_FILTERS, Dimension, Filters, Step, Window

PERCENTS: Final = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one group. Show them together with n, and not below 20."""

    group: tuple[str, ...]
    n: int
    values: tuple[float | None, ...]  # one for each percent asked for; None: n is 0


@dataclass(frozen=True, slots=True)
class PercentileSeries:
    """One group over time, a Percentiles for each step of the window."""

    group: tuple[str, ...]
    points: tuple[Percentiles, ...]


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """How many requests of one group have a measure in each span between two edges."""

    group: tuple[str, ...]
    edges: tuple[float, ...]  # one more than counts; count i is of values in (edges[i], edges[i + 1]]
    counts: tuple[int, ...]


async def percentiles(
    connection: AsyncConnection,
    window: Window,
    measure: Measure,
    *,
    where: Filters = NO_FILTERS,
    by: Sequence[Dimension] = (),
    percents: Sequence[float] = PERCENTS,
) -> list[Percentiles]:
    """Percentiles by nearest rank, by up to two dimensions, the greatest n first. Without ``by`` exactly one."""
    found = await _read(connection, [window], measure, where, by)
    return [_percentiles(group, steps.get(0, {}), percents) for group, steps in _largest_first(found, by)]


async def percentile_series(
    connection: AsyncConnection,
    window: Window,
    step: Step,
    measure: Measure,
    *,
    where: Filters = NO_FILTERS,
    by: Sequence[Dimension] = (),
    percents: Sequence[float] = PERCENTS,
) -> list[PercentileSeries]:
    """The same over time; ``window.steps(step)`` are the points' times. Raises TooManySteps."""
    steps = window.steps(step)
    found = await _read(connection, steps, measure, where, by)
    return [
        PercentileSeries(group, tuple(_percentiles(group, by_step.get(n, {}), percents) for n in range(len(steps))))
        for group, by_step in _largest_first(found, by)
    ]


async def length_histograms(
    connection: AsyncConnection,
    window: Window,
    measure: Measure,
    *,
    where: Filters = NO_FILTERS,
    by: Sequence[Dimension] = (),
) -> list[LengthHistogram]:
    """Counts between powers of two (0-1, 1-2, 2-4, …), all groups with the same edges. The greatest group first."""
    found = await _read(connection, [window], measure, where, by)
    folded = {group: _by_powers(steps.get(0, {})) for group, steps in _largest_first(found, by)}
    powers = max((max(counts, default=0) for counts in folded.values()), default=0)
    edges = (0.0, *(2.0**power for power in range(powers + 1)))
    return [
        LengthHistogram(group, edges, tuple(counts.get(power, 0) for power in range(powers + 1)))
        for group, counts in folded.items()
    ]


async def _read(
    connection: AsyncConnection, steps: Sequence[Window], measure: Measure, where: Filters, by: Sequence[Dimension]
) -> dict[Group, dict[int, Counts]]:
    """Group → step number → merged histogram; only what there is."""
    found: dict[Group, dict[int, Counts]] = defaultdict(lambda: defaultdict(dict))
    column = HistogramRow.__table__.columns[measure]
    async for number, group, (stored,) in read(
        connection, HistogramRow, [column], steps, where=where, by=by, summed=False
    ):
        histogram.add(found[group][number], histogram.decode(stored))
    return found


def _largest_first(
    found: dict[Group, dict[int, Counts]], by: Sequence[Dimension]
) -> list[tuple[Group, dict[int, Counts]]]:
    if not by:
        return [((), found.get((), {}))]
    sizes = {group: sum(sum(counts.values()) for counts in steps.values()) for group, steps in found.items()}
    return sorted(((g, found[g]) for g, n in sizes.items() if n), key=lambda entry: (-sizes[entry[0]], entry[0]))


def _percentiles(group: Group, counts: Counts, percents: Sequence[float]) -> Percentiles:
    values = tuple(histogram.percentile(counts, percent) for percent in percents)
    return Percentiles(group, sum(counts.values()), values)


def _by_powers(counts: Counts) -> dict[int, int]:
    """Power k → how many are in (2^(k-1), 2^k]; 0 → up to 1."""
    folded: dict[int, int] = defaultdict(int)
    for number, count in counts.items():
        value = histogram.value_of(number)
        folded[max(0, math.ceil(math.log2(value) - 1e-9)) if value > 0 else 0] += count
    return folded
