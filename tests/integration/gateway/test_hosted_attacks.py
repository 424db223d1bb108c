"""Attacks on a hosted pool: prompts that must stay, and money beyond a cap."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from db.accounts.keys import find_key, update_key
from db.accounts.principal import Policy
from db.engine import create_engine
from db.money import Price, nano_usd
from db.prices import add_price
from gateway.settings import HostedPoolSettings
from ledger.settings import LedgerSettings
from ledger.store import store_records
from ledger.writer import LedgerWriter
from protocol import subjects
from protocol.errors import BusError, ErrorCode
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, ScriptedWorker, answer_hello
from tests.integration.gateway.test_hosted import (
    AT_ONCE,
    HOSTED,
    OURS,
    PRICE,
    MakeKey,
    ask,
    end,
    is_there,
    make_key,
    pool,
    spent,
    until_known,
    until_spent,
    where,
)
from tests.integration.gateway.test_lost_accounts import lose_accounts
from tests.integration.queued_jobs import until_queued
from tests.usage_records import attempt_record
from tests.waiting import until

__all__ = ["make_key"]
OTHER = ("other-api", "azure", "global", "hosted")


async def says_hello(attempt: Attempt) -> None:
    await attempt.accept()
    await attempt.tokens("Hello", (1,))


async def says_world(attempt: Attempt) -> None:
    await attempt.accept()
    await attempt.tokens(" world", (2,), finish_reason="stop")
    await attempt.finish()


async def refuse_to_send(gateway: GatewayUnderTest, sqlite_url: str, name: str) -> None:
    """A key's owner takes its leave back, and the gateway knows."""
    engine = create_engine(sqlite_url)
    await update_key(engine, (await find_key(engine, name)).key_id, {"allow_hosted": ()}, "test")
    await engine.dispose()
    await gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")


# --- prompts ----------------------------------------------------------------------------------------------------------


async def test_a_leave_that_is_taken_back_holds_for_what_waits(
    start_gateway: Start, make_key: MakeKey, sqlite_url: str
) -> None:
    changes, stays_so = await make_key("openai"), await make_key("openai/*")
    gateway = await start_gateway(**pool(), open_metrics=True)
    waiting = [asyncio.create_task(ask(gateway, key)) for key in (changes, stays_so)]
    await until_queued(gateway.bus, 2)
    await refuse_to_send(gateway, sqlite_url, "openai")

    async def is_known() -> bool:
        answer = await ask(gateway, changes, extra_body={"allow_hosted": True, "do_not_queue": True})
        return bool(answer.status_code == 403)

    await until(is_known)
    api = await gateway.add_worker("api-1", place=HOSTED)
    assert where(await waiting[1]) == HOSTED  # both were looked at
    await gateway.add_worker("ours")
    assert where(await waiting[0]) == OURS
    assert len(api.requests) == 1


async def test_a_leave_that_is_taken_back_holds_for_a_rescue(
    start_gateway: Start, make_key: MakeKey, sqlite_url: str
) -> None:
    changes, stays_so = await make_key("openai"), await make_key("openai/*")
    gateway = await start_gateway(**pool(), open_metrics=True, timeouts=AT_ONCE)

    async def stops_at_the_first_two(attempt: Attempt) -> None:
        await (answer_hello if len(ours.attempts) > 2 else says_hello)(attempt)

    ours = await gateway.add_worker("ours", script=stops_at_the_first_two)
    api = await gateway.add_worker("api-1", place=HOSTED, script=says_world)
    await until_known(gateway, ours, api)
    asked = [asyncio.create_task(ask(gateway, key)) for key in (changes, stays_so)]
    await until(lambda: len(ours.attempts) == 2)
    await refuse_to_send(gateway, sqlite_url, "openai")

    async def is_known() -> bool:
        answer = await ask(gateway, changes, extra_body={"allow_hosted": True, "do_not_queue": True})
        return getattr(answer, "status_code", 200) == 403

    await until(is_known)
    await end(gateway, ours)
    assert where(await asked[1]) == HOSTED  # both were looked at
    await gateway.add_worker("again", script=says_world)
    assert where(await asked[0]) == OURS
    assert len(api.requests) == 1


