"""Budgets' thresholds: each is told once in a period, whoever notices, and however often."""

import asyncio
import json
from collections.abc import Sequence

import pytest
from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.keys import Grant, create_key
from db.accounts.principal import Policy, Principal
from db.accounts.teams import update_team
from db.money import CLIENTS, ConfiguredPrice, Price, TokenPrice
from db.prices import seed_prices
from db.tables import BudgetNoticeRow
from gateway.limits.leases import LimitReached, Quotas, Unavailable
from gateway.limits.reservation import Estimate
from gateway.limits.seeds import RollupLedger
from ledger.store import store_records
from ledger.webhooks.budgets import EVENT_TYPE, THRESHOLDS_PERCENT, BudgetWatch
from protocol import subjects
from protocol.errors import StreamFull
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from tests.integration.ledger.webhooks.conftest import ACTOR, PEPPER, TEAM, Receiver, Run, StartReceiver, endpoints_of
from tests.usage_records import request_record
from tests.waiting import until

USD = 1_000_000_000
DAY_S = 86_400


async def spend(engine: AsyncEngine, request_id: str, usd: int, key_id: str = "key_x", at_unix_ms: int = 0) -> None:
    """Write a request that cost so much; its price is a dollar for each completion token."""
    await seed_prices(engine, [ConfiguredPrice("demo", CLIENTS, Price(0, 0, 1_000_000 * USD))], 0)
    facts = {"received_unix_ms": at_unix_ms or unix_now_ms(), "completion_tokens": usd}
    ids = {"team_id": TEAM, "key_id": key_id, "organisation_id": "org_default"}
    await store_records(engine, [request_record(request_id, **facts, **ids)])


async def noted(engine: AsyncEngine) -> Sequence[tuple[str, int, bool]]:
    """Account, threshold, and whether it has been published."""
    row = BudgetNoticeRow
    async with engine.connect() as connection:
        found = await connection.execute(select(row.account_id, row.threshold_percent, row.message))
        return sorted((account, percent, message is None) for account, percent, message in found)


def told(receiver: Receiver) -> list[tuple[str, int]]:
    found = [json.loads(request.body) for request in receiver.received]
    assert {body["type"] for body in found} <= {EVENT_TYPE}
    return sorted((body["data"]["id"], body["data"]["threshold_percent"]) for body in found)


async def test_each_threshold_is_told_once_by_whichever_process_notices(
    bus: Bus, engine: AsyncEngine, running: Run, start_receiver: StartReceiver
) -> None:
    receiver = await start_receiver()
    await endpoints_of(engine).create(TEAM, receiver.url, [EVENT_TYPE], ACTOR)
    await update_team(engine, TEAM, {"budget_nano_usd": 100 * USD, "budget_period": "month"}, ACTOR)
    policy = Policy(budget_nano_usd=10 * USD, budget_period="day")
    key, _ = await create_key(engine, "small", PEPPER, Grant(policy=policy))
    async with running(), running(), running():
        await spend(engine, "r1", 7, key.key_id)
        await spend(engine, "r2", 1, key.key_id)  # 8 of the key's 10, and of the team's 100
        await until(lambda: told(receiver) == [(key.key_id, 50), (key.key_id, 80)])
        await spend(engine, "r3", 93)
        await until(lambda: len(receiver.received) == 5)
        await spend(engine, "r4", 2, key.key_id)
        await until(lambda: len(receiver.received) == 6)
    wanted = [(account, percent) for account in (key.key_id, TEAM) for percent in THRESHOLDS_PERCENT]
    assert told(receiver) == sorted(wanted)
    assert [(account, percent) for account, percent, _ in await noted(engine)] == sorted(wanted)
    of_team = next(
        body["data"]
        for body in (json.loads(request.body) for request in receiver.received)
        if body["data"]["id"] == TEAM and body["data"]["threshold_percent"] == 80
    )
    assert (of_team["object"], of_team["name"], of_team["team_id"]) == ("team", "default", TEAM)
    assert (of_team["budget_usd"], of_team["spent_usd"], of_team["period"]) == (100, 101, "month")


