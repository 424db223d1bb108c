"""The bucket of accounts is lost, or begins empty on a new cluster: what was spent stays spent."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from db.accounts.principal import BudgetPeriod, Policy
from db.engine import DatabaseUnavailable, create_engine
from db.money import CLIENTS, Price, TokenPrice
from db.prices import add_price
from gateway.limits.account import AccountStore
from gateway.limits.leases import LimitReached, Quotas, Unavailable
from gateway.limits.reservation import Estimate, Reservation
from gateway.limits.seeds import RollupLedger
from ledger.store import store_records
from protocol import subjects
from protocol.gateways import Kind
from protocol.job import encode
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.nats.pull import Delivery, PullConsumer, ack
from protocol.usage import encode_usage
from tests.integration.gateway.test_quotas import (
    Start,
    ask,
    ask_all,
    ask_until,
    principal,
    settle_all,
    start,
    the_account,
)
from tests.usage_records import request_record
from tests.waiting import HANGS_S, until

__all__ = ["start"]
PRICE = TokenPrice(prompt_nano_usd=0, cached_nano_usd=0, completion_nano_usd=10**9)
ONE = Estimate(0, 100, PRICE)  # 100,000 nano-USD
REFUSES_S = 1.0


@pytest.fixture
async def spent_before(sqlite_url: str) -> AsyncIterator[None]:
    """Seven tenths of a million this month, by key_1 of team_1, and as much last month."""
    database = create_engine(sqlite_url)
    async with database.begin() as connection:
        price = Price(prompt_nano_usd=0, completion_nano_usd=10**9)
        await add_price(connection, "demo", CLIENTS, price, from_unix_ms=0, source="test")
    now_ms = int(time.time() * 1000)
    for name, at in (("this", now_ms), ("last", now_ms - 32 * 86_400_000)):
        ids = {"key_id": "key_1", "team_id": "team_1"}
        await store_records(database, [request_record(name, received_unix_ms=at, completion_tokens=700, **ids)])
    yield
    await database.dispose()


async def lose_accounts(bus: Bus) -> None:
    await bus.request(f"{bus.api_prefix}.STREAM.DELETE.KV_{subjects.QUOTAS_BUCKET}", b"", timeout_s=HANGS_S)
    await topology.apply(bus, [], topology.QueueBounds(), limit_s=HANGS_S)


async def ask_patiently(quotas: Quotas, policy: Policy, estimate: Estimate = ONE) -> Reservation | None:
    """As a client does that tries again."""
    async with asyncio.timeout(HANGS_S):
        while True:
            try:
                return await ask(quotas, principal(policy), estimate)
            except Unavailable:
                await asyncio.sleep(0.05)


@pytest.mark.usefixtures("spent_before")
@pytest.mark.parametrize(("period", "left"), [("month", 3), ("total", 0)])
@pytest.mark.parametrize("whose", ["key", "team"])
async def test_an_empty_bucket_begins_with_what_the_ledger_knows(
    start: Start, whose: str, period: BudgetPeriod, left: int
) -> None:
    budget = Policy(budget_nano_usd=1_000_000, budget_period=period)
    who = principal(budget) if whose == "key" else principal(Policy(), budget)
    quotas = await start("g0")
    held = []
    async with asyncio.timeout(HANGS_S):
        for _ in range(5):
            try:
                held += await quotas.reserve(who, [ONE]) or []
            except LimitReached:
                continue
    assert len(held) == left


@pytest.mark.usefixtures("spent_before")
async def test_what_a_gateway_remembers_outlives_the_bucket(start: Start, bus: Bus) -> None:
    """Requests that ended in the last second are in no ledger yet."""
    budget = Policy(budget_nano_usd=1_000_000, budget_period="month")
    first, second = await start("g0"), await start("g1")
    settle_all([one for one in [await ask_patiently(first, budget)] if one], 0, 100)
    await until(lambda: not first._local_accounts["key_1"].slice.is_changed)
    await lose_accounts(bus)
    held = []
    for quotas in (first, second) * 3:
        held += [one for one in [await ask_patiently(quotas, budget)] if one]
    assert len(held) == 2
    assert (await the_account(bus)).spent_nano_usd == 800_000


@pytest.mark.parametrize("policy", [Policy(max_concurrent=8), Policy(requests_per_minute=8)], ids=["places", "rate"])
@pytest.mark.parametrize("is_reported", [False, True])
async def test_places_and_rates_are_not_given_twice(
    start: Start, bus: Bus, policy: Policy, *, is_reported: bool
) -> None:
    """The first one knows who has what; the second one, to whom a lost account looks like a new one, waits for it."""
    gateways = [await start("g0"), await start("g1")]
    held = await ask_until(gateways[:1], principal(policy), 8)
    if is_reported:  # of a rate, nothing is left to tell or to renew then
        await until(lambda: not gateways[0]._local_accounts["key_1"].slice.is_changed)
    for _ in range(2):
        await lose_accounts(bus)
        for quotas in (*gateways[::-1], *gateways):
            if one := await ask_patiently(quotas, policy, Estimate(1, 1)):
                held.append(one)
        assert len(held) == 8
        found = await AccountStore(bus).load("key_1")
        if found is not None:  # or else all refuse by what they remember, and nobody had to put it back yet
            account, _ = found
            assert sum(lease.held[Kind.CONCURRENT] for lease in account.leases.values()) in {0, 8}


async def test_while_the_ledger_cannot_be_asked_a_missing_account_is_closed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas = await start("g0", reach_limit_s=REFUSES_S)
    budget, rate = Policy(budget_nano_usd=1_000_000, budget_period="month"), Policy(requests_per_minute=100)

    async def away(*_: object) -> int:
        raise DatabaseUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(RollupLedger, "spent_nano_usd", away)
        with pytest.raises(Unavailable):
            await quotas.reserve(principal(budget), [ONE])
        assert await quotas.reserve(principal(Policy(), rate), [ONE])  # needs no ledger
    assert await ask_patiently(quotas, budget) is not None


async def test_the_ledger_is_asked_again_while_a_request_waits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas = await start("g0")
    really, asked = RollupLedger.spent_nano_usd, 0

    async def away_at_first(ledger: RollupLedger, *question: Any) -> int:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise DatabaseUnavailable("away")
        return await really(ledger, *question)

    monkeypatch.setattr(RollupLedger, "spent_nano_usd", away_at_first)
    budget = Policy(budget_nano_usd=1_000_000, budget_period="month")
    async with asyncio.timeout(HANGS_S / 2):
        assert await ask(quotas, principal(budget), ONE) is not None
    assert asked == 3


async def test_while_records_wait_for_the_ledger_a_missing_account_is_closed(start: Start, bus: Bus) -> None:
    quotas = await start("g0", reach_limit_s=REFUSES_S)
    record = encode_usage([encode(request_record("waits"))])
    await bus.publish_durable(subjects.REQUEST_USAGE_SUBJECT, record, message_id="waits")
    budget = Policy(budget_nano_usd=1_000_000, budget_period="month")
    with pytest.raises(Unavailable):
        await quotas.reserve(principal(budget), [ONE])
    await bus.api(f"STREAM.PURGE.{subjects.USAGE_STREAM}")
    assert await ask_patiently(quotas, budget) is not None


async def test_records_that_come_while_others_are_taken_keep_no_account_closed(start: Start, bus: Bus) -> None:
    # Under a steady load there always is one that no writer has taken yet.
    quotas = await start("g0")
    taken: asyncio.Queue[Delivery] = asyncio.Queue()
    ledger = PullConsumer(bus, subjects.USAGE_STREAM, subjects.LEDGER_CONSUMER, taken.put)
    await ledger.start()
    budget = Policy(budget_nano_usd=1_000_000, budget_period="month")
    asking = None
    for number in itertools.count():
        record = encode_usage([encode(request_record(f"comes{number}"))])
        await bus.publish_durable(subjects.REQUEST_USAGE_SUBJECT, record, message_id=f"comes{number}")
        if asking is None:
            asking = asyncio.create_task(ask_patiently(quotas, budget))
        elif asking.done():
            break
        else:
            await ledger.pull(1)
            await ack(bus, await taken.get())
    assert asking is not None
    assert await asking is not None
    await ledger.stop()


async def test_a_new_key_asks_the_ledger_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    spent_nano_usd = RollupLedger.spent_nano_usd

    async def counted(self: RollupLedger, *what: object) -> int:
        asked.append(what)
        return await spent_nano_usd(self, *what)  # type: ignore[arg-type]

    monkeypatch.setattr(RollupLedger, "spent_nano_usd", counted)
    who = principal(Policy(budget_nano_usd=10**9, budget_period="month"))
    gateways = [await start("g0"), await start("g1")]
    assert len(await ask_all(gateways[:1], who, 20, ONE)) == 20
    assert len(await ask_all(gateways, who, 20, ONE)) == 20
    assert len(asked) == 1
