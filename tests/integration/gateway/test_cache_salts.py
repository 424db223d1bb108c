"""The salts of jobs, by which workers keep tenants' prompts apart in their prefix caches."""

from typing import Any

import pytest

from db.accounts.principal import CACHE_SALT_BYTES, cache_salt_of
from db.accounts.teams import create_team
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayOfOneTest, Share
from tests.integration.gateway.scripted_worker import Attempt, answer_hello

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


async def ask(gateway: GatewayOfOneTest, token: str) -> None:
    await gateway.client(api_key=token).chat.completions.create(model=MODEL, messages=HELLO)


async def test_a_salt_is_the_tenants_on_every_attempt(share_gateway: Share) -> None:
    gateway = await share_gateway()
    team = await create_team(gateway.engine, "salted", "test")
    keys: dict[str, dict[str, str]] = {
        "alone": {},
        "also alone": {},
        "of the team": {"team_id": team.team_id},
        "also of it": {"team_id": team.team_id},
    }

    async def fail_at_first(attempt: Attempt) -> None:
        await attempt.accept()
        if attempt.job.attempt == 1:
            await attempt.tokens("Hel", (1, 2))
            await attempt.fail("worker_draining", "bye", retryable=True)
        else:
            await attempt.tokens("lo", (3,), finish_reason="stop")
            await attempt.finish()

    worker = await gateway.add_worker(script=fail_at_first)
    salts: dict[str, set[str]] = {}
    for name, grant in keys.items():
        key_id, token = await gateway.make_key(**grant)
        await ask(gateway, token)
        attempts, worker.attempts = worker.attempts, []
        assert [attempt.job.attempt for attempt in attempts] == [1, 2]
        salts[name] = {attempt.job.cache_salt for attempt in attempts}
        assert salts[name] == {cache_salt_of(grant.get("team_id", key_id), PEPPER)}
    assert salts["of the team"] == salts["also of it"]
    assert len({*salts["alone"], *salts["also alone"], *salts["of the team"]}) == 3
    assert {len(salt) for salt in salts["alone"]} == {2 * CACHE_SALT_BYTES}


async def test_an_operator_may_share_the_cache_among_tenants(share_gateway: Share) -> None:
    gateway = await share_gateway(share_prefix_cache=True)
    worker = await gateway.add_worker(script=answer_hello)
    _, token = await gateway.make_key()
    await ask(gateway, token)
    assert [attempt.job.cache_salt for attempt in worker.attempts] == [""]


@pytest.mark.parametrize("field", ["cache_salt", "extra_key", "user_id"])
async def test_a_caller_cannot_choose_the_salt(share_gateway: Share, field: str) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker(script=answer_hello)
    key_id, token = await gateway.make_key()
    theirs = cache_salt_of("another", PEPPER)
    client = gateway.client(api_key=token)
    await client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={field: theirs})
    assert [attempt.job.cache_salt for attempt in worker.attempts] == [cache_salt_of(key_id, PEPPER)]
