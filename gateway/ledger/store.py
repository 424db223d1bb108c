"""Usage records into SQL: each exactly once, however often it is delivered."""

from collections.abc import Sequence
from typing import Any, Final

import asyncpg
import msgspec
from sqlalchemy import Insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.errors import SQL_ERRORS, DatabaseUnavailable, describe
from gateway.db.models import AttemptRow, Base, RequestRow
from protocol.messages import AttemptRecord, RequestRecord, UsageRecord

# SQLSTATE classes 22 (data exception) and 23 (integrity constraint violation): this row will never be accepted.
REFUSED_SQLSTATE_CLASSES: Final = ("22", "23")


class RecordRefused(Exception):
    """The database will never accept one of the records: a number out of range, a character it cannot hold."""


async def store_records(engine: AsyncEngine, records: Sequence[UsageRecord]) -> None:
    """Insert the records in one transaction, passing over those already there.

    Raises RecordRefused (nothing was stored) or DatabaseUnavailable (unknown whether anything was: call again).
    """
    requests = [_row(record) for record in records if isinstance(record, RequestRecord)]
    attempts = [_row(record) for record in records if isinstance(record, AttemptRecord)]
    try:
        async with engine.begin() as connection:
            if requests:
                await connection.execute(_insert_new(RequestRow, engine.dialect.name), requests)
            if attempts:
                await connection.execute(_insert_new(AttemptRow, engine.dialect.name), attempts)
    except OverflowError as error:  # sqlite3's own, for integers beyond 64 bits
        raise RecordRefused(describe(error)) from error
    except SQL_ERRORS as error:
        if _is_refusal(error):
            raise RecordRefused(describe(error)) from error
        raise DatabaseUnavailable(describe(error)) from error


def _row(record: UsageRecord) -> dict[str, Any]:
    row = msgspec.structs.asdict(record)
    del row["v"]
    return row


def _insert_new(table: type[Base], dialect: str) -> Insert:
    insert = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return insert(table).on_conflict_do_nothing()


def _is_refusal(error: Exception) -> bool:
    # A false yes loses a record, a false no stops the ledger until somebody looks: only what is certain counts.
    if isinstance(error, (DataError, IntegrityError)):
        return True
    driver_error = getattr(error, "orig", None)
    if isinstance(getattr(driver_error, "__cause__", None), asyncpg.DataError):  # refused before it was sent
        return True
    sqlstate = getattr(driver_error, "sqlstate", None) or ""
    return sqlstate.startswith(REFUSED_SQLSTATE_CLASSES)
