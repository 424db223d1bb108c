"""The async engine for SQLite (default) and PostgreSQL (production)."""

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import aiosqlite
import asyncpg
from sqlalchemy import URL, Connection, event, inspect, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DataError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from db.url import DRIVERS, EXAMPLES, problem_of
from protocol.errors import ExpectedError
from protocol.process import backoff_s, in_url, wait_for

log = logging.getLogger(__name__)


class DatabaseError(ExpectedError):
    """The database cannot be used."""


class DatabaseUrlError(DatabaseError, ValueError):
    """The configured URL is unusable; the message names the configuration key."""


class DatabaseUnavailable(DatabaseError):
    """SQL failed, but may work later."""


class SchemaMismatch(DatabaseError):
    """The schema is not the one that this build needs; the message names the command to run."""


# While connecting, asyncpg raises its own errors and socket errors. SQLAlchemy wraps only later ones.
SQL_ERRORS: Final[tuple[type[Exception], ...]] = (
    SQLAlchemyError,
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
)

# SQLSTATE classes 22 (data exception) and 23 (integrity constraint violation): this row will never be accepted.
REFUSED_SQLSTATE_CLASSES: Final = ("22", "23")


def describe(error: Exception) -> str:
    """Return an error's message on one line, without SQLAlchemy's statement and background link."""
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split()) or type(cause).__name__


def is_refusal(error: Exception) -> bool:
    """Return whether the database will never accept the row that caused this error."""
    # A wrong True loses a record. A wrong False blocks the ledger until an operator acts. Only clear cases count.
    if isinstance(error, (DataError, IntegrityError, asyncpg.DataError)):
        return True
    driver_error = getattr(error, "orig", None) or error  # COPY raises the driver's errors
    if isinstance(getattr(driver_error, "__cause__", None), asyncpg.DataError):  # rejected before it was sent
        return True
    sqlstate = getattr(driver_error, "sqlstate", None) or ""
    return sqlstate.startswith(REFUSED_SQLSTATE_CLASSES)


# --- connections ------------------------------------------------------------------------------------------------------

CONNECT_LIMIT_S: Final = 10.0
POSTGRESQL_PORT: Final = 5432  # default port
STATEMENT_LIMIT_S: Final = 30.0
LOCK_LIMIT_S: Final = 5.0

# Execution option: how SQLite begins a transaction. IMMEDIATE takes the write lock immediately, which a transaction
# that reads before it writes needs: taking it later fails without waiting if another writer committed in between.
SQLITE_BEGIN: Final = "sqlite_begin"
IMMEDIATE: Final = "IMMEDIATE"
WRITER_LOCK_ID: Final = 0x5350494C4C4C4544  # "SPILLLED": PostgreSQL's advisory lock for writing the ledger

# Writers look up rows by key. Without this setting, PostgreSQL scans a small table for each batch.
_BEGIN_WRITING: Final = text("SELECT pg_advisory_xact_lock(:id), set_config('enable_seqscan', 'off', true)")


def parse_database_url(database_url: str) -> URL:
    """Check a URL and set its async driver, which ``sqlite:///file`` and ``postgresql://…`` may omit.

    Raises DatabaseUrlError. The message never contains the password.
    """
    if problem := problem_of(database_url):
        raise DatabaseUrlError(f"database.url: {problem}")
    try:
        url = make_url(database_url)
    except (ArgumentError, ValueError) as error:
        raise DatabaseUrlError(f"database.url: not a database URL. Examples: {EXAMPLES}") from error
    return url.set(drivername=DRIVERS[url.drivername])


def create_engine(
    database_url: str, *, statement_limit_s: float = STATEMENT_LIMIT_S, lock_limit_s: float = LOCK_LIMIT_S
) -> AsyncEngine:
    """Create an engine without connecting.

    ``statement_limit_s`` bounds every PostgreSQL statement, ``lock_limit_s`` is how long SQLite waits for another
    writer. Raises DatabaseUrlError.
    """
    url = parse_database_url(database_url)
    if url.get_backend_name() == "sqlite":
        engine = create_async_engine(url, connect_args={"timeout": lock_limit_s, "async_creator_fn": _open_sqlite})
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine
    # pool_pre_ping detects connections that a restarted server has dropped before a transaction uses them.
    limits: dict[str, Any] = {"timeout": CONNECT_LIMIT_S, "command_timeout": statement_limit_s}
    connect_args = {**limits, "async_creator_fn": _open_postgresql}
    return create_async_engine(url, pool_pre_ping=True, connect_args=connect_args)


