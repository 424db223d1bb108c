"""Limits of a policy, and the needs of one request."""

from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec import Struct

from db.accounts.principal import BudgetPeriod, Policy
from protocol.gateways import Amounts

TOTAL: Final = "total"

LimitValues = tuple[int | None, int | None, int | None, int | None]  # by Kind; None: no limit


class Limits(Struct, frozen=True):
    """The limits of one key or team."""

    limits: LimitValues
    budget_period: BudgetPeriod = TOTAL

    def needs(self, amounts: Amounts) -> Amounts:
        """Return those of a request's needs that are limited here."""
        if None not in self.limits:
            return amounts
        requests, tokens, concurrent, money = self.limits
        return (
            0 if requests is None else amounts[0],
            0 if tokens is None else amounts[1],
            0 if concurrent is None else amounts[2],
            0 if money is None else amounts[3],
        )


def limits_of(policy: Policy) -> Limits | None:
    """The limits of a policy; None where it has none."""
    limits = (policy.requests_per_minute, policy.tokens_per_minute, policy.max_concurrent, policy.budget_nano_usd)
    if limits == (None, None, None, None):
        return None
    return Limits(limits, policy.budget_period or TOTAL)


def period_at(budget_period: BudgetPeriod, unix_s: float) -> str:
    """The name of the calendar period in which a moment lies, such as "month:2026-11-01": its kind and its first day.

    Days are those of UTC, weeks begin on Monday; the one of "total" is "total:".
    """
    if budget_period == TOTAL:
        return f"{TOTAL}:"
    return f"{budget_period}:{_first_day(budget_period, unix_s).date().isoformat()}"


def is_later(period: str, other: str) -> bool:
    """Return whether a period follows the other one; one of another kind always does: the policy has changed.

    A gateway whose clock is behind at midnight must not begin the old day again.
    """
    return period.partition(":")[0] != other.partition(":")[0] or period > other


def period_start_s(budget_period: BudgetPeriod, unix_s: float) -> float:
    """Return the start of that period, in seconds since 1970."""
    return 0.0 if budget_period == TOTAL else _first_day(budget_period, unix_s).timestamp()


def period_end_s(budget_period: BudgetPeriod, unix_s: float) -> float | None:
    """Return the end of that period, in seconds since 1970; None: never."""
    if budget_period == TOTAL:
        return None
    first = _first_day(budget_period, unix_s)
    # 32 days on is in the next month, whichever this one is.
    days = {"day": 1, "week": 7, "month": 32}[budget_period]
    return _first_day(budget_period, (first + timedelta(days=days)).timestamp()).timestamp()


def _first_day(budget_period: BudgetPeriod, unix_s: float) -> datetime:
    midnight = datetime.fromtimestamp(unix_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if budget_period == "month":
        return midnight.replace(day=1)
    return midnight - timedelta(days=midnight.weekday() if budget_period == "week" else 0)


def plus(one: Amounts, other: Amounts) -> Amounts:
    """Added up, kind by kind."""
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3])


def minus(one: Amounts, other: Amounts) -> Amounts:
    """The difference, kind by kind."""
    return (one[0] - other[0], one[1] - other[1], one[2] - other[2], one[3] - other[3])
