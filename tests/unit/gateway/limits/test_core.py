"""The pure core: nothing is admitted beyond a limit, and nothing leaks, even if gateways crash or miss reports."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from db.accounts.principal import Limits
from gateway.limits.account import (
    CLOCK_SLACK_S,
    EMPTY,
    LEASE_S,
    WINDOW_S,
    as_of,
    exchange,
    free_amounts,
    recounted,
    used_amounts,
)
from gateway.limits.local import REFUNDABLE_S, Slice, Taken
from protocol.gateways import NOTHING, Account, Amounts, Kind

LIMITS = (20, 400, 5, 1000)
TERMS = Limits(LIMITS, "day")
NOON_S = 1_800_014_400.0  # 12:00 UTC, so that a run of minutes stays within one day


class World:
    """Several gateways with one account. Requests are admitted as in ``Quotas``, but without waiting."""

    def __init__(self) -> None:
        self.now_s = NOON_S
        self.account: Account = EMPTY
        self.slices: dict[str, Slice] = {}
        self.number = 0
        self.born = 0
        self.running: list[tuple[str, Taken]] = []
        self.admitted: list[list[float]] = []  # [moment, tokens]
        self.spent = 0
        for _ in range(3):
            self.add_gateway()

    def add_gateway(self) -> None:
        self.born += 1
        self.slices[f"g{self.born}"] = Slice()

    def exchange(
        self, gateway: str, needs: tuple[Amounts, ...], *, keep_idle: bool = True, stored: bool = True
    ) -> None:
        self.number += 1
        held = self.slices[gateway]
        lease = self.account.leases.get(gateway)
        if held.expires_s and lease is None:  # it expired, and the others noticed
            return
        report, given_back = held.begin_report(TERMS, needs, self.now_s, keep_idle=keep_idle)
        result = exchange(self.account, gateway, report, TERMS, number=self.number, now_s=self.now_s)
        if stored:
            self.account = result.account
            held.end_report(result)
        else:
            held.undo_report(report, given_back)

    def ask(self, gateway: str, needs: Amounts) -> None:
        held = self.slices[gateway]
        if not held.has(needs, self.now_s):
            self.exchange(gateway, (needs,))
        if held.has(needs, self.now_s):
            self.running.append((gateway, held.take(needs, self.now_s)))
            self.admitted.append([self.now_s, needs[Kind.TOKENS]])
            self.check()

    def end(self, number: int, share: float) -> None:
        if not self.running:
            return
        gateway, taken = self.running.pop(number % len(self.running))
        tokens, money = (int(taken.amounts[kind] * share) for kind in (Kind.TOKENS, Kind.MONEY))
        self.slices[gateway].settle(taken, (1, tokens, 0, money), self.now_s)
        self.admitted[self._index_of(taken)][1] = tokens
        self.spent += money

    def _index_of(self, taken: Taken) -> int:
        return next(
            number
            for number, (moment, tokens) in enumerate(self.admitted)
            if int(moment) == taken.at_s and tokens == taken.amounts[Kind.TOKENS]
        )

    def crash(self, gateway: str) -> None:
        del self.slices[gateway]
        self.running = [one for one in self.running if one[0] != gateway]
        self.add_gateway()

    def check(self) -> None:
        for start_s, _ in self.admitted:
            window = [tokens for at_s, tokens in self.admitted if start_s <= at_s < start_s + 60]
            assert len(window) <= LIMITS[Kind.REQUESTS]
            assert sum(window) <= LIMITS[Kind.TOKENS]
        assert len(self.running) <= LIMITS[Kind.CONCURRENT]
        reserved = sum(taken.amounts[Kind.MONEY] for _, taken in self.running)
        assert self.spent + reserved <= LIMITS[Kind.MONEY]
        assert all(amount >= 0 for held in self.slices.values() for amount in held.idle)


_STEPS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 2), st.integers(1, 150), st.integers(0, 200)),
    st.tuples(st.just("end"), st.integers(0, 9), st.floats(0, 1)),
    st.tuples(st.just("report"), st.integers(0, 2), st.booleans(), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([0.01, 0.3, 1.0, 2.5, 7.0, 20.0, 61.0])),
    st.tuples(st.just("crash"), st.integers(0, 2)),
)


def play(steps: list[tuple[Any, ...]]) -> World:
    world = World()
    for what, *how in steps:
        names = list(world.slices)
        if what == "ask":
            number, tokens, money = how
            world.ask(names[number], (1, tokens, 1, money))
        elif what == "end":
            world.end(*how)
        elif what == "report":
            number, keep_idle, stored = how
            world.exchange(names[number], (), keep_idle=keep_idle, stored=stored)
        elif what == "wait":
            renew_and_wait(world, how[0])
        else:
            world.crash(names[how[0]])
    return world


def renew_and_wait(world: World, seconds: float) -> None:
    """Advance time for gateways that report every second."""
    until_s = world.now_s + seconds
    while world.now_s < until_s:
        world.now_s = min(until_s, world.now_s + 1.0)
        for name in list(world.slices):
            world.exchange(name, ())


@settings(max_examples=150)
@given(st.lists(_STEPS, max_size=60))
def test_nothing_is_admitted_beyond_a_limit_and_nothing_leaks(steps: list[tuple[Any, ...]]) -> None:
    world = play(steps)
    while world.running:
        world.end(0, 0.5)
    renew_and_wait(world, LEASE_S + CLOCK_SLACK_S + WINDOW_S + 2)
    for name in list(world.slices):
        world.exchange(name, (), keep_idle=False)
    account = world.account
    assert account.used == ({}, {})
    assert all(lease.held == NOTHING for lease in account.leases.values())
    assert account.spent_nano_usd == world.spent + account.presumed_nano_usd + lost_with_crashes(world, steps)
    assert free_amounts(account, LIMITS)[:3] == LIMITS[:3]


def lost_with_crashes(world: World, steps: list[tuple[Any, ...]]) -> int:
    """Return reported minus actual spending after a crash, which is never positive; 0 without a crash."""
    crashed = any(what == "crash" for what, *_ in steps)
    difference = world.account.spent_nano_usd - world.account.presumed_nano_usd - world.spent
    if crashed:
        assert difference <= 0
    return difference if crashed else 0


def test_waiting_requests_are_granted_whole_and_in_order() -> None:
    held = Slice()
    needs: tuple[Amounts, ...] = ((1, 300, 1, 0), (1, 200, 1, 0), (1, 100, 1, 0))
    report, _ = held.begin_report(TERMS, needs, NOON_S, keep_idle=True)
    result = exchange(EMPTY, "g", report, TERMS, number=1, now_s=NOON_S)
    assert result.granted == (2, 400, 2, 0)  # too little for the second, enough for the third


def test_amounts_of_a_vanished_gateway_are_used_or_freed() -> None:
    world = World()
    for _ in range(5):
        world.ask("g1", (1, 10, 1, 100))
    world.crash("g1")
    world.now_s += LEASE_S + CLOCK_SLACK_S + 0.1
    world.exchange("g2", ())
    free = free_amounts(world.account, LIMITS)
    assert free[Kind.CONCURRENT] == LIMITS[Kind.CONCURRENT]
    assert world.account.spent_nano_usd == world.account.presumed_nano_usd >= 500
    renew_and_wait(world, WINDOW_S)
    assert free_amounts(world.account, LIMITS)[:3] == LIMITS[:3]


def test_a_recount_includes_reports_of_live_gateways_that_the_ledger_lacks() -> None:
    # Regression: if the ledger's sum exceeded the live gateways' reports, it was taken for all spending. The dead
    # gateways' spending was then refunded by as much as the ledger lagged behind the live ones.
    world = World()
    for _ in range(2):
        world.ask("g1", (1, 10, 1, 100))
        world.ask("g2", (1, 10, 1, 100))
    while world.running:
        world.end(0, 1)
        world.exchange("g1", ())
    world.exchange("g2", ())
    world.ask("g1", (1, 10, 1, 100))
    world.crash("g1")
    world.now_s += LEASE_S + CLOCK_SLACK_S + 0.1
    world.exchange("g2", (), keep_idle=False)
    assert world.account.presumed_nano_usd >= 100
    known = {"g1": 200 + 60, "g2": 0}  # g1's last request ended half-way; g2's rows are not in the ledger yet
    account = recounted(world.account, TERMS, sum(known.values()), known, world.now_s)
    assert (account.spent_nano_usd, account.presumed_nano_usd) == (400 + 60, 0)


def test_a_gateway_that_wakes_after_a_recount_refunds_nothing_twice() -> None:
    world = World()
    world.ask("g1", (1, 10, 1, 100))
    frozen, taken = world.running.pop()
    world.now_s += LEASE_S + CLOCK_SLACK_S + 0.1
    world.exchange("g2", ())
    account = recounted(world.account, TERMS, 0, {}, world.now_s)
    slice_ = world.slices[frozen]
    slice_.presumed_dead(keeps_money=False)
    slice_.settle(taken, (1, 10, 0, 70), world.now_s)
    report, _ = slice_.begin_report(TERMS, (), world.now_s, keep_idle=False)
    account = exchange(account, frozen, report, TERMS, number=99, now_s=world.now_s).account
    assert (account.spent_nano_usd, account.presumed_nano_usd) == (70, 0)


def test_a_new_period_begins_with_nothing_spent_and_old_requests_settle_for_nothing() -> None:
    world = World()
    world.ask("g1", (1, 10, 1, 600))
    world.end(0, 1.0)
    world.ask("g1", (1, 10, 1, 400))
    world.exchange("g1", ())
    assert free_amounts(world.account, LIMITS)[Kind.MONEY] == 0
    world.now_s += 12 * 3600
    world.exchange("g2", ())
    assert world.account.spent_nano_usd == 0
    world.end(0, 1.0)
    world.exchange("g1", (), keep_idle=False)
    assert world.account.spent_nano_usd == 0
    assert free_amounts(world.account, LIMITS)[Kind.MONEY] == LIMITS[Kind.MONEY]


def test_a_gateway_with_a_slow_clock_does_not_restart_the_old_day() -> None:
    world = World()
    world.now_s = midnight_s = NOON_S + 12 * 3600
    world.ask("g1", (1, 10, 1, 600))
    world.end(0, 1.0)
    world.exchange("g1", ())
    world.now_s = midnight_s - 0.5
    world.exchange("g2", ())
    assert world.account.spent_nano_usd == 600


def test_money_held_on_the_old_day_does_not_count_on_the_new_day() -> None:
    """Its clock is slow, so it reports the old day."""
    world = World()
    world.now_s = midnight_s = NOON_S + 12 * 3600
    world.exchange("g1", ())
    world.now_s = midnight_s - 0.5
    held = world.slices["g2"]
    report, _ = held.begin_report(TERMS, (), world.now_s, keep_idle=False)
    report = replace(report, held=(0, 0, 1, 700), idle=(0, 0, 0, 300))
    account = exchange(world.account, "g2", report, TERMS, number=9, now_s=world.now_s).account
    assert account.leases["g2"].held == (0, 0, 1, 0)
    assert free_amounts(account, LIMITS)[Kind.MONEY] == LIMITS[Kind.MONEY]


def test_a_lease_ends_later_for_other_gateways() -> None:
    world = World()
    world.ask("g1", (1, 10, 1, 100))
    end_s = world.account.leases["g1"].expires_unix_ms / 1000
    assert "g1" in as_of(world.account, TERMS, end_s + CLOCK_SLACK_S).leases
    assert "g1" not in as_of(world.account, TERMS, end_s + CLOCK_SLACK_S + 0.1).leases


def test_a_gateway_that_returns_has_spent_what_it_reports() -> None:
    world = World()
    world.ask("g1", (1, 10, 1, 100))
    world.now_s += LEASE_S + CLOCK_SLACK_S + 0.1
    world.exchange("g2", ())
    assert world.account.presumed_nano_usd >= 100
    frozen = world.slices["g1"]
    frozen.presumed_dead(keeps_money=True)
    frozen.settle(world.running.pop()[1], (1, 10, 0, 70), world.now_s)
    report, _ = frozen.begin_report(TERMS, (), world.now_s, keep_idle=False)
    account = exchange(world.account, "g1", report, TERMS, number=99, now_s=world.now_s).account
    assert (account.spent_nano_usd, account.presumed_nano_usd) == (70, 0)


@pytest.mark.parametrize("keeps_money", [False, True])
def test_money_freed_by_a_recount_is_not_used(keeps_money: bool) -> None:
    held = Slice()
    held.idle = [2, 30, 1, 400]
    held.presumed_dead(keeps_money=keeps_money)
    assert held.idle == [0, 0, 0, 400 if keeps_money else 0]


def test_spending_is_reported_again_after_a_conflict() -> None:
    world = World()
    world.ask("g1", (1, 10, 1, 100))
    world.end(0, 0.7)
    world.exchange("g1", (), stored=False)
    assert world.account.spent_nano_usd == 0
    world.exchange("g1", ())
    assert world.account.spent_nano_usd == 70


def test_a_late_refund_of_a_rate_is_left_to_the_window() -> None:
    for late_s, idle in ((REFUNDABLE_S - 1, 30), (REFUNDABLE_S, 0)):
        held = Slice()
        held.idle = [1, 40, 1, 0]
        taken = held.take((1, 40, 1, 0), NOON_S)
        held.settle(taken, (1, 10, 0, 0), NOON_S + late_s)
        assert held.idle == [0, idle, 1, 0]


def test_a_rate_counts_to_the_end_of_its_window() -> None:
    account = replace(EMPTY, used=({int(NOON_S): 3}, {int(NOON_S): 90}))
    assert used_amounts(as_of(account, TERMS, NOON_S + WINDOW_S - 0.1))[:2] == (3, 90)
    assert used_amounts(as_of(account, TERMS, NOON_S + WINDOW_S))[:2] == (0, 0)


def test_rates_are_counted_by_their_seconds() -> None:
    world = World()
    for second in range(LIMITS[Kind.REQUESTS]):
        world.now_s = NOON_S + second
        world.ask("g1", (1, 1, 1, 0))
        world.end(0, 1.0)
    assert Counter(int(at_s - NOON_S) for at_s, _ in world.admitted) == Counter(range(LIMITS[Kind.REQUESTS]))
    world.ask("g2", (1, 1, 1, 0))
    assert len(world.admitted) == LIMITS[Kind.REQUESTS]
    world.now_s = NOON_S + WINDOW_S
    world.ask("g2", (1, 1, 1, 0))
    assert len(world.admitted) == LIMITS[Kind.REQUESTS] + 1
