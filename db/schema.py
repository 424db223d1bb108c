"""The check that the database has the tables this build was written for. ``migrations/`` creates them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncEngine

from db.errors import SQL_ERRORS, DatabaseUnavailable, SchemaMismatch, describe
from protocol.process import backoff_s, wait_for

SCHEMA_VERSION: Final = "0018"  # the newest revision in migrations/versions; a test keeps both equal
VERSION_TABLE: Final = "alembic_version"
_AWAY: Final[tuple[type[Exception], ...]] = (DatabaseUnavailable, *SQL_ERRORS)

log = logging.getLogger(__name__)


async def check_schema(engine: AsyncEngine) -> None:
    """Check the version of the schema. Raises SchemaMismatch or DatabaseUnavailable."""
    try:
        async with engine.connect() as connection:
            found = await connection.run_sync(read_schema_version)
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(f"database {engine.url!r} is unreachable: {describe(error)}") from error
    if found is not None and found > SCHEMA_VERSION:  # migrations keep what the release before needs: docs/UPGRADES.md
        log.warning("database schema is %s, of a newer release than this build's %s", found, SCHEMA_VERSION)
    elif found != SCHEMA_VERSION:
        raise SchemaMismatch(
            f"database schema is {found or 'empty'}, this build needs {SCHEMA_VERSION}: run `spillway db upgrade`"
        )


async def wait_for_database(
    engine: AsyncEngine, first: Callable[[], Awaitable[None]], stopping: asyncio.Event | None = None
) -> None:
    """Wait until SQL answers, check the schema and await ``first``; return early when stopping.

    Waits without a limit, and logs that it waits. Raises SchemaMismatch.
    """
    is_waiting = False
    for wait_s in backoff_s():
        try:
            await check_schema(engine)
            await first()
        except _AWAY as error:
            if not is_waiting:
                log.error("waiting for the database: %s", describe(error))  # noqa: TRY400
            is_waiting = True
        else:
            break
        if await wait_for(stopping or asyncio.Event(), wait_s):
            return
    if is_waiting:
        log.warning("the database answers")


def read_schema_version(connection: Connection) -> str | None:
    """Return the revision of the database; None if it has never been migrated."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608
