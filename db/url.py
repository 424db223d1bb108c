"""What the URL of a database must look like. Settings import this: it imports no SQL."""

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
# In a user name or a password. The driver also takes those of MISREAD as they are; other programs do not.
CODES: Final = {"@": "%40", "/": "%2F", ":": "%3A", "#": "%23", "?": "%3F"}
MISREAD: Final = "/:#?"
MAX_PORT: Final = 65_535

_AUTHORITY: Final = re.compile(
    r"(?:(?P<user>[^@:/]*)(?::(?P<password>[^@]*))?@)?(?P<host>\[[^\]]*\]|[^:/?\[\]]*)(?::(?P<port>[^/?]*))?(?:[/?].*)?"
)


def problem_of(url: str) -> str:
    """Return why a URL is unusable and what to write, without its password; empty for a good one."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        return f"not a database URL; examples: {EXAMPLES}"
    if scheme not in DRIVERS:
        wanted = "sqlite:///…" if "sqlite" in scheme else "postgresql://…" if "postgres" in scheme else ""
        return f"unsupported database {scheme!r}; use {wanted or 'sqlite:///… or postgresql://…'}"
    if any(character.isspace() for character in url):
        return "holds white space; in a password, a space is written %20"
    return _problem_of_file(rest) if scheme.startswith("sqlite") else _problem_of_server(rest)


def _problem_of_server(rest: str) -> str:
    if rest.partition("?")[0].count("@") > 1:
        return f"more than one @: {_advice('@')}"
    found = _AUTHORITY.fullmatch(rest)
    if found is None:
        return f"not a database URL; examples: {EXAMPLES}"
    port = found["port"]
    if port is None or (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        return ""
    # Without a user, what looks like the port may be a password.
    shown = "its port" if found["user"] is None else f"the port {port!r}"
    return f"{shown} is no number from 1 to {MAX_PORT}; postgresql://user:password@host:5432/database"


def advice_of(url: str) -> str:
    """Return what to write differently in a URL that works here; empty for nothing."""
    found = _AUTHORITY.fullmatch(url.partition("://")[2])
    password = "" if found is None else found["password"] or ""
    return next((_advice(character) for character in password if character in MISREAD), "")


def _advice(character: str) -> str:
    return f"in a password, {character} is written {CODES[character]}"


def _problem_of_file(path: str) -> str:
    path = path.partition("?")[0]
    if path in {"", "/", "/:memory:"}:
        return "SQLite needs a file (sqlite:///path), since several processes share it"
    if not path.startswith("/"):
        return "write sqlite:/// with three slashes before a relative path, with four before an absolute one"
    return ""


def _is_usable(url: str) -> str:
    if problem := problem_of(url):
        raise ValueError(problem)
    return url


DatabaseUrl = Annotated[str, AfterValidator(_is_usable)]
