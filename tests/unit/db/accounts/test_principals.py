"""The fields of a key and its team that become a principal."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from pydantic import SecretStr
from sqlalchemy import CursorResult, insert, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.accounts.keys import Grant, create_key, load_principals
from db.accounts.principal import ADMIN, DEFAULT_TEAM_ID, INFERENCE, Policy, Principal
from db.accounts.teams import create_team
from db.accounts.token import hash_token
from db.engine import create_engine
from db.tables import ApiKeyRow, TeamRow

PEPPER = SecretStr("p" * 64)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


async def principal_of(engine: AsyncEngine, token: str) -> Principal | None:
    async with engine.connect() as connection:
        return (await load_principals(connection)).get(hash_token(token, PEPPER))


async def test_a_key_without_a_team_of_its_own_is_a_tenant_of_its_own(engine: AsyncEngine) -> None:
    key, token = await create_key(engine, "a", PEPPER)
    principal = await principal_of(engine, token)
    assert principal == Principal(key.key_id, "a", DEFAULT_TEAM_ID, "default", "org_default")
    assert principal.tenant == key.key_id
    assert principal.may_use("any")


async def test_a_key_has_the_grant_and_the_teams_policy(engine: AsyncEngine) -> None:
    team = {"id": "team_a", "organisation_id": "org_default", "name": "A", "created_unix_ms": 1, "weight": 3.0}
    async with engine.begin() as connection:
        await connection.execute(insert(TeamRow).values(team))
    policy = Policy(requests_per_minute=60, budget_nano_usd=5 * 10**9, budget_period="month", allow_hosted=("openai",))
    grant = Grant("team_a", (INFERENCE, ADMIN), ("small", "large"), 2_000_000_000_000, policy)
    _, token = await create_key(engine, "a", PEPPER, grant)
    principal = await principal_of(engine, token)
    assert principal is not None
    assert principal.tenant == principal.team_id == "team_a"
    assert principal.scopes == {INFERENCE, ADMIN}
    assert principal.models == frozenset({"small", "large"})
    assert not principal.may_use("other")
    assert principal.key_policy == policy
    assert principal.team_policy == Policy(weight=3.0)
    assert not principal.has_expired(1_999_999_999_999)
    assert principal.has_expired(2_000_000_000_000)


async def test_the_token_before_a_rotation_ends_with_its_grace(engine: AsyncEngine) -> None:
    key, token = await create_key(engine, "a", PEPPER)
    until_unix_ms = time.time_ns() // 1_000_000 + 1000
    rotated = {"previous_hmac": hash_token(token, PEPPER), "previous_until_unix_ms": until_unix_ms}
    async with engine.begin() as connection:
        new = {"token_hmac": hash_token("new", PEPPER), **rotated}
        await connection.execute(update(ApiKeyRow).where(ApiKeyRow.id == key.key_id).values(new))
    before, after = await principal_of(engine, token), await principal_of(engine, "new")
    assert before is not None
    assert after is not None
    assert after.expires_unix_ms is None
    assert before == replace(after, expires_unix_ms=until_unix_ms)


class Interrupted:
    """A connection between whose first statement and the next one something else happens."""

    def __init__(self, connection: AsyncConnection, meanwhile: Callable[[], Awaitable[None]]) -> None:
        self._connection = connection
        self._meanwhile = [meanwhile]

    async def execute(self, statement: Any) -> CursorResult[Any]:
        result = await self._connection.execute(statement)
        if self._meanwhile:
            await self._meanwhile.pop()()
        return result


async def test_a_key_that_is_made_while_keys_are_read(postgres_url: str) -> None:
    """PostgreSQL's statements see what is committed between them; a key whose team was not there ended the gateway."""
    engine = create_engine(postgres_url)

    async def make_a_key() -> None:
        await create_team(engine, "A", "cli:test")
        await create_key(engine, "a", PEPPER, Grant("A"))

    async with engine.connect() as connection:
        await load_principals(cast("AsyncConnection", Interrupted(connection, make_a_key)))
        assert [principal.team_name for principal in (await load_principals(connection)).values()] == ["A"]
    await engine.dispose()


def test_a_keys_weight_and_priority_come_before_its_teams() -> None:
    def of(key: Policy, team: Policy) -> tuple[float | None, bool]:
        principal = Principal("key_a", "a", "team_a", "A", "org_default", key_policy=key, team_policy=team)
        return principal.weight, principal.is_batch_only

    none, batch = Policy(), Policy(weight=3.0, priority="batch")
    assert of(none, none) == (None, False)
    assert of(none, batch) == of(batch, none) == (3.0, True)
    assert of(Policy(weight=2.0, priority="interactive"), batch) == (2.0, False)
