"""Batches: those that run, those that are over page by page, and one of them. Reads their own rows, by indexes."""

from collections.abc import Iterable
from typing import Any, Final

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import BatchRow, FileRow
from ledger.queries.window import NO_FILTERS, Dimension, Filters

BatchLine = dict[str, Any]  # column → value, as in db.tables.BatchRow
Mark = tuple[int, str]  # where a page ended: created_unix_ms, id

ENDPOINTS: Final = {  # of lines, by the ledger's name of their requests' endpoint
    "chat.completions": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
FILTERED: Final[tuple[Dimension, ...]] = ("team", "key", "endpoint")  # what batches can be filtered by

_COLUMNS: Final = BatchRow.__table__.columns
_created: Final = BatchRow.created_unix_ms


async def open_batches(connection: AsyncConnection, where: Filters, limit: int) -> list[BatchLine]:
    """Return the batches that are not over, soonest due first."""
    wanted = select(*_COLUMNS).where(BatchRow.over_unix_ms.is_(None), *_conditions(where))
    return await _read(connection, wanted.order_by(BatchRow.expires_unix_ms, BatchRow.id).limit(limit))


async def ended_batches(
    connection: AsyncConnection,
    since_unix_ms: int,
    until_unix_ms: int,
    *,
    where: Filters,
    after: Mark | None,
    limit: int,
) -> tuple[list[BatchLine], Mark | None]:
    """Return batches that were created in [since, until) and are over, newest first, and where the next page begins."""
    conditions = [_created >= since_unix_ms, _created < until_unix_ms, BatchRow.over_unix_ms.is_not(None)]
    if after is not None:
        at, identity = after
        conditions += [_created <= at, or_(_created < at, and_(_created == at, BatchRow.id < identity))]
    newest_first = (
        select(*_COLUMNS).where(*conditions, *_conditions(where)).order_by(_created.desc(), BatchRow.id.desc())
    )
    found = await _read(connection, newest_first.limit(limit + 1))
    shown = found[:limit]
    return shown, (shown[-1]["created_unix_ms"], shown[-1]["id"]) if len(found) > limit else None


async def batch_named(connection: AsyncConnection, batch_id: str) -> BatchLine | None:
    """Return a batch; None: there is none of this id."""
    found = await _read(connection, select(*_COLUMNS).where(BatchRow.id == batch_id))
    return found[0] if found else None


async def batch_choices(
    connection: AsyncConnection, since_unix_ms: int, until_unix_ms: int, *, where: Filters = NO_FILTERS
) -> dict[Dimension, list[str]]:
    """Return whose batches, and for what, were open or created in [since, until), for the filters to offer."""
    within = or_(BatchRow.over_unix_ms.is_(None), and_(_created >= since_unix_ms, _created < until_unix_ms))
    rows = (await connection.execute(select(*_KEYS.values()).where(within, *_conditions(where)).distinct())).all()
    names = {path: name for name, path in ENDPOINTS.items()}
    values: dict[Dimension, set[str]] = {
        dimension: {row[number] for row in rows} for number, dimension in enumerate(_KEYS)
    }
    values["endpoint"] = {names.get(path, path) for path in values["endpoint"]}
    return {dimension: sorted(found) for dimension, found in values.items()}


async def file_sizes(connection: AsyncConnection, file_ids: Iterable[str | None]) -> dict[str, int]:
    """Return the sizes in bytes of those of the files that are there."""
    wanted = select(FileRow.id, FileRow.size_bytes).where(FileRow.id.in_([one for one in file_ids if one is not None]))
    return {row.id: row.size_bytes for row in await connection.execute(wanted)}


_KEYS: Final[dict[Dimension, Any]] = {
    "team": BatchRow.team_id,
    "key": BatchRow.key_id,
    "endpoint": BatchRow.endpoint,
}


def _conditions(where: Filters) -> list[ColumnElement[bool]]:
    conditions = []
    for dimension, column in _KEYS.items():
        if dimension in where:
            conditions.append(column.in_([ENDPOINTS.get(value, value) for value in where[dimension]]))
    return conditions


async def _read(connection: AsyncConnection, statement: Any) -> list[BatchLine]:  # noqa: ANN401  # SQLAlchemy's
    return [dict(row) for row in (await connection.execute(statement)).mappings()]
