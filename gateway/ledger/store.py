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
from protocol.errors import ErrorCode
from protocol.usage import AttemptRecord, RequestRecord, UsageRecord

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
                await connection.execute(_insert_request(engine.dialect.name), requests)
            if attempts:
                await connection.execute(insert_new(AttemptRow, engine.dialect.name), attempts)
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


def insert_new(table: type[Base], dialect: str) -> Insert:
    """An insert that passes over rows whose key is there."""
    return _insert(table, dialect).on_conflict_do_nothing()


def _insert_request(dialect: str) -> Insert:
    """The same; but a gateway's own word takes the place of what was said for it (gateway.ledger.abandoned)."""
    insert = _insert(RequestRow, dialect)
    columns = [column.name for column in RequestRow.__table__.columns if not column.primary_key]
    return insert.on_conflict_do_update(
        index_elements=["request_id"],
        set_={name: insert.excluded[name] for name in columns},
        where=RequestRow.error_code == ErrorCode.GATEWAY_LOST,
    )


def _insert(table: type[Base], dialect: str) -> postgresql.Insert | sqlite.Insert:
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def _is_refusal(error: Exception) -> bool:
    # A false yes loses a record, a false no stops the ledger until somebody looks: only what is certain counts.
    if isinstance(error, (DataError, IntegrityError)):
        return True
    driver_error = getattr(error, "orig", None)
    if isinstance(getattr(driver_error, "__cause__", None), asyncpg.DataError):  # refused before it was sent
        return True
    sqlstate = getattr(driver_error, "sqlstate", None) or ""
    return sqlstate.startswith(REFUSED_SQLSTATE_CLASSES)
