import asyncio
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, column, insert, table, text
from sqlalchemy.exc import IntegrityError

import migrations
from db.engine import SCHEMA_VERSION, DatabaseUnavailable, SchemaMismatch, check_schema, create_engine
from db.tables import Base
from ledger.partitions import is_partition
from ledger.store import store_records
from protocol.usage import RequestRecord
from tests.postgres import PostgresServer
from tests.usage_records import attempt_record, request_record
from tests.waiting import HANGS_S

UPGRADE = "import sys, migrations; migrations.upgrade(sys.argv[1])"


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.servers)])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'empty.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = server.new_database()
    yield server.url(name)
    server.drop_database(name)


def test_this_build_needs_the_newest_revision() -> None:
    assert migrations.head() == SCHEMA_VERSION


def is_modelled(name: str | None, kind: str, _parents: object) -> bool:
    return kind != "table" or name is None or not is_partition(name)


async def test_models_and_migrations_are_in_step(database_url: str) -> None:
    def differences(connection: Connection) -> list[object]:
        opts = {"compare_server_default": True, "include_name": is_modelled}
        context = MigrationContext.configure(connection, opts=opts)
        return list(compare_metadata(context, Base.metadata))

    engine = create_engine(database_url)
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await engine.dispose()


def test_upgrade_of_an_empty_database_and_again(empty_database_url: str) -> None:
    assert migrations.current(empty_database_url) is None
    migrations.upgrade(empty_database_url)
    migrations.upgrade(empty_database_url)
    assert migrations.current(empty_database_url) == migrations.head()


@pytest.mark.slow
def test_four_processes_upgrade_at_once(empty_database_url: str) -> None:
    command = [sys.executable, "-c", UPGRADE, empty_database_url]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=HANGS_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, said
    assert migrations.current(empty_database_url) == migrations.head()


def test_a_failed_revision_leaves_the_database_as_it_was(empty_database_url: str) -> None:
    async def occupy() -> None:
        engine = create_engine(empty_database_url)
        async with engine.begin() as connection:
            await connection.execute(text("CREATE TABLE attempts (x INTEGER)"))  # the revision's last table
        await engine.dispose()

    asyncio.run(occupy())
    with pytest.raises(DatabaseUnavailable, match="attempts"):
        migrations.upgrade(empty_database_url)
    assert migrations.current(empty_database_url) is None


async def test_a_fitting_schema_passes_the_check(database_url: str) -> None:
    engine = create_engine(database_url)
    await check_schema(engine)
    await engine.dispose()


async def test_an_empty_database_says_what_to_run(empty_database_url: str) -> None:
    engine = create_engine(empty_database_url)
    with pytest.raises(
        SchemaMismatch, match=f"schema is empty, this build needs {SCHEMA_VERSION}: run `spillway db up"
    ):
        await check_schema(engine)
    await engine.dispose()


