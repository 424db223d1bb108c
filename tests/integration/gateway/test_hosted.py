"""The hosted tier: who is sent there, when, for how much money, and how traffic comes back."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from db.accounts.keys import Grant, create_key
from db.accounts.principal import Policy
from db.engine import create_engine
from db.money import nano_usd
from gateway.limits.account import AccountStore
from gateway.limits.prices import cap_account
from gateway.settings import HostedPoolSettings, PriceSettings
from protocol.errors import ErrorCode
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayUnderTest, Start
from tests.integration.gateway.scripted_worker import Attempt, ScriptedWorker, answer_hello
from tests.integration.queued_jobs import until_queued
from tests.waiting import until

HOSTED = ("api", "openai", "global", "hosted")
OURS = ("pool-a", "provider-a", "region-a", "spot")
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
PRICE = PriceSettings(prompt=100.0, completion=1000.0)  # USD for a million: a token costs 100 or 1000 micro-USD
AT_ONCE = {"overflow_after_s": 0.2}

MakeKey = Callable[..., Awaitable[str]]


@pytest.fixture
def make_key(sqlite_url: str) -> MakeKey:
    async def make(*leaves: str) -> str:
        engine = create_engine(sqlite_url)
        grant = Grant(policy=Policy(allow_hosted=leaves or None))
        _, token = await create_key(engine, " ".join(leaves).replace("/", "-") or "stays", PEPPER, grant)
        await engine.dispose()
        return token

    return make


def pool(**rest: Any) -> dict[str, Any]:
    return {"hosted": {"api": HostedPoolSettings(provider="openai", models=(MODEL,), **rest)}}


async def ask(gateway: GatewayUnderTest, key: str, **rest: Any) -> Any:
    """The answer with its headers, or the error."""
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 16, "temperature": 0, **rest}
    try:
        return await gateway.client(api_key=key).chat.completions.with_raw_response.create(**body)
    except openai.APIStatusError as error:
        return error


def where(answer: Any) -> tuple[str, ...]:
    return tuple(answer.headers[f"x-spillway-{name}"] for name in ("pool", "provider", "region", "tier"))


async def end(gateway: GatewayUnderTest, worker: ScriptedWorker) -> None:
    """The worker is gone."""
    gateway.workers.remove(worker)
    await worker.stop()


async def until_known(gateway: GatewayUnderTest, *workers: ScriptedWorker) -> None:
    """The gateway has heard of these workers."""
    wanted = {worker.worker_id for worker in workers}

    async def knows() -> bool:
        async with httpx.AsyncClient() as client:
            shown = await client.get(f"{gateway.url}/metrics")
        return all(f'worker_id="{worker_id}"' in shown.text for worker_id in wanted)

    await until(knows)


async def test_only_who_may_leave_does_where_our_workers_are_gone(start_gateway: Start, make_key: MakeKey) -> None:
    leaves, stays, elsewhere = await make_key("openai/test*"), await make_key(), await make_key("anthropic")
    gateway = await start_gateway(**pool(), open_metrics=True)
    api = await gateway.add_worker("api-1", place=HOSTED)
    await until_known(gateway, api)
    waiting = [asyncio.create_task(ask(gateway, key)) for key in (stays, elsewhere)]
    answers = await asyncio.gather(*(ask(gateway, leaves) for _ in range(5)))
    assert {where(answer) for answer in answers} == {HOSTED}
    assert {attempt.job.hosted for attempt in api.attempts} == {("openai",)}
    opted_out = asyncio.create_task(ask(gateway, leaves, extra_body={"allow_hosted": False}))
    ours = await gateway.add_worker("ours")
    assert {where(await one) for one in (*waiting, opted_out)} == {OURS}
    assert len(api.requests) == 5
    await until_known(gateway, ours)
    assert where(await ask(gateway, leaves)) == OURS  # they are back
    records = await gateway.records(9)
    assert sorted((one.provider, one.tier) for one in records) == [
        *[("openai", "hosted")] * 5,
        *[("provider-a", "spot")] * 4,
    ]


async def test_where_our_workers_are_full_who_may_leave_does_after_a_while(
    start_gateway: Start, make_key: MakeKey
) -> None:
    leaves, stays = await make_key("*"), await make_key()
    gateway = await start_gateway(**pool(), open_metrics=True, timeouts=AT_ONCE)
    ours = await gateway.add_worker("ours", takes_jobs=False)
    api = await gateway.add_worker("api-1", place=HOSTED)
    await until_known(gateway, ours, api)
    waiting = asyncio.create_task(ask(gateway, stays))
    answer = await ask(gateway, leaves)
    assert where(answer) == HOSTED
    assert int(answer.headers["x-spillway-attempts"]) > 1
    ours.takes_jobs, ours.free_sequences = True, 64
    assert where(await waiting) == OURS
    assert len(api.requests) == 1


async def test_what_a_hosted_pool_does_not_take_comes_back(start_gateway: Start, make_key: MakeKey) -> None:
    leaves = await make_key("openai")
    gateway = await start_gateway(**pool(), open_metrics=True)
    api = await gateway.add_worker("api-1", place=HOSTED, takes_jobs=False)
    api.free_sequences = 64  # so it says
    await until_known(gateway, api)
    asked = asyncio.create_task(ask(gateway, leaves))
    await until(lambda: has_jobs(gateway, "hosted-api"))
    await until(lambda: has_no_jobs(gateway, "hosted-api"))
    ours = await gateway.add_worker("ours")
    answer = await asked
    assert where(answer) == OURS
    job = ours.attempts[0].job
    assert (job.attempt > 1, job.hosted) == (True, ())  # it may have gone there and back until ours was there
    api.takes_jobs = True
    await ask(gateway, leaves)
    assert api.attempts == []


async def jobs(gateway: GatewayUnderTest, lane: str) -> int:
    info = await gateway.bus.api("STREAM.INFO.RQ", {"subjects_filter": f"rq.*.{lane}"})
    return sum((info["state"].get("subjects") or {}).values())


async def has_jobs(gateway: GatewayUnderTest, lane: str) -> bool:
    return await jobs(gateway, lane) > 0


async def has_no_jobs(gateway: GatewayUnderTest, lane: str) -> bool:
    return not await has_jobs(gateway, lane)


async def test_a_rescue_goes_to_a_hosted_pool_only_where_it_may(start_gateway: Start, make_key: MakeKey) -> None:
    begun: set[str] = set()

    async def dies(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("Hello", (1,))
        begun.add(attempt.job.request_id)

    async def goes_on(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens(" world", (2,), finish_reason="stop")
        await attempt.finish()

    leaves, stays = await make_key("openai"), await make_key()
    gateway = await start_gateway(**pool(), open_metrics=True)
    ours = await gateway.add_worker("ours", script=dies)
    api = await gateway.add_worker("api-1", place=HOSTED, script=goes_on)
    await until_known(gateway, ours, api)
    asked = [asyncio.create_task(ask(gateway, key)) for key in (leaves, stays)]
    await until(lambda: len(begun) == 2)
    await end(gateway, ours)
    answer = await asked[0]
    assert where(answer) == HOSTED
    assert answer.parse().choices[0].message.content == "Hello world"
    await until_queued(gateway.bus, 1)  # what waited in our lane, too, is withdrawn beside the answer
    again = await gateway.add_worker("again", script=goes_on)
    assert where(await asked[1]) == OURS
    assert (len(api.requests), len(again.requests)) == (1, 1)


async def spent(bus: Bus, period: str = "day") -> int | None:
    """Nano-USD of the pool's account; None while there is none."""
    found = await AccountStore(bus).load(cap_account("api", period))
    return None if found is None else found[0].spent_nano_usd


