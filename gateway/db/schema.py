"""Whether the database has the tables this build was written for. Making them is the business of ``migrations/``."""

from typing import Final

from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.errors import SQL_ERRORS, DatabaseUnavailable, SchemaMismatch, describe

SCHEMA_VERSION: Final = "0006"  # the newest revision in migrations/versions; a test keeps both equal
VERSION_TABLE: Final = "alembic_version"


async def check_schema(engine: AsyncEngine) -> None:
    """Return if the schema fits. Raises SchemaMismatch or DatabaseUnavailable."""
    try:
        async with engine.connect() as connection:
            found = await connection.run_sync(read_schema_version)
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(f"database {engine.url!r} is unreachable: {describe(error)}") from error
    if found != SCHEMA_VERSION:
        raise SchemaMismatch(
            f"database schema is {found or 'empty'}, this build needs {SCHEMA_VERSION}: run `spillway db upgrade`"
        )


def read_schema_version(connection: Connection) -> str | None:
    """The revision that the database is at; None if it has never been migrated."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608
