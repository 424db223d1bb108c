"""Budgets when the bucket of accounts is lost: what gateways have spent stays spent, and no money is given twice."""

import asyncio
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from db.accounts.principal import Limits
from gateway.limits.account import CLOCK_SLACK_S, EMPTY, LEASE_S, is_closed
from gateway.limits.leases import RENEW_S, REPORT_PERIOD_S
from gateway.limits.local import LocalAccount, Taken
from gateway.limits.seeds import Seed
from protocol.gateways import NOTHING, Account, Amounts

BUDGET = 1000
TERMS = Limits((None, None, None, BUDGET), "day")
NOON_S = 1_800_014_400.0  # 12:00 UTC, so that a run of minutes stays within one day
STEP_S = 0.25


class Bucket:
    """The entry of one account, in memory. It is an AccountStore and the queue server's clock."""

    def __init__(self) -> None:
        self.time_s = NOON_S
        self.entry: Account | None = None
        self.sequence = 0

    def now_s(self) -> float:
        return self.time_s

    def lose(self) -> None:
        """Lose the entry. No two gateways notice it within the same millisecond as another loss."""
        self.entry = None
        self.time_s += 0.002

    async def load(self, _: str) -> tuple[Account, int] | None:
        return None if self.entry is None else (self.entry, self.sequence)

    async def store(self, _: str, account: Account, over: int) -> int | None:
        if over != (0 if self.entry is None else self.sequence):
            return None
        self.entry, self.sequence = account, self.sequence + 1
        return self.sequence


class Gateways:
    """Three gateways with one budget. They report as ``Quotas`` does, and the ledger may be behind."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.bucket = Bucket()
        self.exchanged_s = [0.0, 0.0, 0.0]
        self.running: list[tuple[int, Taken]] = []
        self.spent = self.in_ledger = 0
        self.gateways = [
            LocalAccount("key", "key", f"g{number}", TERMS, self.bucket)  # type: ignore[arg-type]
            for number in range(3)
        ]
        for number in range(3):  # each has a copy
            self.exchange(number)

    def exchange(self, number: int) -> None:
        gateway = self.gateways[number]
        gateway.seed = Seed(self.bucket.time_s, self.in_ledger)
        self.runner.run(gateway.exchange(self.bucket))  # type: ignore[arg-type]
        self.exchanged_s[number] = self.bucket.time_s

    def ask(self, number: int, nano_usd: int) -> None:
        gateway, needs = self.gateways[number], (0, 0, 0, nano_usd)
        if not gateway.slice.has(needs, self.bucket.time_s):
            gateway.waiting = {asyncio.Event(): needs}
            self.exchange(number)
            gateway.waiting = {}
        if gateway.slice.has(needs, self.bucket.time_s):
            self.running.append((number, gateway.slice.take(needs, self.bucket.time_s)))
            assert self.spent + sum(taken.amounts[-1] for _, taken in self.running) <= BUDGET

    def end(self, number: int, share: float) -> None:
        if self.running:
            gateway, taken = self.running.pop(number % len(self.running))
            actual: Amounts = (0, 0, 0, int(taken.amounts[-1] * share))
            self.gateways[gateway].slice.settle(taken, actual, self.bucket.time_s)
            self.spent += actual[-1]

    def wait(self, seconds: float) -> None:
        until_s = self.bucket.time_s + seconds
        while self.bucket.time_s < until_s:
            self.bucket.time_s += STEP_S
            for number, gateway in enumerate(self.gateways):
                age_s = self.bucket.time_s - self.exchanged_s[number]
                if age_s >= (REPORT_PERIOD_S if gateway.slice.is_changed else RENEW_S):
                    self.exchange(number)


_STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 300)),
    st.tuples(st.just("end"), st.integers(0, 9), st.floats(0, 1)),
    st.tuples(st.just("exchange"), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.sampled_from([STEP_S, 1.0, 2.5, 7.0])),
    st.tuples(st.just("lose")),
    st.tuples(st.just("ledger")),
)


@settings(max_examples=150)
@given(st.lists(_STEPS, max_size=60))
@example([("ask", 0, 226), ("ask", 0, 300), ("ask", 0, 300), ("lose",), ("ask", 1, 175)])  # g1's copy lacks these
@example([("ask", 1, 1), ("end", 0, 1.0), ("ask", 0, 2), ("exchange", 1), ("lose",)])  # both have spent since a copy
@example(  # each of three has spent since the copy of another
    [
        *[("ask", 1, 10), ("ask", 1, 10), ("end", 0, 1.0), ("exchange", 1)],
        *[("ask", 2, 10), ("end", 1, 1.0), ("exchange", 2)],
        *[("lose",), ("end", 0, 1.0), ("exchange", 0), ("exchange", 1), ("exchange", 2)],
    ]
)
def test_a_budget_holds_though_its_account_is_lost(steps: list[tuple[Any, ...]]) -> None:
    with asyncio.Runner() as runner:
        world = Gateways(runner)
        for what, *how in steps:
            if what == "lose":
                world.bucket.lose()
            elif what == "ledger":
                world.in_ledger = world.spent
            else:
                getattr(world, what)(*how)
        while world.running:
            world.end(0, 0.5)
        world.wait(LEASE_S + CLOCK_SLACK_S + RENEW_S)
        for gateway in world.gateways:
            gateway.is_wanted = True  # so it gives back what is idle
            world.exchange(world.gateways.index(gateway))
    account = world.bucket.entry
    assert account is not None
    assert all(lease.held == NOTHING for lease in account.leases.values())
    assert account.spent_nano_usd >= world.spent


@pytest.mark.parametrize(("age_s", "closed"), [(0.0, True), (5.9, True), (6.1, False), (-3600.0, False)])
def test_a_restored_account_is_closed_for_seconds_though_the_clock_is_set_back(age_s: float, closed: bool) -> None:
    account = replace(EMPTY, restored_unix_ms=int(NOON_S * 1000))
    assert is_closed(account, NOON_S + age_s) is closed


def test_a_new_account_is_open() -> None:
    assert not is_closed(EMPTY, NOON_S)
