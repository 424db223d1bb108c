"""Initial amounts of a missing account, which may be new, or lost with its bucket.

    no entry ──this gateway has a copy──> the copy, a second or two old, with what others hold by it
             ──it has none──────────────> with a budget: what the ledger says was spent in this period; else nothing
                                          after a loss, only when nobody can hold a lease of the lost account any more

What the ledger has not written yet is missing in its sum: it is asked only once all that was there is in SQL, so that
is what ended in the last second or so, and what running requests of gateways that are gone will cost.
While it cannot be asked, requests are refused, to be tried again.
"""

import asyncio
import time
from typing import Final, Protocol

from msgspec import Struct
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.principal import BudgetPeriod, period_start_s
from db.engine import SQL_ERRORS, DatabaseUnavailable, describe
from db.tables import RollupRow, SliceRow
from gateway.limits.account import CLOCK_SLACK_S, LEASE_S, created_s
from gateway.limits.prices import POOL, pool_of_account, spent_at_pool
from protocol import subjects
from protocol.errors import BusError
from protocol.nats.bus import Bus

FRESH_S: Final = 5.0  # so long a seed may be used
# A writer writes what there is at once, unless it is behind. One of an older release holds intents for 3 s.
LEDGER_LIMIT_S: Final = 4.5
LEDGER_LOOK_S: Final = 0.05
DAY_S: Final = 86_400


class Seed(Struct, frozen=True):
    """Initial amounts of one account."""

    at_s: float  # by the queue server's clock
    spent_nano_usd: int


class Unseeded(Exception):
    """An account is not there, and what it must begin with is not known yet."""


class Ledger(Protocol):
    """Source of what was spent."""

    async def spent_nano_usd(self, account_id: str, whose: str, budget_period: BudgetPeriod, now_s: float) -> int:
        """Return what was spent in the current period. Raises DatabaseUnavailable."""
        ...


class RollupLedger:
    """The ledger's daily rollups, whose days periods begin with; for hosted pools, its attempts."""

    def __init__(self, database: AsyncEngine) -> None:
        self._database = database

    async def spent_nano_usd(self, account_id: str, whose: str, budget_period: BudgetPeriod, now_s: float) -> int:
        """Implement ``Ledger``."""
        if whose == POOL:
            return await self._spent_at_pool(account_id, budget_period, now_s)
        column = SliceRow.key_id if whose == "key" else SliceRow.team_id
        statement = (
            select(func.sum(RollupRow.charge_nano_usd))
            .join(SliceRow, SliceRow.id == RollupRow.slice_id)
            .where(
                column == account_id,
                RollupRow.width_s == DAY_S,
                RollupRow.bucket_unix_ms >= int(period_start_s(budget_period, now_s) * 1000),
            )
        )
        try:
            async with self._database.connect() as connection:
                return int(await connection.scalar(statement) or 0)
        except SQL_ERRORS as error:
            raise DatabaseUnavailable(describe(error)) from error

    async def _spent_at_pool(self, account_id: str, budget_period: BudgetPeriod, now_s: float) -> int:
        since_unix_ms = int(period_start_s(budget_period, now_s) * 1000)
        try:
            async with self._database.connect() as connection:
                return sum((await spent_at_pool(connection, pool_of_account(account_id), since_unix_ms)).values())
        except SQL_ERRORS as error:
            raise DatabaseUnavailable(describe(error)) from error


async def check_nobody_holds(bus: Bus, started_s: float) -> None:
    """Raise BusError if the bucket was lost while we ran, and others may still hold leases of what was in it."""
    made_s = await created_s(bus)
    left_s = made_s + LEASE_S + CLOCK_SLACK_S - bus.clock.now_s()
    if made_s > started_s and left_s > 0:
        raise BusError(f"the accounts of limits were lost; those not known here begin again in {left_s:.1f} s")


async def until_ledger_is_current(bus: Bus) -> None:
    """Wait until all records that are stored by now are in SQL, for a transaction begun then; more may come meanwhile.

    A writer acknowledges a message only after the commit of its records, and nothing up to the consumer's ack floor is
    unacknowledged. So all up to the floor is committed, whichever writer took it; what one held that died keeps the
    floor back until another has written it. What was delivered proves nothing. Intents would keep the floor back too,
    for seconds: so writers are told up to where somebody waits. Where that is lost, they write them a little later.

    Raises BusError, also where that takes longer than ``LEDGER_LIMIT_S``.
    """
    state = (await bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}"))["state"]
    last_sequence = int(state["last_seq"])
    if int(state["first_seq"]) > last_sequence:  # all of it was purged, which is done up to the floor
        return
    limit_s = time.monotonic() + LEDGER_LIMIT_S
    is_told = False
    while True:
        info = await bus.api(f"CONSUMER.INFO.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}")
        if int(info["ack_floor"]["stream_seq"]) >= last_sequence:
            return
        if not is_told:
            await bus.publish(subjects.LEDGER_WANTED, str(last_sequence).encode())
            is_told = True
        if time.monotonic() > limit_s:
            waiting = int(info["num_pending"]) + int(info["num_ack_pending"])
            raise BusError(f"{waiting} messages of usage records are not in the ledger yet")
        await asyncio.sleep(LEDGER_LOOK_S)
