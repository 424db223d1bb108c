"""Errors of SQL, and the drivers' exceptions behind them.

DatabaseError
├── DatabaseUrlError     the configured URL is unusable
├── DatabaseUnavailable  SQL failed, and may work later: down, locked, full, wrong password
└── SchemaMismatch       the tables are not those this build was written for
"""

from typing import Final

import asyncpg
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from protocol.errors import ExpectedError


class DatabaseError(ExpectedError):
    """The database cannot be used."""


class DatabaseUrlError(DatabaseError, ValueError):
    """The configured URL is unusable; the message names the configuration key."""


class DatabaseUnavailable(DatabaseError):
    """SQL failed, and may work later."""


class SchemaMismatch(DatabaseError):
    """The tables are not those this build was written for; the message names the command to run."""


# asyncpg raises its own errors and the socket's while connecting; only later ones are wrapped by SQLAlchemy.
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
    """Report whether the database will never accept the row that caused this error."""
    # A false True loses a record, a false False blocks the ledger until an operator acts: only certain errors count.
    if isinstance(error, (DataError, IntegrityError, asyncpg.DataError)):
        return True
    driver_error = getattr(error, "orig", None) or error  # COPY's errors come as the driver's own
    if isinstance(getattr(driver_error, "__cause__", None), asyncpg.DataError):  # refused before it was sent
        return True
    sqlstate = getattr(driver_error, "sqlstate", None) or ""
    return sqlstate.startswith(REFUSED_SQLSTATE_CLASSES)
