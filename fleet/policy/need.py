"""The speed that a fleet needs, in tokens per second, and how much of it is worth which price.

Interactive work needs its expected rate times a factor for surges. How large a share of minutes is worth having
machines for depends on what idle machines cost, and on what it costs not to have them: the price of a hosted API, which
takes what would wait for too long, or, where there is none, a promise (the newsvendor's critical ratio, for each pool
by its price). As long as batch work fills machines they are not idle: headroom up to what batch work can fill is free.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from fleet.policy.view import BatchWork, Demand

LOOK_S: Final = 60.0  # between two points at which an expected rate is looked at
BATCH_LOOK_S: Final = 900.0
BATCH_MARGIN: Final = 1.03  # of batch work, for what is not foreseen
BATCH_HASTE_S: Final = 900.0  # batch work is planned to end this much before its deadline
SHARES: Final = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)  # of minutes that batch work may have covered
PROMISED_SHARE: Final = 0.995  # where nothing else takes what would wait
LEAST_SHARE: Final = 0.05


def critical_share(usd_per_token: float, hosted_usd_per_token: float | None) -> float:
    """Return the share of minutes whose demand is worth an idle machine of this price."""
    if hosted_usd_per_token is None:
        return PROMISED_SHARE
    return min(PROMISED_SHARE, max(LEAST_SHARE, 1.0 - usd_per_token / hosted_usd_per_token))


def expected_rate(demand: Demand, within_s: float) -> float:
    """Return the greatest rate of interactive work that is expected within a time."""
    looks = max(1, round(within_s / LOOK_S))
    return max(demand.expected(within_s * look / looks) for look in range(looks + 1))


def late_speed(demand: Demand, *, spare: float, present: float, within_s: float, max_wait_s: float) -> float:
    """Return the speed that is needed beyond ``spare`` for what waits, as far as more machines help it.

    ``present``: the speed of what is there and starting. What waits now counts only as far as it would still wait
    when a machine launched now is ready.
    """
    queued_then = demand.queued_tokens + within_s * (demand.tokens_per_s - present)
    late = max(0.0, queued_then - max_wait_s * present)
    return max(0.0, late / max(within_s, max_wait_s) - spare)


class Market(Struct, frozen=True):
    """How much can be had of the cheapest pool."""

    most: float = math.inf  # speed at best
    had: float = 1.0  # share of the machines asked for that can be had, on the average
    now: float = math.inf  # speed at this moment
    short_s: float = 0.0  # how long it has had less than was asked for; 0: it has not


def batch_plan(
    work: Sequence[BatchWork],
    expected: Callable[[float], float],
    surge: Callable[[float], float],
    least: float,
    market: Market,
) -> tuple[float, float]:
    """Return the share of minutes to cover, at least ``least``, and the constant speed that batch deadlines need.

    The larger the headroom for surges, the more batch work fits into it; the largest that batch work fills is free.
    Where the market has no more machines in busy hours, or none for a while, more is done in the hours before. A speed
    beyond ``market.most`` says that the cheapest pool misses a deadline.
    """
    if not work:
        return least, 0.0
    due_s = [max(one.due_in_s - min(BATCH_HASTE_S, one.due_in_s / 2), LOOK_S) for one in work]
    steps = max(1, round(due_s[-1] / BATCH_LOOK_S))
    step_s = due_s[-1] / steps
    rates = [expected((step + 0.5) * step_s) for step in range(steps)]
    margin = BATCH_MARGIN / market.had
    total = margin * sum(one.tokens for one in work)
    free = [
        share for share in SHARES
        if share > least and sum(_headroom(rates, surge(share), market.most)) * step_s <= total
    ]  # fmt: skip
    chosen = max([least, *free])
    factor, speed, done = max(1.0, surge(chosen)), 0.0, 0.0
    for due, one in zip(due_s, work, strict=True):
        done += one.tokens * margin
        count = max(1, min(steps, round(due / step_s)))
        speed = max(speed, _least_speed(rates[:count], factor, done / due, market.most))
    return chosen, speed


def missing_speed(work: Sequence[BatchWork], expected: Callable[[float], float], market: Market) -> float:
    """Return the constant speed that batch deadlines need from more expensive pools, beyond the cheapest one's limit.

    A shortage is believed to last once more for as long as it has lasted.
    """
    missing = done = 0.0
    for one in work:
        due_s = max(one.due_in_s - min(BATCH_HASTE_S, one.due_in_s / 2), LOOK_S)
        steps = max(1, round(due_s / BATCH_LOOK_S))
        step_s = due_s / steps
        can = 0.0
        for step in range(steps):
            middle_s = (step + 0.5) * step_s
            speed = min(market.now, market.most) if middle_s < market.short_s else market.most * market.had
            can += max(0.0, speed - expected(middle_s)) * step_s
        done += one.tokens * BATCH_MARGIN
        missing = max(missing, (done - can) / due_s)
    return missing


def _headroom(rates: Sequence[float], factor: float, most: float) -> list[float]:
    return [max(0.0, min(rate * factor, most) - rate) for rate in rates]


def _least_speed(rates: Sequence[float], factor: float, mean_tokens_per_s: float, most: float) -> float:
    """Return the least speed c for which max(c, factor x rate) - rate is, in the mean, what batch work needs.

    The valleys are filled as with water: the lowest rates are raised to one level. 0: the headroom is enough. Nothing
    is done for batch jobs while interactive work takes all that there is, ``most``.
    """
    missing = mean_tokens_per_s * len(rates) - sum(_headroom(rates, factor, most))
    if missing <= 0:
        return 0.0
    tops = sorted(min(rate * factor, most) for rate in rates if rate < most)
    if not tops:
        return most + missing / len(rates)
    level = 0.0
    for count, top in enumerate(tops, start=1):
        missing += top
        level = missing / count
        if count == len(tops) or level <= tops[count]:
            break
    return level
