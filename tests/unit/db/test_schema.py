import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from msgspec.structs import asdict
from sqlalchemy import Connection, text

import migrations
from db.engine import SCHEMA_VERSION, DatabaseUnavailable, SchemaMismatch, check_schema, create_engine
from db.tables import Base
from ledger.partitions import is_partition
from ledger.rollups import DIMENSIONS, SUMS, slice_id
from tests.postgres import PostgresServer
from tests.usage_records import request_record
from tests.waiting import HANGS_S

BASELINE_REQUEST = {
    name: value for name, value in asdict(request_record("r1")).items() if name not in {"v", "tags"}
}  # its columns at the baseline
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
def test_two_processes_upgrade_at_once(empty_database_url: str) -> None:
    command = [sys.executable, "-c", UPGRADE, empty_database_url]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=HANGS_S)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 2, said
    assert migrations.current(empty_database_url) == migrations.head()


def test_a_failed_revision_leaves_the_database_as_it_was(empty_database_url: str) -> None:
    asyncio.run(_execute(empty_database_url, "CREATE TABLE set_aside (x INTEGER)"))  # the last revision's table
    with pytest.raises(DatabaseUnavailable, match="set_aside"):
        migrations.upgrade(empty_database_url)
    assert migrations.current(empty_database_url) is None


async def test_a_fitting_schema_passes_the_check(database_url: str) -> None:
    engine = create_engine(database_url)
    await check_schema(engine)
    await engine.dispose()


async def test_an_empty_database_says_what_to_run(empty_database_url: str) -> None:
    engine = create_engine(empty_database_url)
    with pytest.raises(
        SchemaMismatch, match=f"schema is empty, but this build needs {SCHEMA_VERSION}. Run `spillway db up"
    ):
        await check_schema(engine)
    await engine.dispose()


async def test_another_schema_says_both_versions(database_url: str) -> None:
    engine = create_engine(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    with pytest.raises(SchemaMismatch, match=f"schema is 0001, but this build needs {SCHEMA_VERSION}"):
        await check_schema(engine)
    await engine.dispose()


async def test_an_older_build_runs_on_a_newer_schema(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = create_engine(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    await check_schema(engine)
    assert "schema is 9999, newer than" in caplog.text
    await engine.dispose()


async def test_an_unreachable_database_is_unavailable_and_its_password_unsaid(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}/no/such/folder/x.db", "postgresql://me:secret@127.0.0.1:1/x"):
        engine = create_engine(url)
        with pytest.raises(DatabaseUnavailable) as refused:
            await check_schema(engine)
        assert "secret" not in str(refused.value)
        await engine.dispose()


def test_a_database_of_the_baseline_keeps_its_rows_and_gets_the_revisions_after_it(empty_database_url: str) -> None:
    url = empty_database_url
    asyncio.run(_migrate(url, migrations.BASELINE))
    asyncio.run(_store(url))
    migrations.upgrade(url)
    assert migrations.current(url) == migrations.head()
    assert asyncio.run(_ids(url)) == ["r1"]


def test_rollups_learn_which_tokens_had_no_price(empty_database_url: str) -> None:
    url = empty_database_url
    asyncio.run(_migrate(url, "0018"))
    asyncio.run(_store(url))
    group = tuple(BASELINE_REQUEST[name] or "" for name in DIMENSIONS)
    day = 1_800_000_000_000 // 86_400_000 * 86_400_000
    names = ", ".join(name for name in SUMS if name != "unpriced_tokens")
    sums = ", ".join("1" for name in SUMS if name != "unpriced_tokens")
    quoted = ", ".join(f"'{value}'" for value in group)
    asyncio.run(_execute(url, f"INSERT INTO slices (id, {', '.join(DIMENSIONS)}) VALUES ({slice_id(group)}, {quoted})"))
    for width_s, start in ((86_400, day), (86_400, day - 86_400_000)):
        statement = f"INSERT INTO rollups (width_s, bucket_unix_ms, slice_id, {names})"
        asyncio.run(_execute(url, f"{statement} VALUES ({width_s}, {start}, {slice_id(group)}, {sums})"))
    migrations.upgrade(url)
    assert asyncio.run(_column(url, "SELECT unpriced_tokens FROM rollups ORDER BY bucket_unix_ms")) == [0, 15]


@pytest.mark.parametrize("revision", ["0001", "0016"])
def test_an_older_database_is_refused_untouched_and_learns_what_upgrades_it(
    empty_database_url: str, revision: str
) -> None:
    url = empty_database_url
    asyncio.run(_migrate(url, migrations.BASELINE))
    asyncio.run(_store(url))
    asyncio.run(_execute(url, f"UPDATE alembic_version SET version_num = '{revision}'"))
    wanted = f"{revision}, but this build can only upgrade from 0017. Run `spillway db upgrade` of commit [0-9a-f]{{8}}"
    with pytest.raises(SchemaMismatch, match=wanted):
        migrations.upgrade(url)
    assert migrations.current(url) == revision
    assert asyncio.run(_ids(url)) == ["r1"]


def test_a_database_of_a_newer_release_is_refused_untouched(empty_database_url: str) -> None:
    url = empty_database_url
    migrations.upgrade(url)
    asyncio.run(_execute(url, "UPDATE alembic_version SET version_num = '9999'"))
    wanted = f"schema is 9999, newer than this release's {SCHEMA_VERSION}. Run the newer release, or rest"
    with pytest.raises(SchemaMismatch, match=wanted):
        migrations.upgrade(url)
    assert migrations.current(url) == "9999"


async def _migrate(database_url: str, revision: str) -> None:
    def on(connection: Connection) -> None:
        config = Config(Path(migrations.__file__).with_name("alembic.ini"))
        config.attributes["connection"] = connection
        command.upgrade(config, revision)

    engine = create_engine(database_url)
    async with engine.begin() as connection:
        await connection.run_sync(on)
    await engine.dispose()


async def _store(database_url: str) -> None:
    """Store a request as a build of the baseline did."""
    engine = create_engine(database_url)
    columns = BASELINE_REQUEST.keys()
    async with engine.begin() as connection:
        statement = f"INSERT INTO requests ({', '.join(columns)}) VALUES ({', '.join(f':{name}' for name in columns)})"
        await connection.execute(text(statement), BASELINE_REQUEST)
    await engine.dispose()


async def _ids(database_url: str) -> list[str]:
    return await _column(database_url, "SELECT request_id FROM requests")


async def _column(database_url: str, statement: str) -> list[Any]:
    engine = create_engine(database_url)
    async with engine.connect() as connection:
        found = list(await connection.scalars(text(statement)))
    await engine.dispose()
    return found


async def _execute(database_url: str, statement: str) -> None:
    engine = create_engine(database_url)
    async with engine.begin() as connection:
        await connection.execute(text(statement))
    await engine.dispose()