async def test_watches_that_look_at_the_same_moment_tell_once(bus: Bus, engine: AsyncEngine) -> None:
    await endpoints_of(engine).create(TEAM, "http://127.0.0.1:1/", [EVENT_TYPE], ACTOR)
    await update_team(engine, TEAM, {"budget_nano_usd": 10 * USD, "budget_period": "day"}, ACTOR)
    now_s = 1_800_000_000.0
    await spend(engine, "r1", 10, at_unix_ms=int(now_s * 1000))
    watches = [BudgetWatch(bus, engine, 60.0, asyncio.Event()) for _ in range(4)]
    await asyncio.gather(*(watch.check(now_s) for watch in watches))
    assert await noted(engine) == [(TEAM, 50, True), (TEAM, 80, True), (TEAM, 100, True)]
    assert await _messages(bus) == 3
    # The next day's begins with nothing spent.
    await watches[0].check(now_s + DAY_S)
    assert await _messages(bus) == 3
    await spend(engine, "r2", 9, at_unix_ms=int((now_s + DAY_S) * 1000))
    await watches[1].check(now_s + DAY_S)
    assert await _messages(bus) == 5
    # A raised budget tells no threshold of this period again.
    await update_team(engine, TEAM, {"budget_nano_usd": 11 * USD}, ACTOR)
    await watches[2].check(now_s + DAY_S)
    assert await _messages(bus) == 5


async def test_what_was_noted_and_not_published_is_published_by_the_next_look(bus: Bus, engine: AsyncEngine) -> None:
    """A process may die between the two."""
    await endpoints_of(engine).create(TEAM, "http://127.0.0.1:1/", [EVENT_TYPE], ACTOR)
    await update_team(engine, TEAM, {"budget_nano_usd": 10 * USD, "budget_period": "total"}, ACTOR)
    await spend(engine, "r1", 8)
    watch = BudgetWatch(bus, engine, 60.0, asyncio.Event())
    await bus.api(f"STREAM.UPDATE.{subjects.WEBHOOKS_STREAM}", await _config(bus) | {"max_bytes": 1})
    with pytest.raises(StreamFull):
        await watch.check(unix_now_ms() / 1000)
    assert await noted(engine) == [(TEAM, 50, False), (TEAM, 80, False)]
    await bus.api(f"STREAM.UPDATE.{subjects.WEBHOOKS_STREAM}", await _config(bus) | {"max_bytes": 1_000_000})
    await watch.check(unix_now_ms() / 1000)
    assert await noted(engine) == [(TEAM, 50, True), (TEAM, 80, True)]
    assert await _messages(bus) == 2


async def test_a_budget_that_covers_no_more_requests_is_used_up(
    bus: Bus, engine: AsyncEngine, running: Run, start_receiver: StartReceiver
) -> None:
    """A request reserves the most that it may cost: of ten dollars, the last one may never be spent."""
    receiver = await start_receiver()
    await endpoints_of(engine).create(TEAM, receiver.url, [EVENT_TYPE], ACTOR)
    await update_team(engine, TEAM, {"budget_nano_usd": 10 * USD, "budget_period": "month"}, ACTOR)
    policy = Policy(budget_nano_usd=10 * USD, budget_period="month")
    principal = Principal("key_x", "x", TEAM, "default", "org_default", team_policy=policy)
    costly = [Estimate(0, 2, TokenPrice(0, 0, 1_000_000 * USD))]
    await spend(engine, "r1", 9)
    quotas = Quotas(bus, "g1", RollupLedger(engine))
    await quotas.start()
    reporting = asyncio.create_task(quotas.run())
    async with running():
        await until(lambda: told(receiver) == [(TEAM, 50), (TEAM, 80)])
        await until(lambda: is_refused(quotas, principal, costly))
        await until(lambda: told(receiver) == [(TEAM, 50), (TEAM, 80), (TEAM, 100)])
    reporting.cancel()
    await quotas.close()


