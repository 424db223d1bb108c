"""Refused requests: how many, by group and over time, and the latest by name."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, and_, false, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import RefusalCountRow, RefusalGroupRow, RefusalRow
from ledger.queries.log import Cursor
from ledger.queries.window import NO_FILTERS, Filters, Window

Refusal = dict[str, Any]  # column → value, as in db.tables.RefusalRow
Grouping = Literal["code", "status", "endpoint", "key_id", "team_id", "model"]

_GROUP: Final = RefusalGroupRow.__table__.columns
_NAMED: Final = RefusalRow.__table__.columns
# A refused request has reached no pool, so that no other filter finds one.
_COLUMNS: Final[dict[str, Grouping]] = {"model": "model", "team": "team_id", "key": "key_id", "endpoint": "endpoint"}


async def refusal_totals(
    connection: AsyncConnection, window: Window, *, where: Filters = NO_FILTERS, by: Sequence[Grouping] = ()
) -> dict[tuple[Any, ...], int]:
    """Return how many requests were refused, by group, the largest first. Without ``by`` the group is ()."""
    columns = [_GROUP[name] for name in by]
    counted = func.sum(RefusalCountRow.refusals).label("refusals")
    statement = _counts(select(*columns, counted), window, where).group_by(*columns).order_by(counted.desc(), *columns)
    return {tuple(group): int(refusals) for *group, refusals in await connection.execute(statement) if refusals}


async def refusal_series(
    connection: AsyncConnection, steps: Sequence[Window], *, where: Filters = NO_FILTERS
) -> dict[str, list[int]]:
    """Return how many requests were refused with each code in each step; the steps follow each other without gaps."""
    bucket, refusals = RefusalCountRow.bucket_unix_ms, func.sum(RefusalCountRow.refusals)
    window = Window(steps[0].since_unix_ms, steps[-1].until_unix_ms)
    statement = _counts(select(bucket, _GROUP.code, refusals), window, where).group_by(bucket, _GROUP.code)
    starts = [step.since_unix_ms for step in steps]
    found: dict[str, list[int]] = defaultdict(lambda: [0] * len(steps))
    for at, code, number in await connection.execute(statement):
        found[code][bisect_right(starts, at) - 1] += int(number)
    return found


async def refusals_by_name(
    connection: AsyncConnection,
    window: Window,
    *,
    where: Filters = NO_FILTERS,
    code: str = "",
    after: Cursor | None = None,
    limit: int,
) -> list[Refusal]:
    """Return the newest ``limit`` refusals that are kept by name, older than ``after``. ``code``: "" for all."""
    at, name = _NAMED.received_unix_ms, _NAMED.request_id
    conditions = [at >= window.since_unix_ms, at < window.until_unix_ms, *_filtered(_NAMED, where)]
    if code:
        conditions.append(_NAMED.code == code)
    if after is not None:
        same = and_(at == after.received_unix_ms, name < after.request_id)
        conditions.append(or_(at < after.received_unix_ms, same))
    statement = select(RefusalRow.__table__).where(*conditions).order_by(at.desc(), name.desc()).limit(limit)
    return [dict(row) for row in (await connection.execute(statement)).mappings()]


async def find_refusal(connection: AsyncConnection, request_id: str) -> Refusal | None:
    """Return a refused request by its id; None: there is none, or it is not kept by name."""
    found = await connection.execute(select(RefusalRow.__table__).where(_NAMED.request_id == request_id))
    row = found.mappings().one_or_none()
    return None if row is None else dict(row)


def _counts(statement: Any, window: Window, where: Filters) -> Any:  # noqa: ANN401  # a Select of any columns
    bucket = RefusalCountRow.bucket_unix_ms
    return (
        statement.select_from(RefusalCountRow)
        .join(RefusalGroupRow, _GROUP.id == RefusalCountRow.group_id)
        .where(bucket >= window.since_unix_ms, bucket < window.until_unix_ms, *_filtered(_GROUP, where))
    )


def _filtered(columns: Any, where: Filters) -> list[ColumnElement[bool]]:  # noqa: ANN401  # of a table
    return [
        columns[_COLUMNS[dimension]].in_(list(values)) if dimension in _COLUMNS else false()
        for dimension, values in where.items()
    ]
