"""Alembic migrations: upgrade a database to the schema of this build."""

import asyncio
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

from db.engine import (
    IMMEDIATE,
    SQL_ERRORS,
    SQLITE_BEGIN,
    DatabaseUnavailable,
    SchemaMismatch,
    create_engine,
    describe,
    read_schema_version,
)

MIGRATION_LIMIT_S: Final = 3600.0  # one statement on a large table
LOCK_LIMIT_S: Final = 600.0  # how long to wait for another process that is migrating
ADVISORY_LOCK_ID: Final = 0x5350494C4C574159  # "SPILLWAY"
BASELINE: Final = "0017"  # the oldest revision that this build can upgrade
BRIDGE: Final = "commit ebe65687"  # upgrades any older database to the baseline


def upgrade(database_url: str) -> None:
    """Upgrade the database to ``head`` in one transaction; do nothing if it is up to date.

    Several processes may call it concurrently: one upgrades, the others wait for its lock. Blocks; must not be called
    from a coroutine. Raises DatabaseUrlError, DatabaseUnavailable, or SchemaMismatch for a database that is too old or
    too new.
    """
    try:
        asyncio.run(_upgrade(database_url))
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(f"database.url: cannot upgrade the schema: {describe(error)}") from error


def current(database_url: str) -> str | None:
    """Return the revision of the database; None if it has never been migrated. Blocks; raises like ``upgrade``."""
    try:
        return asyncio.run(_current(database_url))
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(f"database.url: cannot read the schema: {describe(error)}") from error


def head() -> str:
    """Return the newest revision."""
    newest = ScriptDirectory.from_config(_config()).get_current_head()
    if newest is None:
        raise AssertionError("migrations/versions is empty")
    return newest


def _config() -> Config:
    return Config(Path(__file__).with_name("alembic.ini"))


async def _upgrade(database_url: str) -> None:
    engine = create_engine(database_url, statement_limit_s=MIGRATION_LIMIT_S, lock_limit_s=LOCK_LIMIT_S)
    try:
        async with engine.connect() as connection:
            await connection.execution_options(**{SQLITE_BEGIN: IMMEDIATE})
            async with connection.begin():
                await _lock(connection)
                await connection.run_sync(_upgrade_on)
    finally:
        await engine.dispose()


async def _lock(connection: AsyncConnection) -> None:
    """Lock out other migrating processes until the transaction ends. On SQLite, BEGIN IMMEDIATE already does."""
    if connection.dialect.name == "postgresql":
        await connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_LIMIT_S:.0f}s'"))
        await connection.execute(text("SELECT pg_advisory_xact_lock(:id)"), {"id": ADVISORY_LOCK_ID})


def _upgrade_on(connection: Connection) -> None:
    found = read_schema_version(connection)
    if found is not None and found < BASELINE:
        raise SchemaMismatch(
            f"database schema is {found}, but this build can only upgrade from {BASELINE}."
            f" Run `spillway db upgrade` of {BRIDGE} first"
        )
    if found is not None and found > head():
        raise SchemaMismatch(
            f"database schema is {found}, newer than this release's {head()}. Run the newer release, or"
            " restore the backup from before the upgrade (docs/how-to/upgrades.md)"
        )
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


async def _current(database_url: str) -> str | None:
    engine = create_engine(database_url)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(read_schema_version)
    finally:
        await engine.dispose()
