import contextlib
import hashlib
import hmac
import re
import sqlite3
from collections.abc import AsyncIterator

import pytest
from pydantic import SecretStr
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.errors import AmbiguousKey, InvalidName, NameTaken, UnknownKey
from db.accounts.keys import create_key, list_keys, revoke_key
from db.engine import create_engine

PEPPER = SecretStr("p" * 64)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


async def insert_key(engine: AsyncEngine, key_id: str) -> None:
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO api_keys (id, name, token_hmac, last_four, created_unix_ms, team_id, scopes)"
                " VALUES (:id, :id, :id, 'abcd', 1, 'team_default', 'inference')"
            ).bindparams(id=key_id)
        )


async def test_a_key_has_256_random_bits_and_only_its_hmac_is_stored(engine: AsyncEngine) -> None:
    key, token = await create_key(engine, "team a", PEPPER)
    _, other = await create_key(engine, "team b", PEPPER)
    assert re.fullmatch(r"sk-sw-[0-9A-Za-z]{43}", token)  # 62**43 > 2**256
    assert token != other
    async with engine.connect() as connection:
        row = (await connection.execute(text("SELECT * FROM api_keys WHERE id = :id"), {"id": key.key_id})).one()
    assert not any(token in str(value) for value in row)
    assert row.token_hmac == hmac.new(b"p" * 64, token.encode(), hashlib.sha256).hexdigest()
    assert row.last_four == key.last_four == token[-4:]


async def test_keys_are_listed_oldest_first_and_revoked_ones_on_demand(engine: AsyncEngine) -> None:
    first, _ = await create_key(engine, "a", PEPPER)
    second, _ = await create_key(engine, "b", PEPPER)
    revoked = await revoke_key(engine, first.key_id)
    assert revoked.revoked_unix_ms is not None
    assert [key.name for key in await list_keys(engine)] == [second.name]
    assert set(await list_keys(engine, include_revoked=True)) == {revoked, second}


async def test_an_active_name_is_taken_and_a_revoked_one_is_free(engine: AsyncEngine) -> None:
    await create_key(engine, "a", PEPPER)
    with pytest.raises(NameTaken, match="'a'"):
        await create_key(engine, "a", PEPPER)
    await revoke_key(engine, "a")
    await create_key(engine, "a", PEPPER)
    await revoke_key(engine, "a")
    assert len(await list_keys(engine, include_revoked=True)) == 2


@pytest.mark.parametrize("name", ["", "  ", "x" * 101, "a\nb", "a\x00b"])
async def test_a_bad_name_is_refused(engine: AsyncEngine, name: str) -> None:
    with pytest.raises(InvalidName):
        await create_key(engine, name, PEPPER)


async def test_a_key_is_revoked_by_a_prefix_of_its_id_if_no_other_has_it(engine: AsyncEngine) -> None:
    for key_id in ("key_AAx", "key_AAy", "key_aaz"):
        await insert_key(engine, key_id)
    with pytest.raises(AmbiguousKey, match="2 active keys"):
        await revoke_key(engine, "key_AA")
    assert (await revoke_key(engine, "key_aa")).key_id == "key_aaz"
    assert (await revoke_key(engine, "key_AAx")).key_id == "key_AAx"
    assert (await revoke_key(engine, "key_AA")).key_id == "key_AAy"


@pytest.mark.parametrize("reference", ["", "key_", "key_%", "nobody"])
async def test_an_unknown_or_too_short_reference_revokes_nothing(engine: AsyncEngine, reference: str) -> None:
    await insert_key(engine, "key_AAx")
    with pytest.raises(UnknownKey):
        await revoke_key(engine, reference)
    assert len(await list_keys(engine)) == 1


async def test_a_revoked_key_cannot_be_revoked_again(engine: AsyncEngine) -> None:
    key, _ = await create_key(engine, "a", PEPPER)
    await revoke_key(engine, key.key_id)
    with pytest.raises(UnknownKey):
        await revoke_key(engine, key.key_id)


async def test_revoking_keeps_other_writers_of_the_sqlite_file_out(sqlite_url: str) -> None:
    # Revoking reads, then writes. When the ledger wrote in between, it failed with "database is locked", unwaited.
    engine = create_engine(sqlite_url)
    key, _ = await create_key(engine, "a", PEPPER)
    refused: list[str] = []

    def write_in_between(_connection, _cursor, statement: str, *_rest: object) -> None:
        if statement.startswith("SELECT"):
            path = sqlite_url.removeprefix("sqlite:///")
            with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
                try:
                    other.execute("CREATE TABLE other (x INTEGER)")
                except sqlite3.OperationalError as error:
                    refused.append(str(error))

    event.listen(engine.sync_engine, "after_cursor_execute", write_in_between)
    assert (await revoke_key(engine, "a")).key_id == key.key_id
    assert set(refused) == {"database is locked"}
    await engine.dispose()
