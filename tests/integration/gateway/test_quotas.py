"""Several gateways' quotas over one real bucket, without HTTP: exact at the edge, nothing lost, nothing left."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from pydantic import SecretStr

from db.accounts.keys import Grant, create_key
from db.accounts.principal import Policy, Principal, period_at
from db.engine import create_engine
from db.money import CLIENTS, Price, TokenPrice
from db.prices import add_price
from gateway.limits import account as accounts
from gateway.limits import local as books
from gateway.limits.account import AccountStore
from gateway.limits.leases import SLICE_WAIT_S, LimitReached, Quotas, Unavailable
from gateway.limits.report import recount_budgets
from gateway.limits.reservation import Estimate, Reservation
from gateway.limits.seeds import RollupLedger
from gateway.settings import REACH_LIMIT_S
from ledger.store import store_records
from protocol.gateways import NOTHING, Account, ExpiredLease, Kind
from protocol.job import PROTOCOL_VERSION
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.nats.clock import ServerClock
from tests.nats_server import NatsServer
from tests.usage_records import request_record
from tests.waiting import HANGS_S, POLL_S, until

PRICE = TokenPrice(prompt_nano_usd=1_000_000_000, cached_nano_usd=500_000_000, completion_nano_usd=2_000_000_000)
SMALL = Estimate(10, 90)
Start = Callable[..., Awaitable[Quotas]]


def principal(key: Policy, team: Policy | None = None) -> Principal:
    return Principal("key_1", "k", "team_1", "t", "org_1", key_policy=key, team_policy=team or Policy())


@pytest.fixture
async def start(nats_url: str, sqlite_url: str) -> AsyncIterator[Start]:
    running: list[tuple[Bus, asyncio.Task[None]]] = []
    database = create_engine(sqlite_url)

    async def start_one(gateway_id: str, *, clock_ahead_s: float = 0.0, reach_limit_s: float = HANGS_S) -> Quotas:
        bus = await Bus.connect(nats_url, name=gateway_id)
        bus.clock = ServerClock(bus._server_time_s, lambda: time.time() + clock_ahead_s)
        await topology.apply(bus, [], topology.QueueBounds())
        quotas = Quotas(bus, gateway_id, RollupLedger(database), reach_limit_s)
        await quotas.start()
        running.append((bus, asyncio.create_task(quotas.run())))
        return quotas

    yield start_one
    for bus, task in running:
        task.cancel()
        await bus.close()
    await database.dispose()


async def three(start: Start) -> list[Quotas]:
    return [await start(f"g{number}") for number in range(3)]


async def ask(quotas: Quotas, who: Principal, estimate: Estimate = SMALL) -> Reservation | None:
    """None: refused."""
    try:
        reservations = await quotas.reserve(who, [estimate])
    except LimitReached:
        return None
    assert reservations is not None
    return reservations[0]


async def ask_all(
    gateways: list[Quotas], who: Principal, callers: int, estimate: Estimate = SMALL
) -> list[Reservation]:
    asked = await asyncio.gather(*(ask(gateways[number % len(gateways)], who, estimate) for number in range(callers)))
    return [reservation for reservation in asked if reservation is not None]


async def ask_until(
    gateways: list[Quotas], who: Principal, admitted: int, estimate: Estimate = SMALL
) -> list[Reservation]:
    """Many ask again and again until so many were admitted: on a busy machine a slice may come too late for some."""
    held: list[Reservation] = []
    async with asyncio.timeout(HANGS_S):
        while len(held) < admitted:
            held += await ask_all(gateways, who, 200, estimate)
    return held


def settle_all(reservations: list[Reservation], prompt_tokens: int = 10, completion_tokens: int = 90) -> None:
    for reservation in reservations:
        reservation.settle(prompt_tokens, 0, completion_tokens)


async def the_account(bus: Bus, account_id: str = "key_1") -> Account:
    found = await AccountStore(bus).load(account_id)
    assert found is not None
    return found[0]


@pytest.mark.parametrize(
    ("policy", "admitted"),
    [
        (Policy(requests_per_minute=60), 60),
        (Policy(tokens_per_minute=6_050), 60),
        (Policy(max_concurrent=60), 60),
        (Policy(budget_nano_usd=60 * 190_000, budget_period="day"), 60),
    ],
    ids=["requests", "tokens", "concurrent", "budget"],
)
async def test_200_callers_at_three_gateways_get_what_there_is_and_no_more(
    start: Start, policy: Policy, admitted: int
) -> None:
    gateways = await three(start)
    estimate = Estimate(10, 90, PRICE)
    held = await ask_until(gateways, principal(policy), admitted, estimate)
    held += await ask_all(gateways, principal(policy), 200, estimate)
    assert len(held) == admitted


async def test_what_running_requests_held_goes_from_gateway_to_gateway(start: Start) -> None:
    gateways = await three(start)
    who = principal(Policy(max_concurrent=8))
    for number in range(12):
        held = await ask_until([gateways[number % 3]], who, 8)
        assert len(held) == 8
        settle_all(held)


async def test_key_and_team_are_reserved_together_or_not_at_all(start: Start, bus: Bus) -> None:
    gateways = await three(start)
    who = principal(Policy(max_concurrent=50), Policy(requests_per_minute=5))
    held = await ask_until(gateways, who, 5)
    held += await ask_all(gateways, who, 100)
    assert len(held) == 5
    settle_all(held)
    for quotas in gateways:
        await quotas.close()
    key = await the_account(bus)
    assert all(lease.held == NOTHING for lease in key.leases.values())
    team = await the_account(bus, "team_1")
    assert sum(team.used[Kind.REQUESTS].values()) == 5


async def test_tokens_that_were_not_made_can_be_used(start: Start) -> None:
    [quotas] = [await start("g0")]
    who = principal(Policy(tokens_per_minute=250))
    for _ in range(15):  # 10 tokens each, reserving 100
        reservation = await ask(quotas, who)
        assert reservation is not None
        reservation.settle(8, 0, 2)
    first, second = await ask(quotas, who), await ask(quotas, who)
    assert first is not None
    assert second is None  # 150 are used, 100 reserved
    first.refund()
    assert await ask(quotas, who) is not None


async def test_the_cache_makes_it_cheaper_and_nothing_is_charged_twice(start: Start, bus: Bus) -> None:
    quotas = await start("g0")
    who = principal(Policy(budget_nano_usd=10_000_000, budget_period="month"))
    reservation = await ask(quotas, who, Estimate(1000, 100, PRICE))
    assert reservation is not None
    for _ in range(2):
        reservation.settle(1000, 400, 10)
        reservation.refund()
    await quotas.close()
    assert (await the_account(bus)).spent_nano_usd == 600_000 + 200_000 + 20_000


async def test_a_restart_forgets_nothing(start: Start) -> None:
    first = await start("g0")
    who = principal(Policy(requests_per_minute=10, budget_nano_usd=12 * 190_000))
    held = [await ask(first, who, Estimate(10, 90, PRICE)) for _ in range(7)]
    settle_all([one for one in held if one])
    await first.close()
    second = await start("g1")
    assert len(await ask_all([second], who, 20, Estimate(10, 90, PRICE))) == 3


async def test_what_a_killed_gateway_held_comes_back_with_its_lease(
    start: Start, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateways = [await start("g0"), await start("g1")]
    who = principal(Policy(max_concurrent=10))
    assert len(await ask_all(gateways[:1], who, 20)) == 10
    monkeypatch.setattr(Quotas, "_exchange_soon", _only_for(gateways[1], Quotas._exchange_soon))
    held: list[Reservation] = []

    async def has_all() -> bool:
        held.extend(await ask_all(gateways[1:], who, 10))
        assert not held or "g0" not in (await the_account(bus)).leases
        assert len(held) <= 10
        return len(held) == 10

    await until(has_all)


def _only_for(living: Quotas, exchange_soon: Callable[[Quotas, books.LocalAccount], None]) -> Callable[..., None]:
    def exchange_if_living(quotas: Quotas, book: books.LocalAccount) -> None:
        if quotas is living:
            exchange_soon(quotas, book)

    return exchange_if_living


async def test_a_gateway_that_was_frozen_learns_that_it_was_given_up(
    start: Start, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, other = await start("g0"), await start("g1")
    who = principal(Policy(budget_nano_usd=10 * 190_000))
    estimate = Estimate(10, 90, PRICE)
    [first] = await ask_all([frozen], who, 1, estimate)
    monkeypatch.setattr(ServerClock, "now_s", _later(accounts.LEASE_S + accounts.CLOCK_SLACK_S + 1))
    assert len(await ask_all([other], who, 20, estimate)) == 9  # what g0 held is presumed spent
    assert (await the_account(bus)).presumed_nano_usd == 190_000
    first.settle(5, 0, 0)
    assert len(await ask_all([frozen], who, 3, estimate)) == 0
    book = frozen._local_accounts["key_1"]
    await until(lambda: not book.slice.is_changed)
    account = await the_account(bus)
    assert (account.presumed_nano_usd, account.spent_nano_usd) == (0, 5_000)


def _later(seconds: float) -> Callable[[ServerClock], float]:
    return lambda _clock: time.time() + seconds


@pytest.mark.parametrize("ahead_s", [10.0, -10.0])
@pytest.mark.parametrize("policy", [Policy(max_concurrent=8), Policy(requests_per_minute=8)], ids=["places", "rate"])
async def test_a_clock_that_is_wrong_admits_no_more(
    start: Start, policy: Policy, ahead_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    # By its own clock the other gateway's lease was over: it took all that the other one held, once more.
    right, wrong = await start("right"), await start("wrong", clock_ahead_s=ahead_s)
    who = principal(policy)
    held = await ask_until([right], who, 8)
    for _ in range(3):
        held += await ask_all([wrong, right], who, 20)
    assert len(held) == 8
    told = [record.getMessage() for record in caplog.records if "clock" in record.getMessage()]
    assert told == [
        f"this machine's clock is 10.0 s {'ahead of' if ahead_s > 0 else 'behind'} the queue server's: is NTP running?"
    ]
    assert abs(wrong._bus.clock.skew_s - ahead_s) < 1


async def test_while_the_queue_server_is_away_slices_serve_until_their_lease_ends(
    start: Start, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas = await start("g0", reach_limit_s=REACH_LIMIT_S)
    who = principal(Policy(requests_per_minute=1000))
    await ask_all([quotas], who, 100)
    await ask_all([quotas], who, 1)
    await until(lambda: quotas._local_accounts["key_1"].slice.idle[Kind.REQUESTS] > 0)
    nats_server.kill()
    assert await ask(quotas, who) is not None
    with monkeypatch.context() as patched:
        patched.setattr(ServerClock, "now_s", _later(accounts.LEASE_S))
        with pytest.raises(Unavailable):
            await quotas.reserve(who, [SMALL])
    nats_server.start()

    async def serves() -> bool:
        try:
            return await quotas.reserve(who, [SMALL]) is not None
        except Unavailable:
            return False

    await until(serves)


async def test_a_slow_answer_of_the_queue_server_is_no_shortage(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    # Requests that found their slice too small were refused after 0.1 s, also by a limit that was hardly used.
    quotas = await start("g0")
    who = principal(Policy(requests_per_minute=1000))
    assert await ask(quotas, who) is not None
    store = AccountStore.store

    async def store_slowly(account_store: AccountStore, account_id: str, account: Account, over: int) -> int | None:
        await asyncio.sleep(2 * SLICE_WAIT_S)
        return await store(account_store, account_id, account, over)

    monkeypatch.setattr(AccountStore, "store", store_slowly)
    assert len(await ask_all([quotas], who, 100)) == 100


async def test_an_exchange_whose_answer_was_lost_counts_once(
    start: Start, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from protocol.errors import BusTimeout

    quotas = await start("g0", reach_limit_s=REACH_LIMIT_S)
    who = principal(Policy(requests_per_minute=10, max_concurrent=10))
    store = AccountStore.store

    async def store_and_lose_the_answer(
        account_store: AccountStore, account_id: str, account: Account, over: int
    ) -> int | None:
        await store(account_store, account_id, account, over)
        raise BusTimeout("lost")

    async def lose(account_store: AccountStore, account_id: str, account: Account, over: int) -> int | None:
        raise BusTimeout("lost")

    held: list[Reservation] = []
    for broken in (store_and_lose_the_answer, lose, store_and_lose_the_answer):
        with monkeypatch.context() as patched:
            patched.setattr(AccountStore, "store", broken)
            held += [one for one in [await ask_or_none(quotas, who)] if one]
        held += [await ask_again(quotas, who) for _ in range(2)]
    held += await ask_until([quotas], who, 10 - len(held))
    assert len(held) == 10
    settle_all(held)
    await quotas.close()
    account = await the_account(bus)
    assert sum(account.used[Kind.REQUESTS].values()) == 10
    assert account.leases["g0"].held == NOTHING


async def ask_or_none(quotas: Quotas, who: Principal) -> Reservation | None:
    try:
        return await ask(quotas, who)
    except Unavailable:
        return None


async def ask_again(quotas: Quotas, who: Principal) -> Reservation:
    """Ask until it is admitted: after a failed exchange, the next may take longer than a request waits."""
    async with asyncio.timeout(HANGS_S):
        while (one := await ask_or_none(quotas, who)) is None:
            await asyncio.sleep(POLL_S)
    return one


async def test_nothing_is_left_reserved_after_a_storm(start: Start, bus: Bus) -> None:
    gateways = await three(start)
    rng = random.Random(7)
    who = principal(
        Policy(requests_per_minute=100_000, tokens_per_minute=9_000, max_concurrent=20),
        Policy(budget_nano_usd=10**12, max_concurrent=30),
    )
    spent, most, running = 0, 0, 0

    async def call(number: int) -> None:
        nonlocal spent, most, running
        reservation = await ask(gateways[number % 3], who, Estimate(10, 90, PRICE))
        if reservation is None:
            return
        running += 1
        most = max(most, running)
        await asyncio.sleep(rng.random() * 0.01)
        running -= 1
        if rng.random() < 0.3:
            reservation.refund()
        else:
            made = rng.randrange(90)
            spent += PRICE.charge_nano_usd(10, 0, made)
            reservation.settle(10, 0, made)

    for wave in range(20):
        await asyncio.gather(*(call(wave + number) for number in range(100)))
    assert 0 < most <= 20
    for quotas in gateways:
        await quotas.close()
    for account_id in ("key_1", "team_1"):
        account = await the_account(bus, account_id)
        assert all(lease.held == NOTHING for lease in account.leases.values())
    assert account.spent_nano_usd == spent


async def test_a_recount_takes_the_ledgers_word_for_what_is_presumed(start: Start, bus: Bus, sqlite_url: str) -> None:
    await start("g0")
    database = create_engine(sqlite_url)
    policy = Policy(budget_nano_usd=10**9, budget_period="month")
    key, _ = await create_key(database, "app", SecretStr("p" * 64), Grant(policy=policy))
    now_s = time.time()
    async with database.begin() as connection:
        tokens = Price(prompt_nano_usd=0, completion_nano_usd=10**9)
        await add_price(connection, "demo", CLIENTS, tokens, from_unix_ms=0, source="test")
    received = {"this": int(now_s * 1000), "last": int((now_s - 32 * 86_400) * 1000)}
    records = [
        request_record(name, key_id=key.key_id, received_unix_ms=at, completion_tokens=40, gateway_id="dead")
        for name, at in received.items()
    ]
    await store_records(database, records)
    account_store = AccountStore(bus)
    period = period_at("month", now_s)
    gone = {"dead": ExpiredLease(exchange=3, spent_nano_usd=10_000, held_nano_usd=90_000)}
    left = Account(v=PROTOCOL_VERSION, period=period, spent_nano_usd=125_000, presumed_nano_usd=90_000, vanished=gone)
    await account_store.store(key.key_id, left, 0)
    [count] = await recount_budgets(database, account_store, now_s)
    assert (count.name, count.before_nano_usd, count.after_nano_usd) == ("app", 125_000, 65_000)
    account = await the_account(bus, key.key_id)
    assert (account.spent_nano_usd, account.presumed_nano_usd, account.vanished) == (65_000, 0, {})
    await database.dispose()


async def test_who_has_no_limit_reserves_nothing(start: Start) -> None:
    quotas = await start("g0")
    assert await quotas.reserve(principal(Policy(weight=2.0)), [SMALL]) is None
    assert not quotas._local_accounts


async def test_what_two_gateways_hold_for_nobody_serves_one_request(start: Start) -> None:
    """Each has half of what its own request lacks, and waits for the other's."""
    gateways = [await start(f"g{number}") for number in range(2)]
    who = principal(Policy(budget_nano_usd=380_000, budget_period="month"))
    cost = Estimate(10, 90, PRICE)
    for held in [await ask(quotas, who, cost) for quotas in gateways]:
        assert held is not None
        held.settle(5, 0, 45)  # half of what was reserved
    again: list[Reservation | None] = []
    async with asyncio.timeout(HANGS_S / 2):
        while not any(again):  # on a busy machine the other's half may come too late for both
            again = await asyncio.gather(*(ask(quotas, who, cost) for quotas in gateways))
    assert sum(one is not None for one in again) == 1
