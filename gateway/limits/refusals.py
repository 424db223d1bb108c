"""Refusals by a limit, with when to retry; and the use of each rate. No I/O here."""

from msgspec import Struct

from db.accounts.principal import Limits, LimitValues
from gateway.limits.account import WINDOW_S, used_amounts
from protocol.gateways import KINDS, RATES, Account, Amounts, Kind

SOON_S = 1.0  # where running requests hold what is missing: nobody knows how long


class Refusal(Struct, frozen=True):
    """A refusal by a limit."""

    kind: Kind
    whose: str  # "key" | "team"
    limit: int
    used: int  # of it, running requests included
    needed: int
    retry_after_s: float | None  # None: not before the limit or the request is another one, or the period is over

    @property
    def is_too_large(self) -> bool:
        """True if the request alone is more than the limit."""
        return self.needed > self.limit


class RateStatus(Struct, frozen=True):
    """Use of a rate limit."""

    limit: int
    remaining: int
    reset_s: float  # until it is not used at all, if no more comes


def too_large(terms: Limits, whose: str, needs: Amounts) -> Refusal | None:
    """The limit that is less than the request alone."""
    for kind in (*RATES, Kind.CONCURRENT):
        limit = terms.limits[kind]
        if limit is not None and needs[kind] > limit:
            return Refusal(kind, whose, limit, 0, needs[kind], None)
    return None


def shortage(
    account: Account, terms: Limits, whose: str, needs: Amounts, *, left: Amounts, now_s: float
) -> Refusal | None:
    """The limit of which only ``left`` is to be had, less than a request needs; None: there is enough of all."""
    for kind in KINDS:
        limit = terms.limits[kind]
        if limit is not None and needs[kind] and needs[kind] > left[kind]:
            retry_after_s = _retry_after_s(account, terms.limits, kind, needs, now_s)
            return Refusal(kind, whose, limit, max(0, limit - left[kind]), needs[kind], retry_after_s)
    return None


def _retry_after_s(account: Account, limits: LimitValues, kind: Kind, needs: Amounts, now_s: float) -> float | None:
    limit = limits[kind] or 0
    if kind is Kind.MONEY:
        return None if account.spent_nano_usd + needs[kind] > limit else SOON_S
    if kind is Kind.CONCURRENT:
        return SOON_S
    free = limit - used_amounts(account)[kind]
    for second, used in sorted(account.used[kind].items()):
        if free >= needs[kind]:
            break
        free += used
        wait_s = second + WINDOW_S - now_s
        if free >= needs[kind]:
            return max(0.1, wait_s)
    return SOON_S


def rate_status(account: Account, terms: Limits, kind: Kind, gateway_id: str, now_s: float) -> RateStatus | None:
    """Return how far a rate is used, as far as this gateway knows; None: it has no limit."""
    limit = terms.limits[kind]
    if limit is None:
        return None
    oldest = int(now_s) - WINDOW_S
    used = {second: amount for second, amount in account.used[kind].items() if second > oldest and amount > 0}
    held = sum(lease.held[kind] for one, lease in account.leases.items() if one != gateway_id)
    newest = max(used, default=oldest)
    return RateStatus(limit, max(0, limit - sum(used.values()) - held), max(0.0, newest + WINDOW_S - now_s))
