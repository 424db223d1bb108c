"""Reading rollups: the rows that cover a time span, with their step and group.

A step is covered by as few rows as possible: whole UTC days, else hours, quarters of an hour, minutes. Where a step
begins or ends within a UTC day, the sums of its larger part are the day's minus those of the smaller part: days in
UTC+5:30, which begin at 18:30, are read from UTC's days and their hours after 18:30.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import HistogramRow, RollupRow, SliceRow, TagRollupRow
from ledger.queries.window import DAY_MS, HOUR_MS, Dimension, Filters, Window
from ledger.rollups import WIDTHS_S

# A day has about as many rows as this many of its hours: a slice has some traffic in each day, not in each hour.
DAY_COST_MS: Final = 4 * HOUR_MS
RANGES_PER_STATEMENT: Final = 200  # of one statement; each may name some dozen buckets, all of them at most 32,767

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


def dimension_column(dimension: Dimension) -> ColumnElement[str]:
    """Return the column of ``slices`` for a dimension."""
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
) -> AsyncIterator[tuple[int, int, Group, Sequence[Any]]]:
    """Yield step number, sign, group and values of all rows in the steps, which must be consecutive without gaps.

    The values are aggregates: SQL combines rows of one bucket and group. Values with the sign -1 are to be subtracted;
    histograms have none. Without ``sliced`` the values use no column of ``slices``, which is then joined only if
    filters or groups need it.
    """
    groups, conditions = [dimension_column(dimension) for dimension in by], filtered(where)
    bucket = table.bucket_unix_ms.expression
    head = [bucket, *groups] if len(steps) > 1 else groups
    cover = rollup_coverage(steps, may_subtract=table is RollupRow)
    for width_s, first_unix_ms, rows in cover.conditions(table):
        statement: Select[Any] = select(*head, *values).select_from(table).where(rows)
        if sliced or groups or conditions:
            statement = statement.join(SliceRow, SliceRow.id == table.slice_id).where(*conditions)
        if head:
            statement = statement.group_by(*head)
        first_group, first_value = len(head) - len(groups), len(head)
        counted: dict[int, list[tuple[int, int]]] = {}  # of each bucket
        for row in map(tuple, (await connection.execute(statement)).all()):
            start = row[0] if len(steps) > 1 else first_unix_ms
            if start not in counted:
                counted[start] = list(cover.steps_of(width_s, start))
            group, found = row[first_group:first_value], row[first_value:]
            for number, sign in counted[start]:
                yield number, sign, group, found


@dataclass(frozen=True, slots=True)
class RollupCoverage:
    """The rows that cover some steps, and the steps in which each of them counts."""

    cuts: Sequence[int]  # the begin of each step, and the end of the last
    ranges: Mapping[tuple[int, bool], Sequence[Range]]  # by width_s, and whether they lie within the steps
    days: Mapping[int, int]  # UTC days whose own rows are read → the step in which these count

    def conditions(
        self, table: type[RollupRow | HistogramRow | TagRollupRow]
    ) -> Iterator[tuple[int, int, ColumnElement[bool]]]:
        """Yield, for each statement, the rows' width_s, the begin of the first bucket, and the condition.

        Narrow rows come first: rows that a writer adds meanwhile never make a day smaller than its parts.
        """
        for (width_s, _), ranges in sorted(self.ranges.items()):
            for first in range(0, len(ranges), RANGES_PER_STATEMENT):
                some = ranges[first : first + RANGES_PER_STATEMENT]
                within = _within(table.bucket_unix_ms.expression, some, width_s * 1000)
                yield width_s, some[0][0], and_(table.width_s == width_s, within)

    def steps_of(self, width_s: int, bucket_unix_ms: int) -> Iterator[tuple[int, int]]:
        """Yield the steps in which a bucket's rows count, with their sign."""
        of_day = self.days.get(bucket_unix_ms // DAY_MS * DAY_MS)
        if of_day is not None:
            yield of_day, 1 if width_s == WIDTHS_S[-1] else -1
        number = bisect_right(self.cuts, bucket_unix_ms) - 1
        if width_s != WIDTHS_S[-1] and 0 <= number < len(self.cuts) - 1:
            yield number, 1


def rollup_coverage(steps: Sequence[Window], *, may_subtract: bool) -> RollupCoverage:
    """Return the fewest rows that cover the steps.

    ``may_subtract``: of a day in several parts, the largest may be the day minus the others.
    """
    cuts = [step.since_unix_ms for step in steps]
    cuts += [step.until_unix_ms for step in steps[-1:]]
    ranges: dict[tuple[int, bool], list[Range]] = defaultdict(list)
    days: dict[int, int] = {}
    for day in range(cuts[0] // DAY_MS * DAY_MS, cuts[-1], DAY_MS) if cuts else ():
        first, last = bisect_right(cuts, day), bisect_left(cuts, day + DAY_MS)
        parts = list(enumerate(pairwise((day, *cuts[first:last], day + DAY_MS)), first - 1))
        inside = [part for part in parts if 0 <= part[0] < len(steps)]
        main = max(inside, key=_length_ms)
        rest_ms = DAY_MS - _length_ms(main)
        if not rest_ms or (may_subtract and DAY_COST_MS + rest_ms < sum(map(_length_ms, inside))):
            days[day] = main[0]
            _append(ranges[WIDTHS_S[-1], True], day, day + DAY_MS)
            parts.remove(main)
        else:
            parts = inside
        for number, (since, until) in parts:
            for width_s, *piece in sorted(_pieces(since, until, WIDTHS_S[:-1]), key=lambda found: found[1]):
                _append(ranges[width_s, 0 <= number < len(steps)], *piece)
    return RollupCoverage(cuts, ranges, days)


def _length_ms(part: tuple[int, Range]) -> int:
    _, (since, until) = part
    return until - since


def _append(ranges: list[Range], since: int, until: int) -> None:
    """Append a range, joined with the last one if they are adjacent."""
    if ranges and ranges[-1][1] == since:
        since, _ = ranges.pop()
    ranges.append((since, until))


def filtered(where: Filters) -> list[ColumnElement[bool]]:
    """Build the conditions on ``slices``."""
    return [dimension_column(dimension).in_(list(allowed)) for dimension, allowed in where.items() if allowed]


def _within(bucket: ColumnElement[int], ranges: Sequence[Range], width_ms: int) -> ColumnElement[bool]:
    """Build the condition for the ranges' buckets: first to last without the gaps, or, if they are fewer, by name.

    A condition for each range would be evaluated for every row.
    """
    gaps = [start for (_, end), (until, _) in pairwise(ranges) for start in range(end, until, width_ms)]
    inside = [start for since, until in ranges for start in range(since, until, width_ms)] if gaps else []
    if gaps and len(inside) < len(gaps):
        return bucket.in_(inside)
    between = and_(bucket >= ranges[0][0], bucket < ranges[-1][1])
    return and_(between, bucket.not_in(gaps)) if gaps else between


def _pieces(since: int, until: int, widths_s: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Split a span: the middle in the largest width that fits, the rest on both sides in the next ones."""
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
