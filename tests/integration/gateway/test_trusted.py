"""Keys and teams that demand trusted pools: what they are refused, and that no hosted API gets their prompts."""

import asyncio
from typing import Any

import pytest

from db.accounts.keys import Grant, create_key
from db.accounts.principal import Policy
from db.accounts.teams import create_team
from db.engine import create_engine
from tests.integration.gateway.conftest import MODEL, PEPPER, Start
from tests.integration.gateway.test_hosted import AT_ONCE, HOSTED, ask, pool, until_known, where

VAULT = ("vault", "own", "cellar", "reserved")
BOTH: dict[str, Any] = {"trusted": {MODEL}}
ONLY: dict[str, Any] = {**BOTH, "only_trusted": {MODEL}}


@pytest.fixture
async def confidential(sqlite_url: str) -> str:
    """A key that demands nothing, of a team that does."""
    engine = create_engine(sqlite_url)
    team = await create_team(engine, "legal", "test", policy=Policy(trusted_only=True, allow_hosted=("*",)))
    _, token = await create_key(engine, "memo", PEPPER, Grant(team.team_id, policy=Policy(trusted_only=False)))
    await engine.dispose()
    return token


async def test_who_finds_no_pool_of_the_right_trust_is_told_at_once(start_gateway: Start, confidential: str) -> None:
    gateway = await start_gateway()
    refused = await ask(gateway, confidential)
    assert (refused.status_code, refused.code, refused.param) == (404, "no_trusted_pool", "model")
    assert "requires trusted pools" in refused.message
    both, only = await start_gateway(**BOTH), await start_gateway(**ONLY)
    refused = await ask(only, only.key)
    assert (refused.status_code, refused.code, refused.param) == (404, "only_trusted_pools", "model")
    for one, key in ((both, both.key), (both, confidential), (only, confidential)):  # as for any pool without workers
        refused = await ask(one, key, extra_body={"do_not_queue": True})
        assert (refused.status_code, refused.code) == (503, "no_workers")


async def test_a_trusted_pools_room_is_not_for_others(start_gateway: Start, confidential: str) -> None:
    gateway = await start_gateway(**BOTH, open_metrics=True)
    vault = await gateway.add_worker("vault-1", place=VAULT, trusted=True)
    await until_known(gateway, vault)
    refused = await ask(gateway, gateway.key, extra_body={"do_not_queue": True})
    assert (refused.status_code, refused.code) == (503, "no_workers")
    assert where(await ask(gateway, confidential, extra_body={"do_not_queue": True})) == VAULT


async def test_no_hosted_api_gets_their_prompts(start_gateway: Start, confidential: str) -> None:
    """Not even where they may use one by another policy, nobody else is there, and all others go there."""
    gateway = await start_gateway(**pool(), **BOTH, only_hosted={MODEL}, open_metrics=True, timeouts=AT_ONCE)
    api = await gateway.add_worker("api-1", place=HOSTED)
    await until_known(gateway, api)
    refused = await ask(gateway, confidential, extra_body={"allow_hosted": True})
    assert (refused.status_code, refused.code) == (403, "hosted_not_allowed")
    waiting = asyncio.create_task(ask(gateway, confidential))
    vault = await gateway.add_worker("vault-1", place=VAULT, trusted=True)
    assert where(await waiting) == VAULT
    assert (len(vault.requests), len(api.requests)) == (1, 0)