async def test_a_request_larger_than_the_whole_budget_uses_up_none(bus: Bus, engine: AsyncEngine) -> None:
    heard: list[bytes] = []
    await bus.listen(subjects.BUDGET_REFUSED, lambda message: heard.append(message.data))
    policy = Policy(budget_nano_usd=10 * USD, budget_period="month")
    spent = Principal("key_x", "x", TEAM, "default", "org_default", team_policy=policy)
    unused = Principal("key_y", "y", "team_y", "y", "org_default", key_policy=policy)
    await spend(engine, "r1", 9)
    quotas = Quotas(bus, "g1", RollupLedger(engine))
    await quotas.start()
    await until(lambda: is_refused(quotas, unused, [Estimate(0, 11, TokenPrice(0, 0, 1_000_000 * USD))]))
    await until(lambda: is_refused(quotas, spent, [Estimate(0, 2, TokenPrice(0, 0, 1_000_000 * USD))]))
    reporting = asyncio.create_task(quotas.run())

    async def is_heard() -> bool:
        return TEAM.encode() in heard

    await until(is_heard)
    reporting.cancel()
    await quotas.close()  # which ends only after all has been sent
    assert set(heard) == {TEAM.encode()}


async def is_refused(quotas: Quotas, principal: Principal, estimates: Sequence[Estimate]) -> bool:
    """Whether the budget refuses a request; until the account is known, nothing does."""
    try:
        await quotas.reserve(principal, estimates)
    except Unavailable:
        return False
    except LimitReached:
        return True
    raise AssertionError("the budget let a request through that it does not cover")


async def test_nobody_asks_nobody_is_told(bus: Bus, engine: AsyncEngine) -> None:
    await update_team(engine, TEAM, {"budget_nano_usd": 10 * USD, "budget_period": "total"}, ACTOR)
    await spend(engine, "r1", 8)
    watch = BudgetWatch(bus, engine, 60.0, asyncio.Event())
    await watch.check(unix_now_ms() / 1000)
    assert await noted(engine) == []
    endpoint, _ = await endpoints_of(engine).create(TEAM, "http://127.0.0.1:1/", [EVENT_TYPE], ACTOR)
    await watch.check(unix_now_ms() / 1000)  # who asks later is told what is true now
    assert await noted(engine) == [(TEAM, 50, True), (TEAM, 80, True)]
    assert endpoint.enabled


async def test_a_threshold_below_one_that_was_told_is_not_told(bus: Bus, engine: AsyncEngine) -> None:
    """An older release knew no 50 %: nobody wants to hear of them after the 80."""
    await endpoints_of(engine).create(TEAM, "http://127.0.0.1:1/", [EVENT_TYPE], ACTOR)
    await update_team(engine, TEAM, {"budget_nano_usd": 10 * USD, "budget_period": "total"}, ACTOR)
    await spend(engine, "r1", 8)
    watch = BudgetWatch(bus, engine, 60.0, asyncio.Event())
    await watch.check(unix_now_ms() / 1000)
    async with engine.begin() as connection:
        await connection.execute(delete(BudgetNoticeRow).where(BudgetNoticeRow.threshold_percent == 50))
    await watch.check(unix_now_ms() / 1000)
    assert await noted(engine) == [(TEAM, 80, True)]


async def test_notices_of_periods_long_over_are_deleted(bus: Bus, engine: AsyncEngine) -> None:
    await endpoints_of(engine).create(TEAM, "http://127.0.0.1:1/", [EVENT_TYPE], ACTOR)
    await update_team(engine, TEAM, {"budget_nano_usd": 10 * USD, "budget_period": "day"}, ACTOR)
    await spend(engine, "r1", 8)
    watch = BudgetWatch(bus, engine, 60.0, asyncio.Event())
    await watch.check(unix_now_ms() / 1000)
    async with engine.begin() as connection:
        await connection.execute(update(BudgetNoticeRow).values(created_unix_ms=0))
    await spend(engine, "r2", 2)
    await watch.check(unix_now_ms() / 1000)
    assert await noted(engine) == [(TEAM, 100, True)]


async def _messages(bus: Bus) -> int:
    return int((await bus.api(f"STREAM.INFO.{subjects.WEBHOOKS_STREAM}"))["state"]["messages"])


async def _config(bus: Bus) -> dict[str, object]:
    return dict((await bus.api(f"STREAM.INFO.{subjects.WEBHOOKS_STREAM}"))["config"])
