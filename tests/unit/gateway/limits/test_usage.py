"""Current use of limits: what counts, and when a period ends."""

from datetime import UTC, datetime

import pytest

from db.accounts.principal import BudgetPeriod, Limits, period_at, period_end_s
from gateway.limits.account import CLOCK_SLACK_S, WINDOW_S
from gateway.limits.report import LimitUsage, taken_amounts, uses
from protocol.gateways import Account, Kind, Lease
from protocol.job import PROTOCOL_VERSION

NOW_S = datetime(2026, 1, 31, 13, 5, tzinfo=UTC).timestamp()  # a Saturday
TERMS = Limits((10, 1000, 4, 500), "month")


def account(lease_ends_s: float = NOW_S + 5, at_s: float = NOW_S) -> Account:
    used = ({int(at_s): 3}, {int(at_s): 200})
    lease = Lease(1, int(lease_ends_s * 1000), held=(2, 100, 3, 50), idle=(2, 60, 1, 20))
    period = period_at("month", at_s)
    return Account(PROTOCOL_VERSION, used, period, spent_nano_usd=7, leases={"g1": lease})


def test_reservations_count_as_used_and_idle_amounts_do_not() -> None:
    assert taken_amounts(account(), TERMS, NOW_S) == (3, 240, 2, 37)


def test_a_vanished_gateway_frees_concurrency_and_uses_up_the_rest() -> None:
    ended_s = NOW_S - CLOCK_SLACK_S - 1
    assert taken_amounts(account(ended_s), TERMS, NOW_S) == (5, 300, 0, 57)


def test_an_old_account_expires_with_its_window_and_its_period() -> None:
    later_s = NOW_S + WINDOW_S
    assert taken_amounts(account(later_s), TERMS, later_s) == (0, 40, 2, 37)
    next_month_s = NOW_S + 86_400
    assert taken_amounts(account(next_month_s), TERMS, next_month_s) == (0, 40, 2, 0)


def test_only_kinds_with_a_limit_are_reported_and_the_rest_is_never_negative() -> None:
    found = uses(Limits((None, 100, None, 5), "total"), (9, 130, 9, None), NOW_S)
    assert found == (LimitUsage(Kind.TOKENS, 100, 130), LimitUsage(Kind.MONEY, 5, None))
    assert [one.left for one in found] == [0, None]


@pytest.mark.parametrize(
    ("period", "at", "end"),
    [
        ("day", (2026, 1, 31), (2026, 2, 1)),
        ("week", (2026, 1, 31), (2026, 2, 2)),
        ("month", (2026, 1, 31), (2026, 2, 1)),
        ("month", (2026, 12, 1), (2027, 1, 1)),
        ("month", (2028, 2, 29), (2028, 3, 1)),
    ],
)
def test_when_a_period_ends(period: BudgetPeriod, at: tuple[int, int, int], end: tuple[int, int, int]) -> None:
    assert period_end_s(period, datetime(*at, 23, 59, tzinfo=UTC).timestamp()) == datetime(*end, tzinfo=UTC).timestamp()
    assert period_end_s("total", NOW_S) is None
