"""PostgreSQL's partitions of ``requests`` and ``attempts``: one for each UTC day on which requests were received.

They are created ahead of time, and expired rows are dropped with their partition: dropping a table leaves nothing
to vacuum. A row of a day without a partition (a late record, a wrong clock) goes to the default partition, and moves to
its partition once that is created. ``*_before`` holds the rows from before version 0008. SQLite has no partitions, and
the functions here do nothing on it.
"""

import re
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import SQL_ERRORS, DatabaseUnavailable, describe, writing

DAY_MS: Final = 86_400_000
TABLES: Final = ("requests", "attempts")
DAYS_AHEAD: Final = 3  # how long writers can be down before rows go to the default partition
# Attaching and dropping wait for all readers of the table, and later readers wait for them.
LOCK_LIMIT_MS: Final = 1_000

_NAME: Final = re.compile(rf"({'|'.join(TABLES)})_(d\d{{8}}|default|before)")
_BOUNDS: Final = re.compile(r"FROM \((?:MINVALUE|'(\d+)')\) TO \('(\d+)'\)")
_PARTITIONS: Final = text(
    "SELECT relname, pg_get_expr(relpartbound, oid) FROM pg_class"
    " WHERE oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass(:table))"
)


class Partition(Struct, frozen=True):
    """A time span and the table that holds its rows."""

    name: str
    since_unix_ms: int
    until_unix_ms: int


def is_partition(table: str) -> bool:
    """Return whether a table of this name is a partition of another one."""
    return _NAME.fullmatch(table) is not None


async def create_partitions(engine: AsyncEngine, since_unix_ms: int, days: int) -> None:
    """Create the missing partitions of the next UTC days. Raises DatabaseUnavailable; then call again."""
    first = since_unix_ms // DAY_MS * DAY_MS
    if engine.dialect.name != "postgresql":
        return
    try:
        for table in TABLES:
            for day in range(first, first + days * DAY_MS, DAY_MS):
                async with writing(engine) as connection:  # one at a time, and usage is written in between
                    if not any(
                        one.since_unix_ms <= day < one.until_unix_ms
                        for one in await _dated_partitions(connection, table)
                    ):
                        await _create_partition(connection, table, day)
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(describe(error)) from error


async def drop_partitions(connection: AsyncConnection, before_unix_ms: int) -> None:
    """Drop the partitions that hold only older rows. Call inside ``writing``. Raises SQL errors."""
    if connection.dialect.name != "postgresql":
        return
    for table in TABLES:
        for one in await _dated_partitions(connection, table):
            if one.until_unix_ms <= before_unix_ms:
                await _limit_lock(connection)
                await connection.execute(text(f'DROP TABLE "{one.name}"'))


async def _dated_partitions(connection: AsyncConnection, table: str) -> list[Partition]:
    """Return all partitions of a table but the default."""
    found = []
    for name, bounds in await connection.execute(_PARTITIONS, {"table": table}):
        if matched := _BOUNDS.search(bounds):
            found.append(Partition(name, int(matched[1] or 0), int(matched[2])))
    return found


async def _create_partition(connection: AsyncConnection, table: str, day_unix_ms: int) -> None:
    # Created as a separate table and then attached, which does not block readers of other days.
    name = f"{table}_d{datetime.fromtimestamp(day_unix_ms / 1000, UTC):%Y%m%d}"
    since, until = day_unix_ms, day_unix_ms + DAY_MS
    await _limit_lock(connection)
    await connection.execute(text(f"CREATE TABLE {name} (LIKE {table} INCLUDING DEFAULTS)"))
    await connection.execute(
        text(
            f"WITH late AS (DELETE FROM {table}_default WHERE received_unix_ms >= {since}"  # noqa: S608
            f" AND received_unix_ms < {until} RETURNING *) INSERT INTO {name} SELECT * FROM late"
        )
    )
    await connection.execute(
        text(f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ({since}) TO ({until})")
    )


async def _limit_lock(connection: AsyncConnection) -> None:
    await connection.execute(text(f"SET LOCAL lock_timeout = {LOCK_LIMIT_MS}"))