async def until_spent(bus: Bus, micro_usd: int, period: str = "day") -> None:
    async def is_so() -> bool:
        return await spent(bus, period) == micro_usd * 1000

    await until(is_so)


async def test_a_cap_is_kept_and_what_waits_says_so(start_gateway: Start, make_key: MakeKey, bus: Bus) -> None:
    leaves = await make_key("openai")
    prices, cap_usd = {MODEL: PRICE}, 0.03
    gateway = await start_gateway(**pool(prices=prices, usd_per_day=cap_usd, usd_per_month=1.0), open_metrics=True)
    api = await gateway.add_worker("api-1", place=HOSTED)
    await until_known(gateway, api)
    await until(lambda: is_there(bus))
    first = await ask(gateway, leaves)  # at most 1.25 x 24 prompt tokens and 16 others are reserved, and 2 are made
    assert where(first) == HOSTED
    usage = first.parse().usage
    cost = usage.prompt_tokens * 100 + usage.completion_tokens * 1000
    for period in ("day", "month"):
        await until_spent(bus, cost, period)
    fitting = 0
    while (fitting + 1) * cost + 16_000 + usage.prompt_tokens * 125 <= nano_usd(cap_usd) / 1000:
        fitting += 1
        assert where(await ask(gateway, leaves)) == HOSTED
        await until_spent(bus, (fitting + 1) * cost)
    assert fitting
    stream = await gateway.client(api_key=leaves).chat.completions.with_raw_response.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=16, stream=True
    )
    assert stream.headers["x-spillway-hosted"] == "cap-reached"
    async with httpx.AsyncClient() as client:
        shown = (await client.get(f"{gateway.url}/metrics")).text
    assert f'spillway_hosted_cap_usd{{period="day",pool="api"}} {cap_usd}' in shown
    assert where(await ask(gateway, leaves, max_tokens=2)) == HOSTED  # there is something left for a small one
    await gateway.add_worker("ours")
    assert [chunk.choices[0].finish_reason async for chunk in stream.parse()][-1] == "stop"
    assert len(api.requests) == fitting + 2
    assert (await spent(bus) or 0) <= nano_usd(cap_usd)


