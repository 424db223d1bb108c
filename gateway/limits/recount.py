"""Budgets made right by the ledger: for what a killed gateway held, a lost bucket, a budget set in mid-period."""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.accounts.principal import Limits, limits_of, period_start_s, policy_of
from db.tables import ApiKeyRow, RequestRow, TeamRow
from gateway.limits.account import EMPTY, recounted
from gateway.limits.account_store import AccountStore
from protocol.errors import BusError
from protocol.gateways import Kind

MAX_TRIES: Final = 100  # while gateways change the account


class Recount(Struct, frozen=True):
    """A budget's account before and after a recount."""

    account_id: str
    name: str
    period: str
    before_nano_usd: int
    after_nano_usd: int


async def recount_budgets(database: AsyncEngine, store: AccountStore, now_s: float) -> Sequence[Recount]:
    """Recount the current period of every budget. Raises SQL's own errors, BusError and ProtocolError."""
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
    """Nano-USD by gateway; "" where it is not known."""
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
    raise BusError(f"the quota account {account_id} changes all the time")
