"""Percentiles and histograms, of histograms that merge by adding up: within 2 % of the exact value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.histogram import Measure
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
    raise NotImplementedError


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
    raise NotImplementedError


async def length_histograms(
    connection: AsyncConnection,
    window: Window,
    measure: Measure,
    *,
    where: Filters = NO_FILTERS,
    by: Sequence[Dimension] = (),
) -> list[LengthHistogram]:
    """Counts between powers of two (0-1, 1-2, 2-4, …), all groups with the same edges. The greatest group first."""
    raise NotImplementedError