async def test_another_schema_says_both_versions(database_url: str) -> None:
    engine = create_engine(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    with pytest.raises(SchemaMismatch, match=f"schema is 0001, this build needs {SCHEMA_VERSION}"):
        await check_schema(engine)
    await engine.dispose()


async def test_an_older_build_runs_on_a_newer_schema(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await check_schema(engine)
    assert "schema is 9999, of a newer release" in caplog.text
    await engine.dispose()


async def test_an_unreachable_database_is_unavailable_and_its_password_unsaid(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}/no/such/folder/x.db", "postgresql://me:secret@127.0.0.1:1/x"):
        engine = create_engine(url)
        with pytest.raises(DatabaseUnavailable) as refused:
            await check_schema(engine)
        assert "secret" not in str(refused.value)
        await engine.dispose()


COLUMNS_OF_0001 = [
    "request_id",
    "attempt",
    "worker_id",
    "pool",
    "provider",
    "region",
    "tier",
    "engine",
    "model",
    "started_unix_ms",
    "outcome",
    "error_code",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "queue_ms",
    "ttft_ms",
    "total_ms",
    "usd_per_hour",
]


def test_rows_of_the_first_revision_survive_the_second_and_the_way_back(empty_database_url: str) -> None:
    asyncio.run(_migrate(empty_database_url, command.upgrade, "0001"))
    asyncio.run(_insert_attempt(empty_database_url, "w1"))
    asyncio.run(_migrate(empty_database_url, command.upgrade, "0002"))
    asyncio.run(_insert_attempt(empty_database_url, "w2"))
    assert asyncio.run(_attempt_workers(empty_database_url)) == ["w1", "w2"]
    with pytest.raises(IntegrityError):
        asyncio.run(_insert_attempt(empty_database_url, "w2"))
    asyncio.run(_migrate(empty_database_url, command.downgrade, "0001"))
    assert asyncio.run(_attempt_workers(empty_database_url)) == ["w1"]


def test_rows_of_the_second_revision_survive_the_third_and_the_way_back(empty_database_url: str) -> None:
    asyncio.run(_migrate(empty_database_url, command.upgrade, "0002"))
    asyncio.run(_insert_attempt(empty_database_url, "w1"))
    asyncio.run(_migrate(empty_database_url, command.upgrade, "0003"))
    assert asyncio.run(_rows(empty_database_url, "SELECT worker_id, prefill_ms FROM attempts")) == [("w1", None)]
    assert asyncio.run(_rows(empty_database_url, "SELECT decode_ms, preemptions FROM requests")) == []
    asyncio.run(_migrate(empty_database_url, command.downgrade, "0002"))
    assert asyncio.run(_attempt_workers(empty_database_url)) == ["w1"]
    migrations.upgrade(empty_database_url)


async def _migrate(database_url: str, how: Callable[[Config, str], None], revision: str) -> None:
    def on(connection: Connection) -> None:
        config = Config(Path(migrations.__file__).with_name("alembic.ini"))
        config.attributes["connection"] = connection
        how(config, revision)

    engine = create_engine(database_url)
    async with engine.begin() as connection:
        await connection.run_sync(on)
    await engine.dispose()


async def _insert_attempt(database_url: str, worker_id: str) -> None:
    row = msgspec.structs.asdict(attempt_record("r", 1, worker_id=worker_id))
    row = {name: value for name, value in row.items() if name in COLUMNS_OF_0001}
    engine = create_engine(database_url)
    try:
        async with engine.begin() as connection:
            await connection.execute(insert(table("attempts", *(column(name) for name in row))), row)
    finally:
        await engine.dispose()


async def _attempt_workers(database_url: str) -> list[str]:
    rows = await _rows(database_url, "SELECT worker_id FROM attempts ORDER BY worker_id")
    return [worker_id for (worker_id,) in rows]


async def _rows(database_url: str, statement: str) -> list[tuple[Any, ...]]:
    engine = create_engine(database_url)
    async with engine.connect() as connection:
        rows = (await connection.execute(text(statement))).all()
    await engine.dispose()
    return [tuple(row) for row in rows]


DAY_MS = 86_400_000
PACKED = struct.pack("<3I", 1010 << 16 | 0xFFFF, 1010 << 16 | 5, 1020 << 16 | 3)


def test_rows_of_the_sixth_revision_survive_the_eighth_and_the_way_back(empty_database_url: str) -> None:
    url = empty_database_url
    now_unix_ms = time.time_ns() // 1_000_000
    received = [5, now_unix_ms, now_unix_ms + 400 * DAY_MS]  # the last by a clock that is wrong
    asyncio.run(_migrate(url, command.upgrade, "0006"))
    asyncio.run(_insert_old_rows(url, received))
    before = asyncio.run(_everything(url))
    migrations.upgrade(url)
    assert asyncio.run(_everything(url)) == before
    assert asyncio.run(_rows(url, "SELECT ttft_ms FROM histograms")) == [(PACKED,)]
    if url.startswith("postgresql"):
        parts = "SELECT tableoid::regclass::text, count(*) FROM requests GROUP BY 1 ORDER BY 1"
        assert asyncio.run(_rows(url, parts)) == [("requests_before", 2), ("requests_default", 1)]
    # What is there is known, whatever partition it is in, and new rows find their place.
    records = [request_record(f"r{at}", received_unix_ms=at) for at in (*received, now_unix_ms + 1)]
    asyncio.run(_store(url, records))
    assert asyncio.run(_rows(url, "SELECT count(*) FROM requests")) == [(4,)]
    asyncio.run(_execute(url, f"DELETE FROM requests WHERE received_unix_ms = {now_unix_ms + 1}"))
    asyncio.run(_execute(url, "DELETE FROM histograms WHERE slice_id <> 1"))
    asyncio.run(_migrate(url, command.downgrade, "0006"))
    assert asyncio.run(_everything(url)) == before
    assert asyncio.run(_rows(url, "SELECT ttft_ms FROM histograms")) == [(msgspec.msgpack.encode(COUNTS),)]
    with pytest.raises(IntegrityError):  # the old key is back
        asyncio.run(_execute(url, f"UPDATE requests SET request_id = 'r{now_unix_ms}'"))


COUNTS = {10: 0xFFFF + 5, 20: 3}


async def _insert_old_rows(database_url: str, received: list[int]) -> None:
    engine = create_engine(database_url)
    async with engine.begin() as connection:
        for at in received:
            row = msgspec.structs.asdict(request_record(f"r{at}", received_unix_ms=at))
            del row["v"], row["counted_by"]
            await connection.execute(insert(table("requests", *(column(name) for name in row))), row)
            tried = msgspec.structs.asdict(attempt_record(f"r{at}", started_unix_ms=at))
            tried = {name: value for name, value in tried.items() if name in COLUMNS_OF_0001}
            tried |= {"received_unix_ms": at or None}
            await connection.execute(insert(table("attempts", *(column(name) for name in tried))), tried)
        bucket = {"width_s": 900, "bucket_unix_ms": 0, "slice_id": 1, "ttft_ms": msgspec.msgpack.encode(COUNTS)}
        await connection.execute(insert(table("histograms", *(column(name) for name in bucket))), bucket)
    await engine.dispose()


async def _everything(database_url: str) -> list[list[tuple[Any, ...]]]:
    columns = {"requests": [name for name in RequestRecord.__struct_fields__ if name not in {"v", "counted_by"}]}
    return [
        await _rows(database_url, f"SELECT {', '.join(names)} FROM {table} ORDER BY request_id")
        for table, names in {**columns, "attempts": COLUMNS_OF_0001}.items()
    ]


async def _store(database_url: str, records: list[RequestRecord]) -> None:
    engine = create_engine(database_url)
    await store_records(engine, records)
    await engine.dispose()


async def _execute(database_url: str, statement: str) -> None:
    engine = create_engine(database_url)
    try:
        async with engine.begin() as connection:
            await connection.execute(text(statement))
    finally:
        await engine.dispose()
