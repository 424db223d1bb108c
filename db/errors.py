"""What goes wrong with SQL, and the exceptions by which drivers say so.

DatabaseError
├── DatabaseUrlError     the configured URL is unusable
├── DatabaseUnavailable  SQL did not do what was asked: down, locked, full, wrong password
└── SchemaMismatch       the tables are not those this build was written for
"""

from typing import Final

import asyncpg
from sqlalchemy.exc import SQLAlchemyError


class DatabaseError(Exception):
    """Something is wrong with the database."""


class DatabaseUrlError(DatabaseError, ValueError):
    """The configured URL is unusable; the message names the configuration key."""


class DatabaseUnavailable(DatabaseError):
    """SQL did not do what was asked; later it may."""


class SchemaMismatch(DatabaseError):
    """The tables are not those this build was written for; the message says what to run."""


# asyncpg raises its own errors and the socket's while connecting; only later ones are wrapped by SQLAlchemy.
SQL_ERRORS: Final[tuple[type[Exception], ...]] = (
    SQLAlchemyError,
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
)


def describe(error: Exception) -> str:
    """One line on what went wrong, without SQLAlchemy's statement and background link."""
    cause = getattr(error, "orig", None) or error
    return " ".join(str(cause).split()) or type(cause).__name__
