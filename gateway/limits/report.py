"""Current use of limits, and recounts of budgets from the ledger."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.accounts.principal import Limits, limits_of, minus, period_end_s, period_start_s, plus, policy_of
from db.tables import ApiKeyRow, RequestRow, TeamRow
from gateway.limits.account import EMPTY, AccountStore, as_of, recounted, used_amounts
from protocol.errors import BusError
from protocol.gateways import KINDS, Account, Amounts, Kind

# --- use --------------------------------------------------------------------------------------------------------------
#
# Current use of each limit, from the gateways' shared accounts, without SQL.

READ_LIMIT_S: Final = 1.0  # for all accounts together
MAX_READS: Final = 32  # at once


class LimitUsage(Struct, frozen=True):
    """Use of one limit."""

    kind: Kind
    limit: int
    used: int | None  # including reservations of running requests; None: unknown
    ends_unix_ms: int | None = None  # end of a budget's period; None: no end

    @property
    def left(self) -> int | None:
        """Return the available amount; never negative, even if the limit was lowered."""
        return None if self.used is None else max(0, self.limit - self.used)


def uses(terms: Limits, used: Iterable[int | None], now_s: float) -> tuple[LimitUsage, ...]:
    """Return each limit with its use; kinds without a limit are omitted."""
    end_s = period_end_s(terms.budget_period, now_s)
    ends_unix_ms = None if end_s is None else int(end_s * 1000)
    return tuple(
        LimitUsage(kind, limit, amount, ends_unix_ms if kind is Kind.MONEY else None)
        for kind, limit, amount in zip(KINDS, terms.limits, used, strict=True)
        if limit is not None
    )


def taken_amounts(account: Account, terms: Limits, now_s: float) -> Amounts:
    """Return the amounts that are used or reserved by running requests, without idle amounts of gateways."""
    account = as_of(account, terms, now_s)
    taken = used_amounts(account)
    for lease in account.leases.values():
        taken = plus(taken, minus(lease.held, lease.idle))
    return taken


async def load_usage(
    store: AccountStore, wanted: Mapping[str, Limits], now_s: float
) -> dict[str, tuple[LimitUsage, ...]]:
    """Return the use of limits by ids of keys and teams; up to a second old.

    Raises BusError, also after ``READ_LIMIT_S``, and ProtocolError.
    """
    slots = asyncio.Semaphore(MAX_READS)

    async def load(account_id: str, terms: Limits) -> tuple[LimitUsage, ...]:
        async with slots:
            account, _ = await store.load(account_id) or (EMPTY, 0)
        return uses(terms, taken_amounts(account, terms, now_s), now_s)

    try:
        async with asyncio.timeout(READ_LIMIT_S):
            found = await asyncio.gather(*(load(account_id, terms) for account_id, terms in wanted.items()))
    except TimeoutError as error:
        raise BusError(f"the limits of {len(wanted)} keys and teams were not read within {READ_LIMIT_S:g} s") from error
    return dict(zip(wanted, found, strict=True))


# --- recount ----------------------------------------------------------------------------------------------------------
#
# Recounts of budgets from the ledger, after a killed gateway, a lost bucket, or a budget set in mid-period.

MAX_TRIES: Final = 100  # if gateways change the account meanwhile


class Recount(Struct, frozen=True):
    """A budget's account before and after a recount."""

    account_id: str
    name: str
    period: str
    before_nano_usd: int
    after_nano_usd: int


async def recount_budgets(database: AsyncEngine, store: AccountStore, now_s: float) -> Sequence[Recount]:
    """Recount the current period of every budget. Raises SQLAlchemyError, BusError and ProtocolError."""
    counts = []
    async with database.connect() as connection:
        for table, column in ((ApiKeyRow, RequestRow.key_id), (TeamRow, RequestRow.team_id)):
            for row in (await connection.execute(select(table.__table__))).mappings().all():
                terms = limits_of(policy_of(row))
                if terms is not None and terms.limits[Kind.MONEY] is not None:
                    spent = await _spent_by_gateway(connection, column == row["id"], terms, now_s)
                    counts.append(await _recount(store, row["id"], row["name"], terms, spent, now_s=now_s))
    return counts


async def _spent_by_gateway(
    connection: AsyncConnection, is_its: ColumnElement[bool], terms: Limits, now_s: float
) -> dict[str, int]:
    """Return nano-USD by gateway; "" if unknown."""
    start_unix_ms = int(period_start_s(terms.budget_period, now_s) * 1000)
    statement = (
        select(RequestRow.gateway_id, func.sum(RequestRow.charge_nano_usd))
        .where(is_its, RequestRow.received_unix_ms >= start_unix_ms)
        .group_by(RequestRow.gateway_id)
    )
    return {gateway_id or "": int(spent or 0) for gateway_id, spent in await connection.execute(statement)}


async def _recount(
    store: AccountStore, account_id: str, name: str, terms: Limits, spent: Mapping[str, int], *, now_s: float
) -> Recount:
    for _ in range(MAX_TRIES):
        before, entry = await store.load(account_id) or (EMPTY, 0)
        after = recounted(before, terms, sum(spent.values()), spent, now_s)
        if after == before or await store.store(account_id, after, entry) is not None:
            return Recount(account_id, name, after.period, before.spent_nano_usd, after.spent_nano_usd)
    raise BusError(f"the quota account {account_id} changed at every try")
