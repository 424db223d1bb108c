"""Connections of operators' commands to the database and to the queue server."""

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import SQL_ERRORS, DatabaseUnavailable, create_engine, describe
from protocol.nats.access import access_options
from protocol.nats.bus import Bus
from spillway.cli.context import fail
from spillway.config import Config

_HINT: Final = "; run `spillway db upgrade`"
_NO_TABLE: Final = re.compile(r"no such (table|column)|(relation|column) .* does not exist")  # SQLite's, PostgreSQL's
CONNECT_LIMIT_S: Final = 5.0  # short: the user is waiting for the command
LOCK_LIMIT_S: Final = 30.0  # for another writer of SQLite; long, so that the user need not repeat the command


def _need_file(database_url: str) -> None:
    """Raise if an SQLite file is missing: connecting would create an empty one."""
    url = make_url(database_url)
    if url.get_backend_name() == "sqlite" and url.database and not Path(url.database).exists():
        raise DatabaseUnavailable(f"database.url: {url.database} does not exist{_HINT}")


def _message(error: Exception) -> str:
    """Describe an error; for missing tables, with the command that creates them."""
    text = describe(error)
    return f"database.url: {text}{_HINT if _NO_TABLE.search(text) else ''}"


@contextlib.asynccontextmanager
async def database(config: Config) -> AsyncIterator[AsyncEngine]:
    """Open the configured database, and close it afterwards. Raises DatabaseUnavailable instead of SQL errors."""
    _need_file(config.database_url)
    engine = create_engine(config.database_url, lock_limit_s=LOCK_LIMIT_S)
    try:
        yield engine
    except DatabaseUnavailable as error:
        raise DatabaseUnavailable(_message(error)) from error
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(_message(error)) from error
    finally:
        await engine.dispose()


async def connect_admin(config: Config, name: str, limit_s: float) -> Bus:
    """Connect to the configured queue server with the credentials of ``admin``. Raises BusError."""
    access = access_options(config.nats.credentials_of("admin"), config.nats.ca_file, "admin")
    return await Bus.connect(list(config.nats.urls), name=name, options=access, first_limit_s=limit_s)


@contextlib.asynccontextmanager
async def queue_server(config: Config, name: str) -> AsyncIterator[Bus]:
    """Connect to the configured queue server as ``name``, and disconnect afterwards. Raises BusError.

    Ends the command with an error message if none is configured.
    """
    if not config.nats.urls:
        raise fail("nats.urls: no queue server is configured, and no `spillway up` is running in this data folder")
    bus = await connect_admin(config, name, CONNECT_LIMIT_S)
    try:
        yield bus
    finally:
        await bus.close()
