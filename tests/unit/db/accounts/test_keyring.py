import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.keyring import KeyRing
from db.accounts.keys import create_key, revoke_key
from db.accounts.principal import DEFAULT_TEAM_ID, Principal
from db.engine import SchemaMismatch, create_engine
from protocol import subjects
from protocol.nats.bus import Bus
from tests.waiting import until

PEPPER = SecretStr("p" * 64)


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="test")
    yield bus
    await bus.close()


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


@contextlib.asynccontextmanager
async def running_keyring(database_url: str, bus: Bus, pepper: SecretStr = PEPPER) -> AsyncIterator[KeyRing]:
    keyring = KeyRing(database_url, pepper, bus)
    await keyring.start()
    running = asyncio.create_task(keyring.run())
    try:
        yield keyring
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await keyring.close()


async def test_a_key_tells_its_principal_and_any_other_text_nobody(
    database_url: str, bus: Bus, engine: AsyncEngine
) -> None:
    key, token = await create_key(engine, "team a", PEPPER)
    async with running_keyring(database_url, bus) as keyring:
        principal = Principal(key.key_id, "team a", DEFAULT_TEAM_ID, "default", "org_default")
        assert keyring.authenticate(token) == principal
        assert principal.tenant == key.key_id
        for wrong in ("", token[:-1], token + "x", token.lower(), "sk-sw-é", "x" * 10_000, "\ud800", key.key_id):
            assert keyring.authenticate(wrong) is None
    async with running_keyring(database_url, bus, SecretStr("q" * 64)) as keyring:
        assert keyring.authenticate(token) is None


async def test_the_stored_hmac_is_not_a_key(database_url: str, bus: Bus, engine: AsyncEngine) -> None:
    await create_key(engine, "a", PEPPER)
    async with engine.connect() as connection:
        stored = (await connection.execute(text("SELECT token_hmac FROM api_keys"))).scalar_one()
    async with running_keyring(database_url, bus) as keyring:
        assert keyring.authenticate(stored) is None


async def test_a_message_makes_new_keys_known_and_revoked_ones_unknown(
    database_url: str, bus: Bus, engine: AsyncEngine
) -> None:
    async with running_keyring(database_url, bus) as keyring:
        _, token = await create_key(engine, "a", PEPPER)
        assert keyring.authenticate(token) is None
        await bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
        await until(lambda: keyring.authenticate(token) is not None)
        await revoke_key(engine, "a")
        await bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
        await until(lambda: keyring.authenticate(token) is None)


async def test_known_keys_stay_valid_while_sql_is_away(
    database_url: str, bus: Bus, engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    _, token = await create_key(engine, "a", PEPPER)
    async with running_keyring(database_url, bus) as keyring:
        async with engine.begin() as connection:
            await connection.execute(text("ALTER TABLE api_keys RENAME TO api_keys_away"))
        for _ in range(2):
            await bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
            await until(lambda: "keeping the 1 known" in caplog.text)
        assert keyring.authenticate(token) is not None
        assert keyring.may_be_old
        async with engine.begin() as connection:
            await connection.execute(text("ALTER TABLE api_keys_away RENAME TO api_keys"))
        _, later = await create_key(engine, "b", PEPPER)
        await bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
        await until(lambda: keyring.authenticate(later) is not None)
        await until(lambda: not keyring.may_be_old)  # another change may have been announced meanwhile
    failures = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(failures) == 1


async def test_start_waits_for_sql_and_says_so(
    database_url: str, bus: Bus, engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    _, token = await create_key(engine, "a", PEPPER)
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE api_keys RENAME TO api_keys_away"))
    keyring = KeyRing(database_url, PEPPER, bus)
    starting = asyncio.create_task(keyring.start())
    await until(lambda: "waiting for the database: " in caplog.text)
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE api_keys_away RENAME TO api_keys"))
    await starting
    assert keyring.authenticate(token) is not None
    assert "the database is available again" in caplog.text
    await keyring.close()


async def test_start_fails_where_the_schema_is_another(tmp_path, bus: Bus) -> None:
    keyring = KeyRing(f"sqlite:///{tmp_path}/empty.db", PEPPER, bus)
    with pytest.raises(SchemaMismatch):
        await keyring.start()
    await keyring.close()
