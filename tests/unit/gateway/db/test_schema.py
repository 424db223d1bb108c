import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text

import migrations
from gateway.db.engine import create_engine
from gateway.db.errors import DatabaseUnavailable, SchemaMismatch
from gateway.db.models import Base
from gateway.db.schema import SCHEMA_VERSION, check_schema
from tests.postgres import PostgresServer

UPGRADE = "import sys, migrations; migrations.upgrade(sys.argv[1])"


@pytest.fixture(params=["sqlite", "postgresql"])
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


async def test_models_and_migrations_are_in_step(database_url: str) -> None:
    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        return compare_metadata(context, Base.metadata)

    engine = create_engine(database_url)
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await engine.dispose()


def test_upgrade_of_an_empty_database_and_again(empty_database_url: str) -> None:
    assert migrations.current(empty_database_url) is None
    migrations.upgrade(empty_database_url)
    migrations.upgrade(empty_database_url)
    assert migrations.current(empty_database_url) == migrations.head()


def test_four_processes_upgrade_at_once(empty_database_url: str) -> None:
    command = [sys.executable, "-c", UPGRADE, empty_database_url]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=60)[1] for process in processes]
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
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaMismatch, match=f"schema is 9999, this build needs {SCHEMA_VERSION}"):
        await check_schema(engine)
    await engine.dispose()


async def test_an_unreachable_database_is_unavailable_and_its_password_unsaid(tmp_path: Path) -> None:
    for url in (f"sqlite:///{tmp_path}/no/such/folder/x.db", "postgresql://me:secret@127.0.0.1:1/x"):
        engine = create_engine(url)
        with pytest.raises(DatabaseUnavailable) as refused:
            await check_schema(engine)
        assert "secret" not in str(refused.value)
        await engine.dispose()
