"""Requests, tokens and dollars by tag: the rollups of tags, read as those of all requests are."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import TagRollupRow, TagSliceRow
from ledger.queries.reading import Group, rollup_coverage
from ledger.queries.traffic import Traffic
from ledger.queries.window import NO_FILTERS, Dimension, Filters, Window
from ledger.tags import SUMS

TAG_DIMENSIONS: Final[Mapping[Dimension, ColumnElement[str]]] = {
    "team": TagSliceRow.team_id.expression,
    "key": TagSliceRow.key_id.expression,
}
_TAG: Final = (TagSliceRow.name.expression, TagSliceRow.value.expression)


async def tag_totals(
    connection: AsyncConnection,
    steps: Sequence[Window],
    *,
    where: Filters = NO_FILTERS,
    by: Sequence[Dimension] = (),
) -> dict[Group, dict[int, Traffic]]:
    """Return (*by, name, value) → step number → sums, without empty ones; steps are consecutive, without gaps.

    A request counts once for each of its tags. ``where`` and ``by`` know TAG_DIMENSIONS.
    """
    groups = [*(TAG_DIMENSIONS[name] for name in by), *_TAG]
    conditions = [TAG_DIMENSIONS[name].in_(list(allowed)) for name, allowed in where.items() if allowed]
    bucket = TagRollupRow.bucket_unix_ms.expression
    cover = rollup_coverage(steps, may_subtract=True)
    added: dict[Group, dict[int, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0] * len(SUMS)))
    for width_s, _, rows in cover.conditions(TagRollupRow):
        statement = (
            select(bucket, *groups, *(func.sum(getattr(TagRollupRow, name)) for name in SUMS))
            .join(TagSliceRow, TagSliceRow.id == TagRollupRow.slice_id)
            .where(rows, *conditions)
            .group_by(bucket, *groups)
        )
        for start, *row in await connection.execute(statement):
            group, sums = tuple(row[: len(groups)]), row[len(groups) :]
            for number, sign in cover.steps_of(width_s, start):
                into = added[group][number]
                into[:] = [so_far + sign * int(more) for so_far, more in zip(into, sums, strict=True)]
    return {
        group: {
            number: Traffic(group, **dict(zip(SUMS, sums, strict=True))) for number, sums in numbers.items() if sums[0]
        }
        for group, numbers in added.items()
    }
