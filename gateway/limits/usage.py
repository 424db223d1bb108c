"""Use of each limit now, from the accounts that the gateways share: no SQL."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from db.accounts.principal import Limits, minus, period_end_s, plus
from gateway.limits.account import EMPTY, as_of, used_amounts
from gateway.limits.account_store import AccountStore
from protocol.errors import BusError
from protocol.gateways import KINDS, Account, Amounts, Kind

READ_LIMIT_S: Final = 1.0  # for all accounts together
MAX_READS: Final = 32  # at once


class LimitUsage(Struct, frozen=True):
    """Use of one limit."""

    kind: Kind
    limit: int
    used: int | None  # what running requests have reserved included; None: not known at the moment
    ends_unix_ms: int | None = None  # of a budget's period; None: it does not end

    @property
    def left(self) -> int | None:
        """Return what a request could still have; never negative, though a limit may have been lowered."""
        return None if self.used is None else max(0, self.limit - self.used)


def uses(terms: Limits, used: Iterable[int | None], now_s: float) -> tuple[LimitUsage, ...]:
    """Each limit with what is used of it, by Kind; what has no limit is left out."""
    end_s = period_end_s(terms.budget_period, now_s)
    ends_unix_ms = None if end_s is None else int(end_s * 1000)
    return tuple(
        LimitUsage(kind, limit, amount, ends_unix_ms if kind is Kind.MONEY else None)
        for kind, limit, amount in zip(KINDS, terms.limits, used, strict=True)
        if limit is not None
    )


def taken_amounts(account: Account, terms: Limits, now_s: float) -> Amounts:
    """Return what is used now or reserved by running requests, without what gateways hold ahead of requests."""
    account = as_of(account, terms, now_s)
    taken = used_amounts(account)
    for lease in account.leases.values():
        taken = plus(taken, minus(lease.held, lease.idle))
    return taken


async def load_usage(
    store: AccountStore, wanted: Mapping[str, Limits], now_s: float
) -> dict[str, tuple[LimitUsage, ...]]:
    """Return the use of limits by the ids of keys and teams; gateways report within a second.

    Raises BusError and ProtocolError, also where the queue server takes longer than ``READ_LIMIT_S``.
    """
    places = asyncio.Semaphore(MAX_READS)

    async def load(account_id: str, terms: Limits) -> tuple[LimitUsage, ...]:
        async with places:
            account, _ = await store.load(account_id) or (EMPTY, 0)
        return uses(terms, taken_amounts(account, terms, now_s), now_s)

    try:
        async with asyncio.timeout(READ_LIMIT_S):
            found = await asyncio.gather(*(load(account_id, terms) for account_id, terms in wanted.items()))
    except TimeoutError as error:
        raise BusError(f"the limits of {len(wanted)} keys and teams were not read within {READ_LIMIT_S:g} s") from error
    return dict(zip(wanted, found, strict=True))