@pytest.mark.parametrize("value", ["false", "no", 0, 1, [], {}])
async def test_what_a_request_says_must_be_yes_or_no(share_gateway: Share, value: Any) -> None:
    gateway = await share_gateway(**pool())
    _, key = await gateway.make_key(policy=Policy(allow_hosted=("openai",)))
    refused = await ask(gateway, key, extra_body={"allow_hosted": value})
    assert (refused.status_code, refused.param) == (400, "allow_hosted")


async def test_batch_requests_leave_only_where_a_model_has_no_workers_of_ours(
    start_gateway: Start, make_key: MakeKey
) -> None:
    key, flex = await make_key("openai"), {"service_tier": "flex"}
    gateway = await start_gateway(**pool(), open_metrics=True, timeouts=AT_ONCE)
    api = await gateway.add_worker("api-1", place=HOSTED)
    await until_known(gateway, api)
    stays, leaves = asyncio.create_task(ask(gateway, key, extra_body=flex)), await ask(gateway, key)
    assert where(leaves) == HOSTED
    ours = await gateway.add_worker("ours")
    assert where(await stays) == OURS
    assert len(api.requests) == 1
    await end(gateway, ours)
    without = await start_gateway(**pool(), only_hosted=(MODEL,), open_metrics=True)
    await until_known(without, api)
    assert where(await ask(without, key, extra_body=flex)) == HOSTED


# --- a hosted pool that dies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_goes_on_when_a_hosted_pool_breaks_off(
    start_gateway: Start, make_key: MakeKey, fails: bool
) -> None:
    """At another hosted pool where it may go there, and at our own workers; nothing is lost or said twice."""

    begun: set[str] = set()

    async def breaks(attempt: Attempt) -> None:
        await says_hello(attempt)
        begun.add(attempt.job.request_id)
        if fails:
            await attempt.fail(ErrorCode.ENGINE_ERROR, "the stream was cut off", retryable=True)

    pools = {
        name: HostedPoolSettings(provider=provider, models=(MODEL,))
        for name, provider in (("api", "openai"), ("other-api", "azure"))
    }
    here, both = await make_key("openai"), await make_key("openai", "azure")
    gateway = await start_gateway(hosted=pools, open_metrics=True, timeouts=AT_ONCE)
    api = await gateway.add_worker("api-1", place=HOSTED, script=breaks)
    await until_known(gateway, api)
    asked = [asyncio.create_task(stream(gateway, key)) for key in (here, both)]
    await until(lambda: len(begun) == 2)
    other = await gateway.add_worker("other-1", place=OTHER, script=says_world)
    if not fails:
        await end(gateway, api)
    assert await asked[1] == "Hello world"
    await gateway.add_worker("ours", script=says_world)
    assert await asked[0] == "Hello world"
    asked_there = [{attempt.job.request_id for attempt in worker.attempts} for worker in (api, other)]
    assert [len(requests) for requests in asked_there] == [2, 1]
    outcomes = sorted((record.tier, record.outcome) for record in await gateway.records(2))
    assert outcomes == [("hosted", "ok"), ("spot", "ok")]


async def stream(gateway: GatewayUnderTest, key: str) -> str:
    chunks = await gateway.client(api_key=key).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=16, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


# --- money ------------------------------------------------------------------------------------------------------------


