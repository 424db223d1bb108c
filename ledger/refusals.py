"""Refused requests in SQL: permanent counts, and the latest refusals of each key.

A gateway publishes its running count of refusals in each minute, so the larger of two counts of one group, minute and
process is the later one, and a duplicate message changes nothing.
"""

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from sqlalchemy import and_, case, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import SQL_ERRORS, DatabaseUnavailable, describe, writing
from db.tables import RefusalCountRow, RefusalGroupRow, RefusalRow
from ledger.rollups import slice_id, upsert
from protocol.nats.clock import unix_now_ms
from protocol.refusals import RefusalCount, RefusalRecord

QUARTER_MS: Final = 900_000
MERGED_AFTER_MS: Final = 24 * 3_600_000  # after which no gateway publishes counts of that minute
NAMED_OF_A_KEY: Final = 1000  # the latest per key are kept; requests without a valid key count as one key

Row = dict[str, Any]  # column → value


async def write_refusals(connection: AsyncConnection, records: Iterable[RefusalCount | RefusalRecord]) -> None:
    """Store counts and single refusals, in the caller's transaction (db.engine.writing)."""
    groups: dict[int, Row] = {}
    counts: dict[tuple[int, str, int], int] = {}
    named: dict[str, Row] = {}
    for record in records:
        if isinstance(record, RefusalRecord):
            named.setdefault(record.request_id, _without_version(record))
            continue
        group = _group(record)
        groups[group["id"]] = group
        key = (record.minute_unix_ms, record.run_id, group["id"])
        counts[key] = max(record.refusals, counts.get(key, 0))
    if groups:
        await upsert(connection, RefusalGroupRow, list(groups.values()))
        names = ("bucket_unix_ms", "run_id", "group_id")
        rows = [{**dict(zip(names, key, strict=True)), "refusals": refusals} for key, refusals in counts.items()]
        await upsert(connection, RefusalCountRow, rows, _later)
    if named:
        await upsert(connection, RefusalRow, list(named.values()))


def _later(new: Any) -> Row:  # noqa: ANN401  # the columns of an insertion, as SQLAlchemy has them
    stored = RefusalCountRow.refusals
    return {"refusals": case((new["refusals"] > stored, new["refusals"]), else_=stored)}


def _group(record: RefusalCount) -> Row:
    values = {name: getattr(record, name) for name in ("code", "status", "endpoint", "key_id", "team_id", "model")}
    return {"id": slice_id(tuple(map(str, values.values()))), **values}


def _without_version(record: RefusalRecord) -> Row:
    row = msgspec.structs.asdict(record)
    del row["v"]
    return row


async def tidy_refusals(engine: AsyncEngine, since_unix_ms: int | None) -> None:
    """Merge the counts of earlier days into quarters of an hour; delete single refusals above the limit.

    ``since_unix_ms``: also delete older ones; None: no limit of age. Raises DatabaseUnavailable.
    """
    before_unix_ms = (unix_now_ms() - MERGED_AFTER_MS) // QUARTER_MS * QUARTER_MS
    try:
        async with writing(engine) as connection:
            await _merge_minutes(connection, before_unix_ms)
            await _delete_named(connection, since_unix_ms)
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(describe(error)) from error


async def _merge_minutes(connection: AsyncConnection, before_unix_ms: int) -> None:
    table = RefusalCountRow.__table__.columns
    is_old = and_(table.bucket_unix_ms < before_unix_ms, table.run_id != "")
    quarter = (table.bucket_unix_ms - table.bucket_unix_ms % QUARTER_MS).label("bucket_unix_ms")
    summed = (
        select(quarter, table.group_id, func.sum(table.refusals).label("refusals"))
        .where(is_old)
        .group_by(quarter, table.group_id)
    )
    rows = [{**row, "run_id": ""} for row in (await connection.execute(summed)).mappings()]
    if rows:
        await connection.execute(delete(RefusalCountRow).where(is_old))
        await upsert(connection, RefusalCountRow, rows, lambda new: {"refusals": table.refusals + new["refusals"]})


async def _delete_named(connection: AsyncConnection, since_unix_ms: int | None) -> None:
    table = RefusalRow.__table__.columns
    if since_unix_ms is not None:
        await connection.execute(delete(RefusalRow).where(table.received_unix_ms < since_unix_ms))
    many = select(table.key_id).group_by(table.key_id).having(func.count() > NAMED_OF_A_KEY)
    newest_first = (table.received_unix_ms.desc(), table.request_id.desc())
    place = func.row_number().over(partition_by=table.key_id, order_by=newest_first).label("place")
    ranked = select(table.request_id, place).where(table.key_id.in_(many)).subquery()
    too_many = select(ranked.c.request_id).where(ranked.c.place > NAMED_OF_A_KEY)
    await connection.execute(delete(RefusalRow).where(table.request_id.in_(too_many)))
