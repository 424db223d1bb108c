"""What was set aside: one page of items, and how many there are of each kind."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import SetAsideRow

Item = dict[str, Any]  # column → value, as in db.tables.SetAsideRow


async def set_aside_counts(connection: AsyncConnection, since_unix_ms: int, until_unix_ms: int) -> Mapping[str, int]:
    """Return how many items of each kind were set aside in [since, until)."""
    at = SetAsideRow.at_unix_ms
    counted = select(SetAsideRow.kind, func.count().label("number")).where(at >= since_unix_ms, at < until_unix_ms)
    found = await connection.execute(counted.group_by(SetAsideRow.kind))
    return {row.kind: row.number for row in found}


async def set_aside_items(
    connection: AsyncConnection,
    since_unix_ms: int,
    until_unix_ms: int,
    *,
    after: tuple[int, str] | None = None,
    limit: int,
) -> list[Item]:
    """Return the newest ``limit`` items set aside in [since, until), after the time and name of another one."""
    at, item = SetAsideRow.at_unix_ms, SetAsideRow.item
    conditions = [at >= since_unix_ms, at < until_unix_ms]
    if after is not None:
        conditions.append(or_(at < after[0], (at == after[0]) & (item < after[1])))
    statement = select(SetAsideRow.__table__).where(*conditions).order_by(at.desc(), item.desc()).limit(limit)
    return [dict(row) for row in (await connection.execute(statement)).mappings()]
