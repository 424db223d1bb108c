"""PostgreSQL's partitions: made ahead, never needed, dropped; and the tables of before become one."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import DatabaseUnavailable, create_engine
from ledger import partitions
from ledger.check import check_rollups
from ledger.partitions import DAY_MS, create_partitions
from ledger.retention import Retention, kept_since_unix_ms
from ledger.store import store_records
from protocol.usage import UsageRecord
from tests.usage_records import attempt_record, request_record

TODAY = kept_since_unix_ms(0)


@pytest.fixture
async def engine(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(postgres_url)
    yield engine
    await engine.dispose()


def both(number: int, received_unix_ms: int) -> list[UsageRecord]:
    times = {"received_unix_ms": received_unix_ms}
    return [
        request_record(f"r{number}", **times),
        attempt_record(f"r{number}", started_unix_ms=received_unix_ms + 10, **times),
    ]


async def rows_by_partition(engine: AsyncEngine, table: str) -> dict[str, int]:
    statement = f"SELECT tableoid::regclass::text, count(*) FROM {table} GROUP BY 1 ORDER BY 1"
    return dict(tuple(row) for row in await fetch(engine, statement))


async def names(engine: AsyncEngine) -> list[str]:
    found = await fetch(engine, "SELECT inhrelid::regclass::text FROM pg_inherits ORDER BY 1")
    return [name for (name,) in found if partitions.is_partition(name)]


async def fetch(engine: AsyncEngine, statement: str) -> list[Any]:
    async with engine.connect() as connection:
        return list((await connection.execute(text(statement))).all())


def named(table: str, day_unix_ms: int) -> str:
    return f"{table}_d{datetime.fromtimestamp(day_unix_ms / 1000, UTC):%Y%m%d}"


async def test_rows_of_any_day_are_kept_and_go_to_their_days_partition_when_it_is_made(engine: AsyncEngine) -> None:
    days = [TODAY - 90 * DAY_MS, TODAY - 40 * DAY_MS, TODAY, TODAY + DAY_MS - 1, TODAY + DAY_MS, TODAY + 90 * DAY_MS]
    records = [record for number, day in enumerate(days) for record in both(number, day)]
    await store_records(engine, records)
    assert await rows_by_partition(engine, "requests") == {"requests_default": 6}
    await create_partitions(engine, TODAY, 2)
    await create_partitions(engine, TODAY, 2)
    await store_records(engine, records[::-1] + both(9, TODAY + 5))
    for table in partitions.TABLES:
        expected = {f"{table}_default": 3, named(table, TODAY): 3, named(table, TODAY + DAY_MS): 1}
        assert await rows_by_partition(engine, table) == expected
    assert sum(day.wrong for day in await check_rollups(engine)) == 0


async def test_two_writers_make_them_once(engine: AsyncEngine) -> None:
    await asyncio.gather(*(create_partitions(engine, TODAY, 3) for _ in range(3)))
    assert len(await names(engine)) == len(partitions.TABLES) * (1 + 3)


async def test_retention_drops_days_and_deletes_what_is_in_no_days_partition(engine: AsyncEngine) -> None:
    await create_partitions(engine, TODAY - 3 * DAY_MS, 4)
    for number, days_ago in enumerate((9, 3, 2, 1, 0)):
        await store_records(engine, both(number, TODAY - days_ago * DAY_MS))
    assert not await Retention(engine, 2, clock=lambda: TODAY).delete_some()
    for table in partitions.TABLES:
        expected = {named(table, TODAY - days_ago * DAY_MS): 1 for days_ago in (2, 1, 0)}
        assert await rows_by_partition(engine, table) == expected
        assert named(table, TODAY - 3 * DAY_MS) not in await names(engine)


async def test_the_tables_of_before_are_the_partition_of_all_days_until_their_last(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        for table in partitions.TABLES:
            await connection.execute(text(f"CREATE TABLE {table}_before (LIKE {table} INCLUDING DEFAULTS)"))
            bounds = f"FROM (MINVALUE) TO ({TODAY + DAY_MS})"
            await connection.execute(text(f"ALTER TABLE {table} ATTACH PARTITION {table}_before FOR VALUES {bounds}"))
    await create_partitions(engine, TODAY, 2)
    for day in (5, TODAY, TODAY + DAY_MS):
        await store_records(engine, both(day, day))
    for table in partitions.TABLES:
        assert await rows_by_partition(engine, table) == {f"{table}_before": 2, named(table, TODAY + DAY_MS): 1}
    assert not await Retention(engine, 2, clock=lambda: TODAY + 3 * DAY_MS).delete_some()
    assert set(await names(engine)) == {
        *(f"{table}_default" for table in partitions.TABLES),
        *(named(table, TODAY + DAY_MS) for table in partitions.TABLES),
    }


async def test_whoever_reads_keeps_a_partition_from_being_made_but_not_usage_from_being_written(
    engine: AsyncEngine,
) -> None:
    async with engine.connect() as reader:
        await reader.execute(text("SELECT count(*) FROM requests"))
        with pytest.raises(DatabaseUnavailable, match="lock timeout"):
            await create_partitions(engine, TODAY, 1)
        await store_records(engine, both(1, TODAY))
    await create_partitions(engine, TODAY, 1)
    assert await rows_by_partition(engine, "requests") == {named("requests", TODAY): 1}


async def test_sqlite_has_none(sqlite_url: str) -> None:
    engine = create_engine(sqlite_url)
    await create_partitions(engine, TODAY, 2)
    await store_records(engine, both(1, TODAY))
    assert await fetch(engine, "SELECT count(*) FROM requests") == [(1,)]
    await engine.dispose()
