"""Checks of database URLs. Imports no SQL, because settings import this module."""

import re
from typing import Annotated, Final

from pydantic import AfterValidator

DRIVERS: Final = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
}
EXAMPLES: Final = "sqlite:///data/spillway.db, postgresql://user@host/spillway"
# Percent codes in a user name or a password. The driver also accepts the characters of MISREAD; other programs do not.
CODES: Final = {"@": "%40", "/": "%2F", ":": "%3A", "#": "%23", "?": "%3F"}
MISREAD: Final = "/:#?"
MAX_PORT: Final = 65_535

_AUTHORITY: Final = re.compile(
    r"(?:(?P<user>[^@:/]*)(?::(?P<password>[^@]*))?@)?(?P<host>\[[^\]]*\]|[^:/?\[\]]*)(?::(?P<port>[^/?]*))?(?:[/?].*)?"
)


def problem_of(url: str) -> str:
    """Return why a URL is invalid and how to fix it, without its password; empty for a valid URL."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        return f"not a database URL. Examples: {EXAMPLES}"
    if scheme not in DRIVERS:
        wanted = "sqlite:///…" if "sqlite" in scheme else "postgresql://…" if "postgres" in scheme else ""
        return f"unsupported database {scheme!r}. Use {wanted or 'sqlite:///… or postgresql://…'}"
    if any(character.isspace() for character in url):
        return "contains white space. In a password, write a space as %20"
    return _problem_of_file(rest) if scheme.startswith("sqlite") else _problem_of_server(rest)


def _problem_of_server(rest: str) -> str:
    if rest.partition("?")[0].count("@") > 1:
        return f"contains more than one @. {_advice('@')}"
    found = _AUTHORITY.fullmatch(rest)
    if found is None:
        return f"not a database URL. Examples: {EXAMPLES}"
    port = found["port"]
    if port is None or (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        return ""
    # Without a user, the text at the place of the port may be a password.
    shown = "its port" if found["user"] is None else f"the port {port!r}"
    return f"{shown} is not a number from 1 to {MAX_PORT}. Example: postgresql://user:password@host:5432/database"


def advice_of(url: str) -> str:
    """Return a suggestion for a URL that works but that other programs misread; empty for none."""
    found = _AUTHORITY.fullmatch(url.partition("://")[2])
    password = "" if found is None else found["password"] or ""
    return next((_advice(character) for character in password if character in MISREAD), "")


def _advice(character: str) -> str:
    return f"In a password, write {character} as {CODES[character]}"


def _problem_of_file(path: str) -> str:
    path = path.partition("?")[0]
    if path in {"", "/", "/:memory:"}:
        return "SQLite needs a file (sqlite:///path), because several processes share it"
    if not path.startswith("/"):
        return "use sqlite:/// with three slashes for a relative path, and four for an absolute path"
    return ""


def _is_usable(url: str) -> str:
    if problem := problem_of(url):
        raise ValueError(problem)
    return url


DatabaseUrl = Annotated[str, AfterValidator(_is_usable)]