def changing(engine: AsyncEngine) -> contextlib.AbstractAsyncContextManager[AsyncConnection]:
    """Begin a transaction that writes, possibly after reading."""
    return engine.execution_options(**{SQLITE_BEGIN: IMMEDIATE}).begin()


@contextlib.asynccontextmanager
async def writing(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Begin a transaction that writes the ledger. Only one can run at a time."""
    async with changing(engine) as connection:
        if connection.dialect.name == "postgresql":
            await connection.execute(_BEGIN_WRITING, {"id": WRITER_LOCK_ID})
        yield connection


async def _open_sqlite(*arguments: Any, **options: Any) -> aiosqlite.Connection:  # noqa: ANN401  # as sqlite3.connect has them
    """Open a connection; if that fails, end its thread before raising.

    aiosqlite does not wait for its thread. If the event loop ended first, the thread died with a traceback.
    """
    connection = aiosqlite.connect(*arguments, **options)
    thread = connection._thread  # noqa: SLF001  # as SQLAlchemy does
    thread.daemon = True
    try:
        return await connection
    except sqlite3.OperationalError as error:
        await asyncio.shield(asyncio.to_thread(thread.join, CONNECT_LIMIT_S))
        raise sqlite3.OperationalError(f"{arguments[0]}: {error}") from error
    except BaseException:
        await asyncio.shield(asyncio.to_thread(thread.join, CONNECT_LIMIT_S))
        raise


async def _open_postgresql(*arguments: Any, **options: Any) -> asyncpg.Connection:  # noqa: ANN401  # as asyncpg.connect has them
    """Open a connection. Errors name host and port, which the original errors do not."""
    try:
        return await asyncpg.connect(*arguments, **options)
    except SQL_ERRORS as error:
        reason = f"no answer within {CONNECT_LIMIT_S:g} s" if isinstance(error, TimeoutError) else describe(error)
        host, port = options.get("host") or "localhost", options.get("port") or POSTGRESQL_PORT
        raise ConnectionError(f"PostgreSQL at {in_url(host)}:{port}: {reason}") from error


def _prepare_sqlite(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    # Python's sqlite3 begins transactions implicitly, but not before reads or DDL; we begin them (_begin_sqlite).
    connection.isolation_level = None
    cursor = connection.cursor()
    # WAL: readers and the one writer do not wait for each other. FULL: a usage record is acknowledged to its stream
    # once committed, so a commit must survive a power cut; that is one fsync per batch.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get(SQLITE_BEGIN, 'DEFERRED')}")


# --- waiting for the schema -------------------------------------------------------------------------------------------
#
# Checks that the database has the schema that this build needs. ``migrations/`` creates it.

SCHEMA_VERSION: Final = "0021"  # the newest revision in migrations/versions; a test keeps both equal
VERSION_TABLE: Final = "alembic_version"
_AWAY: Final[tuple[type[Exception], ...]] = (DatabaseUnavailable, *SQL_ERRORS)


async def check_schema(engine: AsyncEngine) -> None:
    """Check the version of the schema. Raises SchemaMismatch or DatabaseUnavailable."""
    try:
        async with engine.connect() as connection:
            found = await connection.run_sync(read_schema_version)
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(f"database {engine.url!r} is unreachable: {describe(error)}") from error
    # Migrations keep what the previous release needs: docs/how-to/upgrades.md.
    if found is not None and found > SCHEMA_VERSION:
        log.warning("database schema is %s, newer than this build's %s", found, SCHEMA_VERSION)
    elif found != SCHEMA_VERSION:
        raise SchemaMismatch(
            f"database schema is {found or 'empty'}, but this build needs {SCHEMA_VERSION}. Run `spillway db upgrade`"
        )


async def wait_for_database(
    engine: AsyncEngine, first: Callable[[], Awaitable[None]], stopping: asyncio.Event | None = None
) -> None:
    """Wait until the database answers, check the schema and await ``first``; return early when stopping.

    Waits without a limit and logs once that it is waiting. Raises SchemaMismatch.
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
        log.warning("the database is available again")


def read_schema_version(connection: Connection) -> str | None:
    """Return the revision of the database; None if it has never been migrated."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608
