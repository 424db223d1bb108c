"""The reservation and the refund of one request."""

import time
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from db.accounts.principal import Limits
from gateway.limits.account import EMPTY, used_amounts
from gateway.limits.local import LocalAccount
from gateway.limits.reservation import Reservation
from protocol.gateways import Amounts, Kind, Lease

NOW_S = 1_800_014_400.0
TERMS = Limits((20, 400, 5, 1000), "day")


def local_account() -> LocalAccount:
    clock: Any = SimpleNamespace(now_s=lambda: NOW_S)
    local = LocalAccount("k", "key", "g", TERMS, clock)
    local.slice.idle = [10, 200, 3, 500]
    return local


def reserve(local: LocalAccount, amounts: Amounts) -> Reservation:
    return Reservation(amounts, [(local, local.slice.take(amounts, NOW_S))], None)


def test_it_comes_back_once() -> None:
    local = local_account()
    reservation = reserve(local, (1, 50, 1, 100))
    for _ in range(2):
        reservation.refund()
    reservation.settle(20, 0, 5)
    assert (local.slice.idle, any(local.slice.busy)) == ([10, 200, 3, 500], False)


def test_a_later_reservation_is_used_once() -> None:
    local = local_account()
    reservation = reserve(local, (1, 0, 1, 0))
    more = (0, 50, 0, 100)
    reservation.enlarge(more, [(local, local.slice.take(more, NOW_S))], None)
    reservation.settle(20, 0, 5)
    assert used_amounts(local.known_account())[Kind.TOKENS] == 25
    assert (local.slice.idle, any(local.slice.busy)) == ([9, 175, 3, 500], False)


def test_own_idle_amounts_are_not_expected_from_other_gateways() -> None:
    """Regression: a request waited until limits were reported as unavailable, instead of getting the rest."""
    local = local_account()
    local.slice.idle = [5, 100, 1, 0]
    idle = (5, 100, 1, 0)
    local.account = replace(EMPTY, used=({}, {int(NOW_S): 300}), leases={"g": Lease(1, 0, held=idle, idle=idle)})
    local.exchanged_s = time.monotonic() + 60  # a recent exchange, even on a slow machine
    refusal = local.shortage((1, 150, 1, 0), NOW_S)
    assert refusal is not None
    assert (refusal.kind, refusal.used) == (Kind.TOKENS, 300)
    others = {"g": Lease(1, 0, held=(0, 0, 0, 0), idle=(0, 0, 0, 0)), "h": Lease(1, 0, held=idle, idle=idle)}
    local.account = replace(local.account, leases=others)
    assert local.shortage((1, 150, 1, 0), NOW_S) is None
