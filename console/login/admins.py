"""Users with a local password. Users who log in by OIDC are known to the issuer only."""

import asyncio
from typing import Final

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from console.login.passwords import COST, DUMMY_HASH, hash_password, is_password
from db.accounts.audit import Change, record
from db.accounts.errors import WrongPassword
from db.engine import changing
from db.tables import AdminRow, SessionRow
from protocol.nats.clock import unix_now_ms

ADMIN_NAME: Final = "admin"  # of the one local login


async def has_admin(engine: AsyncEngine) -> bool:
    """Report whether the local login has a password. Raises SQL's own errors."""
    async with engine.connect() as connection:
        return (await connection.scalar(select(AdminRow.name).where(AdminRow.name == ADMIN_NAME))) is not None


async def set_password(
    engine: AsyncEngine, password: str, actor: str, name: str = ADMIN_NAME, *, cost: int = COST
) -> None:
    """Give the local login this password; all its sessions end. Raises BadPassword, and SQL's own errors."""
    row = {
        "password_hash": await asyncio.to_thread(hash_password, password, cost),
        "changed_unix_ms": unix_now_ms(),
    }
    async with changing(engine) as connection:
        changed = await connection.execute(update(AdminRow).where(AdminRow.name == name).values(row))
        if not changed.rowcount:
            await connection.execute(insert(AdminRow).values(name=name, **row))
        await connection.execute(delete(SessionRow).where(SessionRow.user_name == name))
        await record(connection, Change(actor, "admin.password", f"user:{name}"))


async def check_password(engine: AsyncEngine, name: str, password: str) -> None:
    """Check a user's password. Raises WrongPassword, and SQL's own errors."""
    async with engine.connect() as connection:
        known = select(AdminRow.password_hash).where(AdminRow.name == name)
        stored = await connection.scalar(known) if name.isprintable() else None  # PostgreSQL takes no NUL in a text
    # The answer takes as long for an unknown name as for a known one.
    is_right = await asyncio.to_thread(is_password, password, stored or DUMMY_HASH)
    if stored is None or not is_right:
        raise WrongPassword("Wrong user name or password.")
