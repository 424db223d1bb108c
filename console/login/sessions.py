"""Sessions of the pages' users: a random token in a cookie, its hash in SQL."""

from dataclasses import dataclass

from pydantic import SecretStr
from sqlalchemy import delete, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.token import MAX_TOKEN_CHARS, hash_token, new_session_token
from db.tables import SessionRow
from protocol.nats.clock import unix_now_ms


@dataclass(frozen=True, slots=True)
class Session:
    """The session of a user who has logged in."""

    user: str
    ends_unix_ms: int

    @property
    def actor(self) -> str:
        """The user's name in the audit log."""
        return f"user:{self.user}"


class SessionStore:
    """Starts, finds and ends sessions; every gateway of the installation sees the same ones."""

    def __init__(self, engine: AsyncEngine, pepper: SecretStr, longest_s: float) -> None:
        self._engine = engine
        self._pepper = pepper
        self._longest_ms = int(longest_s * 1000)

    async def start(self, user: str) -> str:
        """Start a session; return the token for the cookie. Deletes expired sessions. Raises SQL's own errors."""
        token, now_unix_ms = new_session_token(), unix_now_ms()
        row = {
            "token_hmac": hash_token(token, self._pepper),
            "user_name": user,
            "started_unix_ms": now_unix_ms,
            "ends_unix_ms": now_unix_ms + self._longest_ms,
        }
        async with self._engine.begin() as connection:
            await connection.execute(delete(SessionRow).where(SessionRow.ends_unix_ms <= now_unix_ms))
            await connection.execute(insert(SessionRow).values(row))
        return token

    async def find(self, token: str) -> Session | None:
        """Return the session of a cookie's token; None if there is none or it has expired. Raises SQL's own errors."""
        if len(token) > MAX_TOKEN_CHARS:
            return None
        query = select(SessionRow.user_name, SessionRow.ends_unix_ms).where(
            SessionRow.token_hmac == hash_token(token, self._pepper), SessionRow.ends_unix_ms > unix_now_ms()
        )
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).one_or_none()
        return None if row is None else Session(*row)

    async def end(self, token: str) -> None:
        """End a session on all gateways. Raises SQL's own errors."""
        async with self._engine.begin() as connection:
            await connection.execute(delete(SessionRow).where(SessionRow.token_hmac == hash_token(token, self._pepper)))
