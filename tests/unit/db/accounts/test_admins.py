"""Local passwords and the sessions they open."""

import time
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr
from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from console.login.admins import ADMIN_NAME, check_password, has_admin, set_password
from console.login.passwords import DUMMY_HASH, hash_password, is_password, new_password
from console.login.sessions import NewSession, SessionStore
from db.accounts.audit import AuditFilter, list_changes
from db.accounts.errors import BadPassword, WrongPassword
from db.engine import create_engine
from db.tables import SessionRow

PEPPER = SecretStr("p" * 64)
PASSWORD = "correct horse battery"


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


@pytest.mark.slow
def test_a_hash_is_salted_and_tells_its_password_alone() -> None:
    password = new_password()
    stored = hash_password(password)
    assert stored.startswith("scrypt$16384$8$5$")
    assert password not in stored
    assert stored != hash_password(password)
    assert is_password(password, stored)
    assert not is_password(password[:-1], stored)
    assert not is_password(password, DUMMY_HASH)


@pytest.mark.parametrize("password", ["short", "x" * 257])
def test_a_password_must_be_long_but_not_a_book(password: str) -> None:
    with pytest.raises(BadPassword, match="12 to 256"):
        hash_password(password)


@pytest.mark.slow
async def test_a_password_is_checked_and_changing_it_is_written_down_and_ends_its_sessions(engine: AsyncEngine) -> None:
    assert not await has_admin(engine)
    with pytest.raises(WrongPassword):
        await check_password(engine, ADMIN_NAME, PASSWORD)
    await set_password(engine, PASSWORD, "cli:me", cost=16)
    assert await has_admin(engine)
    await check_password(engine, ADMIN_NAME, PASSWORD)
    for name, password in ((ADMIN_NAME, PASSWORD + "!"), ("somebody", PASSWORD), ("a\0", PASSWORD), ("", "")):
        with pytest.raises(WrongPassword):
            await check_password(engine, name, password)
    sessions = SessionStore(engine, PEPPER, 60)
    mine, others = (
        await sessions.start(NewSession(ADMIN_NAME, "owner")),
        await sessions.start(NewSession("a@b.example", "owner")),
    )
    await set_password(engine, PASSWORD + "2", "cli:me", cost=16)
    assert await sessions.find(mine) is None
    assert await sessions.find(others) is not None
    with pytest.raises(WrongPassword):
        await check_password(engine, ADMIN_NAME, PASSWORD)
    written = await list_changes(engine, AuditFilter(actor="cli:me"), 10)
    assert [(entry.action, entry.subject_id, entry.after) for entry in written] == [
        ("admin.password", "user:admin", None)
    ] * 2


async def test_a_session_ends_by_itself_or_when_told_and_leaves_no_token(engine: AsyncEngine) -> None:
    sessions = SessionStore(engine, PEPPER, 60)
    token, other = await sessions.start(NewSession("a", "owner")), await sessions.start(NewSession("b", "owner"))
    found = await sessions.find(token)
    assert found is not None
    assert (found.user, found.actor) == ("a", "user:a")
    assert 0 < found.ends_unix_ms - time.time() * 1000 <= 60_000
    async with engine.connect() as connection:
        kept = str((await connection.execute(select(SessionRow.__table__))).all())
    assert token not in kept
    await sessions.end(token)
    assert await sessions.find(token) is None
    assert await sessions.find("") is await sessions.find("x" * 1000) is None
    async with engine.begin() as connection:
        await connection.execute(update(SessionRow).values(ends_unix_ms=time.time_ns() // 1_000_000))
    assert await sessions.find(other) is None
    await sessions.start(NewSession("c", "owner"))
    async with engine.connect() as connection:
        assert (await connection.execute(text("SELECT user_name FROM sessions"))).scalars().all() == ["c"]
