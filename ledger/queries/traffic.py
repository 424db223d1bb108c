"""Requests, tokens and dollars: in total, by one or two dimensions, over time, by hour of the week."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import attrgetter
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, case, func, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import RollupRow, SliceRow
from ledger.queries.reading import Group, dimension_column, filtered, read, rollup_coverage
from ledger.queries.window import DIMENSIONS, NO_FILTERS, Dimension, Filters, Step, Window

OTHER: Final = "(other)"  # the group of all beyond the top N; no model, pool, team or key has this name

Figure = Literal["requests", "failed", "failovers", "prompt_tokens", "completion_tokens", "tokens", "charge_nano_usd"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sums over one group of requests."""

    group: tuple[str, ...]  # its values of the grouping dimensions, in their order; OTHER beyond the top N
    requests: int = 0
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    attempts: int = 0
    failovers: int = 0
    retried: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    charge_nano_usd: int = 0
    total_ms: int = 0
    unpriced_tokens: int = 0  # of requests without a price: charge_nano_usd does not have them

    @property
    def tokens(self) -> int:
        """Number of prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


_NAMES: Final = tuple(name for name in Traffic.__dataclass_fields__ if name != "group")
_values_of: Final = attrgetter(*_NAMES)
_OUTCOMES: Final = ("ok", "failed", "cancelled")


def merge(parts: Iterable[Traffic]) -> Traffic:
    """Merge all groups into one without a name."""
    values = zip(*(_values_of(part) for part in parts), strict=True)
    return Traffic((), *map(sum, values))


@dataclass(frozen=True, slots=True)
class Series:
    """One group over time: a Traffic for each step of the window, also where nothing happened."""

    group: tuple[str, ...]
    points: tuple[Traffic, ...]


async def totals(
    connection: AsyncConnection,
    window: Window,
    *,
    where: Filters = NO_FILTERS,
    by: Sequence[Dimension] = (),
    order: Figure = "requests",
    top: int | None = None,
) -> list[Traffic]:
    """Return sums by any dimensions, the greatest first; groups beyond ``top`` are merged into OTHER, the last.

    Without ``by`` there is exactly one group.
    """
    found = await totals_by_step(connection, [window], where=where, by=by)
    return [points[0] for points in _ranked(found, 1, by, order, top)]


async def series(
    connection: AsyncConnection,
    window: Window,
    step: Step,
    *,
    where: Filters = NO_FILTERS,
    by: Sequence[Dimension] = (),
    order: Figure = "requests",
    top: int | None = None,
    names: Sequence[str] = _NAMES,
) -> list[Series]:
    """Return sums over time; ``window.steps(step)`` are the points' times. Raises TooManySteps.

    Only the fields in ``names``, and the requests, are read; the others are 0.
    """
    steps = window.steps(step)
    found = await totals_by_step(connection, steps, where=where, by=by, names=names)
    ranked = _ranked(found, len(steps), by, order, top) if steps else []
    return [Series(points[0].group, tuple(points)) for points in ranked]


async def heat_map(
    connection: AsyncConnection, window: Window, *, where: Filters = NO_FILTERS, figure: Figure = "requests"
) -> list[list[int]]:
    """Return a figure by weekday (Monday first) and hour of the viewer's day: 7 rows of 24."""
    cells = [[0] * 24 for _ in range(7)]
    steps = window.steps("hour")
    is_failed = case((SliceRow.outcome == "failed", RollupRow.requests), else_=0)
    asked = {"failed": is_failed, "tokens": RollupRow.prompt_tokens + RollupRow.completion_tokens}
    value = func.sum(asked[figure] if figure in asked else getattr(RollupRow, figure))
    async for number, sign, _, (found,) in read(
        connection, RollupRow, [value], steps, where=where, by=(), sliced=figure == "failed"
    ):
        local = datetime.fromtimestamp(steps[number].since_unix_ms / 1000, window.zone)
        cells[local.weekday()][local.hour] += sign * int(found or 0)
    return cells


async def choices(
    connection: AsyncConnection, window: Window, *, where: Filters = NO_FILTERS
) -> dict[Dimension, list[str]]:
    """Return the values of each dimension in the window, in alphabetical order, for the filters to offer.

    ``where``: what the viewer may see at all.
    """
    cover = rollup_coverage([window], may_subtract=False)
    within = [select(RollupRow.slice_id).where(rows) for _, _, rows in cover.conditions(RollupRow)]
    slices = select(*(dimension_column(dimension) for dimension in DIMENSIONS)).where(
        SliceRow.id.in_(union_all(*within)), *filtered(where)
    )
    found = zip(*await connection.execute(slices), strict=True) if within else ()
    columns = [set(values) for values in found] or [set()] * len(DIMENSIONS)
    return {dimension: sorted(values - {""}) for dimension, values in zip(DIMENSIONS, columns, strict=True)}


async def totals_by_step(
    connection: AsyncConnection,
    steps: Sequence[Window],
    *,
    where: Filters = NO_FILTERS,
    by: Sequence[Dimension] = (),
    names: Sequence[str] = _NAMES,
) -> dict[Group, dict[int, Traffic]]:
    """Return group → step number → sums, without empty ones; steps are consecutive, without gaps."""
    asked = ["requests", *(name for name in names if name != "requests")]
    is_sliced = any(name in _OUTCOMES for name in asked)
    values = [_sum(name) for name in asked]
    added: dict[tuple[Group, int], list[int]] = {}
    async for number, sign, group, sums in read(
        connection, RollupRow, values, steps, where=where, by=by, sliced=is_sliced
    ):
        if sums[0]:
            so_far = added.get((group, number), (0,) * len(asked))
            more = map(int, sums)  # PostgreSQL sums bigints into decimals
            added[group, number] = [so + sign * one for so, one in zip(so_far, more, strict=True)]
    found: dict[Group, dict[int, Traffic]] = defaultdict(dict)
    for (group, number), totalled in added.items():
        if totalled[0]:
            found[group][number] = Traffic(group, **dict(zip(asked, totalled, strict=True)))
    return found


def _sum(name: str) -> ColumnElement[Any]:
    if name in _OUTCOMES:
        return func.sum(case((SliceRow.outcome == name, RollupRow.requests), else_=0))
    return func.sum(getattr(RollupRow, name))


def _ranked(
    found: Mapping[Group, Mapping[int, Traffic]], steps: int, by: Sequence[Dimension], order: Figure, top: int | None
) -> list[list[Traffic]]:
    """Return each group's points, the greatest group first, those beyond ``top`` merged at the end."""

    def size(group: Group) -> tuple[int, Group]:
        return -sum(getattr(traffic, order) for traffic in found[group].values()), group

    groups = sorted(found, key=size) if by else [()]
    kept = groups if top is None else groups[:top]
    lines = [[found.get(group, {}).get(number, Traffic(group)) for number in range(steps)] for group in kept]
    if len(groups) > len(kept):
        others = [found[group] for group in groups[len(kept) :]]
        rest = [
            replace(merge(points[number] for points in others if number in points), group=(OTHER,) * len(by))
            for number in range(steps)
        ]
        lines.append(rest)
    return lines