async def test_each_choice_reads_the_prompt(start_gateway: Start, make_key: MakeKey, bus: Bus) -> None:
    key = await make_key("openai")
    gateway = await start_gateway(**pool(prices={MODEL: PRICE}, usd_per_day=1.0), open_metrics=True)
    api = await gateway.add_worker("api-1", place=HOSTED, script=says_hello)
    await until_known(gateway, api)
    await until(lambda: has_account(bus))
    asked = asyncio.create_task(ask(gateway, key, n=3))
    await until(lambda: api.attempts)
    await end(gateway, api)  # nobody knows what it has cost: as much as was reserved
    reserved = 1000 * (-(-3 * api.attempts[0].job.prompt_tokens * 5 // 4) * 100 + 3 * 16_000)

    async def is_spent() -> bool:
        costs = await spent(bus) or 0
        return costs > 0 and costs % reserved == 0  # of each attempt, if it was not taken in time

    await until(is_spent)
    asked.cancel()


async def has_account(bus: Bus) -> bool:
    return await spent(bus) is not None


@pytest.fixture
async def ledger(bus: Bus, sqlite_url: str) -> AsyncIterator[Callable[[], None]]:
    """Starts a ledger writer, once there is a gateway."""
    tasks: list[asyncio.Task[None]] = []
    engine = create_engine(sqlite_url)

    def start() -> None:
        settings = LedgerSettings(nats_urls=(), database_url=sqlite_url, batch_wait_s=0.05)
        tasks.append(asyncio.create_task(LedgerWriter(bus, engine, settings, asyncio.Event()).run()))

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engine.dispose()


async def test_two_gateways_and_a_lost_account_do_not_pass_a_cap(
    start_gateway: Start, make_key: MakeKey, bus: Bus, ledger: Callable[[], None]
) -> None:
    key, cap_usd = await make_key("openai"), 0.15
    settings = {**pool(prices={MODEL: PRICE}, usd_per_day=cap_usd, usd_per_month=5.0), "open_metrics": True}
    gateways = [await start_gateway(**settings, timeouts=AT_ONCE) for _ in range(2)]
    ledger()
    api = await gateways[0].add_worker("api-1", place=HOSTED)
    for gateway in gateways:
        await until_known(gateway, api)
    await until(lambda: is_there(bus))
    first = await asyncio.gather(*(ask(gateway, key) for gateway in gateways for _ in range(4)))
    assert {where(answer) for answer in first} == {HOSTED}
    asked = [asyncio.create_task(ask(gateway, key)) for gateway in gateways for _ in range(20)]
    await until(lambda: len(api.attempts) > 10)
    await lose_accounts(bus)
    asked += [asyncio.create_task(ask(gateway, key)) for gateway in gateways for _ in range(10)]
    most = 20_000_000  # that one request reserves; each gateway may hold a part of it

    async def is_reached() -> bool:
        try:
            return (await spent(bus) or 0) >= nano_usd(cap_usd) - len(gateways) * most
        except BusError:  # the bucket is just lost
            return False

    await until(is_reached)
    await gateways[0].add_worker("ours")
    tiers = [where(answer)[-1] for answer in await asyncio.gather(*asked)]
    # On a busy machine the API may count as lost in the midst of an answer, which then ends with our own worker.
    assert tiers.count("hosted") + len(first) <= len(api.requests)
    assert "spot" in tiers
    assert cost_of(api) <= nano_usd(cap_usd)


def cost_of(api: ScriptedWorker) -> int:
    """Return what the provider bills, in nano-USD."""
    return sum(one.job.prompt_tokens * 100_000 + one.made_tokens * 1_000_000 for one in api.attempts)


async def test_a_cap_begins_with_what_the_ledger_knows_of_the_pool(
    start_gateway: Start, make_key: MakeKey, bus: Bus, sqlite_url: str
) -> None:
    """Gateways and queue server have begun again: what the pool has cost today is spent."""
    database, now_ms = create_engine(sqlite_url), unix_now_ms()
    async with database.begin() as connection:
        price = Price(100 * 10**9, 100 * 10**9, 1000 * 10**9)
        await add_price(connection, MODEL, "api", price, from_unix_ms=0, source="test")
    spent_there: dict[str, Any] = {"model": MODEL, "pool": "api", "tier": "hosted", "started_unix_ms": now_ms}
    counts: dict[str, Any] = {"prompt_tokens": 20, "cached_tokens": 0, "completion_tokens": 28}
    await store_records(
        database,
        [
            attempt_record("a", **spent_there, **counts),
            attempt_record("b", **spent_there, **{**counts, "completion_tokens": 0}, outcome="failed"),
            attempt_record("c", **{**spent_there, "pool": "ours", "tier": "spot"}, **counts),
        ],
    )
    await database.dispose()
    key = await make_key("openai")
    gateway = await start_gateway(**pool(prices={MODEL: PRICE}, usd_per_day=0.035), open_metrics=True)
    api = await gateway.add_worker("api-1", place=HOSTED)
    await until_known(gateway, api)
    await until_spent(bus, 30_000)
    asked = asyncio.create_task(ask(gateway, key))
    await until_queued(gateway.bus, 1)
    await gateway.add_worker("ours")
    assert where(await asked) == OURS
    assert api.attempts == []
