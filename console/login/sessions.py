"""Sessions of the pages' users: a random token in a cookie, its hash in SQL, with the role that the user has."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import SecretStr
from sqlalchemy import ColumnElement, RowMapping, delete, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.audit import Change, record
from db.accounts.errors import UnknownSession
from db.accounts.roles import ROLES, Person, Role
from db.accounts.token import MAX_TOKEN_CHARS, hash_token, new_session_token
from db.engine import changing
from db.tables import SessionRow
from protocol.nats.clock import unix_now_ms

ID_PREFIX: Final = "sess_"
ID_CHARS: Final = 20  # of the token's hash: enough to tell sessions apart, and no use for guessing a token
MAX_BROWSER_CHARS: Final = 200
MAX_SHOWN: Final = 500

_ROWS: Final = SessionRow.__table__


@dataclass(frozen=True, slots=True)
class NewSession:
    """A user who has just logged in."""

    user: str
    role: Role
    teams: Mapping[str, Role] = field(default_factory=dict)  # team id → role, of team roles
    address: str = ""
    browser: str = ""  # its User-Agent

    @property
    def actor(self) -> str:
        """The user's name in the audit log."""
        return f"user:{self.user}"


@dataclass(frozen=True, slots=True)
class Session:
    """The session of a user who has logged in."""

    session_id: str
    user: str
    started_unix_ms: int
    ends_unix_ms: int
    role: Role
    teams: Mapping[str, Role]
    address: str
    browser: str

    @property
    def actor(self) -> str:
        """The user's name in the audit log."""
        return f"user:{self.user}"

    @property
    def person(self) -> Person:
        """The user with their role."""
        return Person(self.actor, self.role, self.teams)


class SessionStore:
    """Starts, finds and ends sessions; every gateway of the installation sees the same ones."""

    def __init__(self, engine: AsyncEngine, pepper: SecretStr, longest_s: float) -> None:
        self._engine = engine
        self._pepper = pepper
        self._longest_ms = int(longest_s * 1000)

    async def start(self, new: NewSession) -> str:
        """Start a session; return the token for the cookie. Deletes expired sessions. Raises SQL's own errors."""
        token, now_unix_ms = new_session_token(), unix_now_ms()
        row = {
            "token_hmac": hash_token(token, self._pepper),
            "user_name": new.user,
            "started_unix_ms": now_unix_ms,
            "ends_unix_ms": now_unix_ms + self._longest_ms,
            "role": new.role,
            "teams": json.dumps(dict(new.teams)),
            "address": new.address,
            "browser": _printable(new.browser),
        }
        async with changing(self._engine) as connection:
            await connection.execute(delete(SessionRow).where(SessionRow.ends_unix_ms <= now_unix_ms))
            await connection.execute(insert(SessionRow).values(row))
            about = {"role": new.role, "address": new.address}
            await record(connection, Change(new.actor, "login", new.actor, None, about))
        return token

    async def find(self, token: str) -> Session | None:
        """Return the session of a cookie's token; None if there is none or it has expired. Raises SQL's own errors."""
        if len(token) > MAX_TOKEN_CHARS:
            return None
        found = await self._select(SessionRow.token_hmac == hash_token(token, self._pepper))
        return found[0] if found else None

    async def running(self, user: str | None = None) -> Sequence[Session]:
        """Return the running sessions of a user, or of all users, newest first. Raises SQL's own errors."""
        return await self._select(*(() if user is None else (SessionRow.user_name == user,)))

    async def end(self, token: str) -> None:
        """End a session on all gateways. Raises SQL's own errors."""
        async with changing(self._engine) as connection:
            wanted = SessionRow.token_hmac == hash_token(token, self._pepper)
            user = await connection.scalar(select(SessionRow.user_name).where(wanted))
            await connection.execute(delete(SessionRow).where(wanted))
            if user is not None:
                await record(connection, Change(f"user:{user}", "logout", f"user:{user}"))

    async def end_by_id(self, session_id: str, actor: str, user: str | None = None) -> None:
        """End a session by its id, of this user if one is given. Raises UnknownSession, and SQL's own errors."""
        found = next((one for one in await self.running(user) if one.session_id == session_id), None)
        if found is None:
            raise UnknownSession(f"no session has the id {session_id!r}: it may have ended")
        begins = session_id.removeprefix(ID_PREFIX)
        async with changing(self._engine) as connection:
            await connection.execute(
                delete(SessionRow).where(SessionRow.token_hmac.startswith(begins, autoescape=True))
            )
            await record(connection, Change(actor, "session.end", found.actor, {"address": found.address}, None))

    async def _select(self, *conditions: ColumnElement[bool]) -> list[Session]:
        running = SessionRow.ends_unix_ms > unix_now_ms(), SessionRow.role.in_(ROLES)
        newest_first = _ROWS.c.started_unix_ms.desc(), _ROWS.c.token_hmac
        query = select(_ROWS).where(*running, *conditions).order_by(*newest_first).limit(MAX_SHOWN)
        async with self._engine.connect() as connection:
            return [_session(row) for row in (await connection.execute(query)).mappings()]


def _session(row: RowMapping | Mapping[str, Any]) -> Session:
    return Session(
        session_id=ID_PREFIX + row["token_hmac"][:ID_CHARS],
        user=row["user_name"],
        started_unix_ms=row["started_unix_ms"],
        ends_unix_ms=row["ends_unix_ms"],
        role=row["role"],
        teams=json.loads(row["teams"]),
        address=row["address"],
        browser=row["browser"],
    )


def _printable(text: str) -> str:
    """Return a header's text as SQL takes it."""
    return "".join(one for one in text if one.isprintable())[:MAX_BROWSER_CHARS]
