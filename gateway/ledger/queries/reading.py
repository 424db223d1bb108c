"""Reading rollups: which rows cover a stretch of time, and whose step and group they are.

A step is covered by as few rows as there can be: whole UTC days, else hours, else quarters of an hour. Which widths
those are depends on the viewer's zone only at the edges, so a month of days in UTC+5:30 is read from hours.
"""

from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db.models import HistogramRow, RollupRow, SliceRow
from gateway.ledger.queries.window import Dimension, Filters, Window
from gateway.ledger.rollups import WIDTHS_S

RANGES_AT_ONCE: Final = 200  # of one statement; each may name some dozen buckets, all of them at most 32,767

Group = tuple[str, ...]
Range = tuple[int, int]  # since, until
_COLUMNS: Final[dict[Dimension, ColumnElement[str]]] = {
    "model": SliceRow.model.expression,
    "pool": SliceRow.pool.expression,
    "provider": SliceRow.provider.expression,
    "region": SliceRow.region.expression,
    "tier": SliceRow.tier.expression,
    "team": SliceRow.team_id.expression,
    "key": SliceRow.key_id.expression,
    "endpoint": SliceRow.endpoint.expression,
    "outcome": SliceRow.outcome.expression,
}


def column_of(dimension: Dimension) -> ColumnElement[str]:
    """The column of ``slices`` that a dimension is."""
    return _COLUMNS[dimension]


async def read(
    connection: AsyncConnection,
    table: type[RollupRow | HistogramRow],
    values: Sequence[ColumnElement[Any]],
    steps: Sequence[Window],
    *,
    where: Filters,
    by: Sequence[Dimension],
    sliced: bool = False,
) -> AsyncIterator[tuple[int, Group, Sequence[Any]]]:
    """Step number, group and values of all rows in the steps, which follow on one another without gaps.

    The values are aggregates: SQL puts rows of one bucket and group together. Without ``sliced`` they ask nothing of
    ``slices``, which is then left aside unless filters or groups need it.
    """
    starts = [step.since_unix_ms for step in steps]
    groups, conditions = [column_of(dimension) for dimension in by], filtered(where)
    bucket = table.bucket_unix_ms.expression
    head = [bucket, *groups] if len(steps) > 1 else groups
    for width_s, ranges in _cover(steps):
        for first in range(0, len(ranges), RANGES_AT_ONCE):
            within = _within(bucket, ranges[first : first + RANGES_AT_ONCE], width_s * 1000)
            statement: Select[Any] = select(*head, *values).select_from(table).where(table.width_s == width_s, within)
            if sliced or groups or conditions:
                statement = statement.join(SliceRow, SliceRow.id == table.slice_id).where(*conditions)
            if head:
                statement = statement.group_by(*head)
            for row in await connection.execute(statement):
                number = bisect_right(starts, row[0]) - 1 if len(steps) > 1 else 0
                yield number, tuple(row[len(head) - len(groups) : len(head)]), row[len(head) :]


def filtered(where: Filters) -> list[ColumnElement[bool]]:
    """Conditions on ``slices``."""
    return [column_of(dimension).in_(list(allowed)) for dimension, allowed in where.items() if allowed]


def _within(bucket: ColumnElement[int], ranges: Sequence[Range], width_ms: int) -> ColumnElement[bool]:
    """The buckets of the ranges: those between the first and the last but the gaps, or, if they are fewer, by name.

    A condition for each range would be looked at for every row.
    """
    gaps = [start for (_, end), (until, _) in pairwise(ranges) for start in range(end, until, width_ms)]
    inside = [start for since, until in ranges for start in range(since, until, width_ms)] if gaps else []
    if gaps and len(inside) < len(gaps):
        return bucket.in_(inside)
    between = and_(bucket >= ranges[0][0], bucket < ranges[-1][1])
    return and_(between, bucket.not_in(gaps)) if gaps else between


def _cover(steps: Sequence[Window]) -> Iterator[tuple[int, list[Range]]]:
    """For each width, the stretches of time that are read from its rows; neighbouring ones as one."""
    by_width: dict[int, list[Range]] = {width_s: [] for width_s in WIDTHS_S}
    for step in steps:
        for width_s, since, until in sorted(
            _pieces(step.since_unix_ms, step.until_unix_ms), key=lambda piece: piece[1]
        ):
            ranges = by_width[width_s]
            if ranges and ranges[-1][1] == since:
                ranges[-1] = (ranges[-1][0], until)
            else:
                ranges.append((since, until))
    for width_s, ranges in by_width.items():
        if ranges:
            yield width_s, ranges


def _pieces(since: int, until: int, widths_s: Sequence[int] = WIDTHS_S) -> Iterator[tuple[int, int, int]]:
    """The middle in the greatest width that fits, what is left on both sides in the next ones."""
    *narrower, width_s = widths_s
    width_ms = width_s * 1000
    first, last = -(-since // width_ms) * width_ms, until // width_ms * width_ms
    if first >= last:
        first = last = until if narrower else since
    else:
        yield width_s, first, last
    for left, right in ((since, first), (last, until)):
        if narrower and left < right:
            yield from _pieces(left, right, narrower)