async def is_there(bus: Bus) -> bool:
    return await spent(bus) is not None and await spent(bus, "month") is not None


async def test_what_nobody_can_count_costs_what_was_reserved(start_gateway: Start, make_key: MakeKey, bus: Bus) -> None:
    async def vanishes(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("Hello", (1,))

    async def breaks(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.fail(ErrorCode.ENGINE_ERROR, "503", retryable=True)

    leaves = await make_key("openai")
    prices = {MODEL: PRICE}
    gateway = await start_gateway(**pool(prices=prices, usd_per_day=1.0, usd_per_month=1.0), open_metrics=True)
    api = await gateway.add_worker("api-1", place=HOSTED, script=breaks)
    await until_known(gateway, api)
    await until(lambda: is_there(bus))
    asked = asyncio.create_task(ask(gateway, leaves))
    await until(lambda: len(api.attempts) == 1)
    ours = await gateway.add_worker("ours")
    assert where(await asked) == OURS  # it is not tried there again
    assert len(api.attempts) == 1
    await until_spent(bus, 0)
    await end(gateway, ours)
    api.script = vanishes
    asked = asyncio.create_task(ask(gateway, leaves))
    await until(lambda: len(api.attempts) == 2 and api.attempts[1].made_tokens)
    prompt_tokens = api.attempts[1].job.prompt_tokens
    await end(gateway, api)
    await until_spent(bus, -(-prompt_tokens * 5 // 4) * 100 + 16_000)
    await gateway.add_worker("again", script=answer_hello)
    await asked


async def test_who_asks_for_hosted_without_leave_is_told(start_gateway: Start, make_key: MakeKey) -> None:
    leaves, stays = await make_key("openai"), await make_key()
    gateway = await start_gateway(**pool(), only_hosted=(MODEL,))
    api = await gateway.add_worker("api-1", place=HOSTED)
    for key, body, words in (
        (stays, {"allow_hosted": True}, "'allow_hosted' policy"),
        (stays, {}, "'allow_hosted' policy"),
        (leaves, {"allow_hosted": False}, "the request sets"),
    ):
        refused = await ask(gateway, key, extra_body=body)
        assert (refused.status_code, refused.code, refused.param) == (403, "hosted_not_allowed", "allow_hosted")
        assert words in refused.message
        assert "openai" in refused.message
    assert where(await ask(gateway, leaves, extra_body={"allow_hosted": True})) == HOSTED
    assert len(api.requests) == 1
