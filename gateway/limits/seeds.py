"""Initial amounts of a missing account, which is either new or was lost with its bucket.

    no entry ──this gateway has a copy──> the copy, a second or two old, including other gateways' leases; other
                                          gateways add what it lacks, and until then no money is leased
             ──it has none──────────────> with a budget: the ledger's spending in this period; else nothing;
                                          after a loss, only once all leases of the lost account have expired

The ledger's sum lacks records that are not in SQL yet. It is read only after all records published so far are written,
so it lacks only requests that ended in the last second or so, and running requests of gateways that vanished. While
the ledger is unavailable, requests are refused and may be retried.
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

FRESH_S: Final = 5.0  # lifetime of a seed
# A writer that is not behind writes records at once. One of an older release holds intents for 3 s.
LEDGER_LIMIT_S: Final = 4.5
LEDGER_LOOK_S: Final = 0.05
DAY_S: Final = 86_400


class Seed(Struct, frozen=True):
    """Initial amounts of one account."""

    at_s: float  # by the queue server's clock
    spent_nano_usd: int


class Unseeded(Exception):
    """Raised when an account is missing and its initial amounts are not known yet."""


class Ledger(Protocol):
    """Source of past spending."""

    async def spent_nano_usd(self, account_id: str, whose: str, budget_period: BudgetPeriod, now_s: float) -> int:
        """Return the spending in the current period, in nano-USD. Raises DatabaseUnavailable."""
        ...


class RollupLedger:
    """Spending from the ledger's daily rollups, since periods begin at midnight; for hosted pools, from attempts."""

    def __init__(self, database: AsyncEngine) -> None:
        self._database = database

    async def spent_nano_usd(self, account_id: str, whose: str, budget_period: BudgetPeriod, now_s: float) -> int:
        """See ``Ledger``."""
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
    """Raise BusError if the bucket was lost while this gateway ran, and others may still hold its leases."""
    made_s = await created_s(bus)
    left_s = made_s + LEASE_S + CLOCK_SLACK_S - bus.clock.now_s()
    if made_s > started_s and left_s > 0:
        raise BusError(f"the quota bucket was lost; accounts without a copy here restart in {left_s:.1f} s")


async def until_ledger_is_current(bus: Bus) -> None:
    """Wait until all records stored so far are in SQL, visible to a transaction begun after the wait.

    A writer acknowledges a message only after the commit of its records, and all messages up to the consumer's ack
    floor are acknowledged. So everything up to the floor is committed. Messages of a writer that died hold the floor
    back until another writer has written them. Delivery alone proves nothing. Intents would hold the floor back for
    seconds, so this publishes the awaited sequence, and writers write them at once. If it is lost, they write them
    slightly later.

    Raises BusError, also after ``LEDGER_LIMIT_S``.
    """
    state = (await bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}"))["state"]
    last_sequence = int(state["last_seq"])
    if int(state["first_seq"]) > last_sequence:  # all of it was purged, which happens only up to the floor
        return
    limit_s = time.monotonic() + LEDGER_LIMIT_S
    is_announced = False
    while True:
        info = await bus.api(f"CONSUMER.INFO.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}")
        if int(info["ack_floor"]["stream_seq"]) >= last_sequence:
            return
        if not is_announced:
            await bus.publish(subjects.LEDGER_WANTED, str(last_sequence).encode())
            is_announced = True
        if time.monotonic() > limit_s:
            waiting = int(info["num_pending"]) + int(info["num_ack_pending"])
            raise BusError(f"{waiting} messages of usage records are not yet in the ledger")
        await asyncio.sleep(LEDGER_LOOK_S)
