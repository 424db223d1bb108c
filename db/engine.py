"""The async engine for SQLite (default) and PostgreSQL (production)."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from typing import Any, Final

import aiosqlite
import asyncpg
from sqlalchemy import URL, Connection, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry

from db.errors import SQL_ERRORS, DatabaseUrlError, describe
from db.url import DRIVERS, EXAMPLES, problem_of
from protocol.process import in_url

CONNECT_LIMIT_S: Final = 10.0
POSTGRESQL_PORT: Final = 5432  # where a URL names none
STATEMENT_LIMIT_S: Final = 30.0
LOCK_LIMIT_S: Final = 5.0

# Execution option: how SQLite begins a transaction. IMMEDIATE takes the write lock immediately, which a transaction
# that reads before it writes needs: taking it later fails without waiting if another writer committed in between.
SQLITE_BEGIN: Final = "sqlite_begin"
IMMEDIATE: Final = "IMMEDIATE"
WRITER_LOCK_ID: Final = 0x5350494C4C4C4544  # "SPILLLED": PostgreSQL's advisory lock for writing the ledger

# A writer looks up rows by their keys. While a table is small, PostgreSQL would otherwise scan it for each batch.
_BEGIN_WRITING: Final = text("SELECT pg_advisory_xact_lock(:id), set_config('enable_seqscan', 'off', true)")


def parse_database_url(database_url: str) -> URL:
    """Check a URL and set its async driver, which ``sqlite:///file`` and ``postgresql://…`` may omit.

    Raises DatabaseUrlError, whose message never holds the password.
    """
    if problem := problem_of(database_url):
        raise DatabaseUrlError(f"database.url: {problem}")
    try:
        url = make_url(database_url)
    except (ArgumentError, ValueError) as error:
        raise DatabaseUrlError(f"database.url: not a database URL; examples: {EXAMPLES}") from error
    return url.set(drivername=DRIVERS[url.drivername])


def create_engine(
    database_url: str, *, statement_limit_s: float = STATEMENT_LIMIT_S, lock_limit_s: float = LOCK_LIMIT_S
) -> AsyncEngine:
    """Create an engine; it does not connect yet.

    ``statement_limit_s`` bounds every PostgreSQL statement, ``lock_limit_s`` is how long SQLite waits for another
    writer. Raises DatabaseUrlError.
    """
    url = parse_database_url(database_url)
    if url.get_backend_name() == "sqlite":
        engine = create_async_engine(url, connect_args={"timeout": lock_limit_s, "async_creator_fn": _open_sqlite})
        event.listen(engine.sync_engine, "connect", _prepare_sqlite)
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
        return engine
    # The ping finds connections that a restarted server has dropped, before a transaction does.
    limits: dict[str, Any] = {"timeout": CONNECT_LIMIT_S, "command_timeout": statement_limit_s}
    connect_args = {**limits, "async_creator_fn": _open_postgresql}
    return create_async_engine(url, pool_pre_ping=True, connect_args=connect_args)


def changing(engine: AsyncEngine) -> contextlib.AbstractAsyncContextManager[AsyncConnection]:
    """Begin a transaction that writes, possibly after reading."""
    return engine.execution_options(**{SQLITE_BEGIN: IMMEDIATE}).begin()


@contextlib.asynccontextmanager
async def writing(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """Begin a transaction that writes the ledger: the only one until it ends."""
    async with changing(engine) as connection:
        if connection.dialect.name == "postgresql":
            await connection.execute(_BEGIN_WRITING, {"id": WRITER_LOCK_ID})
        yield connection


async def _open_sqlite(*arguments: Any, **options: Any) -> aiosqlite.Connection:  # noqa: ANN401  # as sqlite3.connect has them
    """Open a connection; one that cannot be opened ends its thread first.

    aiosqlite only tells the thread to end. Where the event loop ended sooner, the thread died with a traceback.
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
    """Open a connection. An error names host and port, which neither the socket's nor the server's own does."""
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
