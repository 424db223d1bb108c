"""Reports to teams when a budget reaches a threshold, once per threshold and period.

Spending comes from the ledger's rollups, which are the same for all ledger processes. A request reserves the most that
it may cost, so requests may be refused before the budget is used up. A gateway reports that, and a budget above 80 %
then counts as used up. The first process that sees a reached threshold inserts a notice with the event;
the event's id is derived from account, period and threshold, so other processes find the notice. It is published from
there until the stream has it.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from nats.aio.msg import Msg
from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.accounts.principal import BudgetPeriod, Limits, limits_of, period_at, period_start_s, policy_of
from db.engine import SQL_ERRORS, changing, describe
from db.money import NANO_USD
from db.tables import ApiKeyRow, BudgetNoticeRow, RollupRow, SliceRow, TeamRow, WebhookEndpointRow
from ledger.webhooks.deliveries import inserting
from ledger.webhooks.events import EventType, decode_event, encode_event, event_id, new_event, publish
from protocol import subjects
from protocol.errors import BusError, ProtocolError
from protocol.gateways import Kind
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.process import wait_for

THRESHOLDS_PERCENT: Final = (50, 80, 100)
USED_UP_FROM_PERCENT: Final = 80  # spent, a budget counts as used up once a request has been refused
EVENT_TYPE: Final[EventType] = "team.budget.threshold"
MAX_REFUSED: Final = 10_000  # accounts
REFUSED_FOR_S: Final = 60.0
DAY_S: Final = 86_400  # width of the rollups that add up to budget periods
NOTICES_KEPT_MS: Final = 60 * DAY_S * 1000  # longer than any period that ends

_NOTICES: Final = BudgetNoticeRow.__table__

log = logging.getLogger(__name__)


class _Budget(Struct, frozen=True):
    """The budget of a team or key with an endpoint for budget events."""

    account_id: str
    name: str
    kind: str  # "team" | "key"
    team_id: str
    terms: Limits
    period: str

    @property
    def limit_nano_usd(self) -> int:
        return self.terms.limits[Kind.MONEY] or 0

    def event_id(self, percent: int) -> str:
        return event_id(EVENT_TYPE, self.account_id, self.period, str(percent))

    def highest(self, reported: Collection[str]) -> int:
        """Return the highest threshold with a notice; 0: none has one."""
        return max((percent for percent in THRESHOLDS_PERCENT if self.event_id(percent) in reported), default=0)


class BudgetWatch:
    """Watches until stopped."""

    def __init__(self, bus: Bus, engine: AsyncEngine, period_s: float, stopping: asyncio.Event) -> None:
        """``period_s``: period of the checks."""
        self._refused: dict[str, float] = {}  # account → time of a gateway's last report (monotonic clock)
        self._bus = bus
        self._engine = engine
        self._period_s = period_s
        self._stopping = stopping

    async def run(self) -> None:
        """Check the budgets once a period until ``stopping`` is set."""
        await self._bus.listen(subjects.BUDGET_REFUSED, self.on_refused)
        while not self._stopping.is_set():
            try:
                await self.check(unix_now_ms() / 1000)
            except SQL_ERRORS as error:
                log.warning("cannot check budgets, will retry: %s", describe(error))
            except (BusError, ProtocolError) as error:
                log.warning("cannot publish a budget event, will retry: %s", error)
            await wait_for(self._stopping, self._period_s)

    def on_refused(self, message: Msg) -> None:
        """Note an account whose budget no longer covers a request."""
        if len(self._refused) < MAX_REFUSED:  # a further refusal is reported again
            self._refused[message.data.decode("utf-8", "replace")] = time.monotonic()

    async def check(self, now_s: float) -> None:
        """Store the thresholds that are reached, and publish them. Raises SQL errors and BusError."""
        async with self._engine.connect() as connection:
            budgets = await _budgets(connection, now_s)
            reported = await _reported(connection, budgets)
            highest = {budget.account_id: budget.highest(reported) for budget in budgets}
            open_ = [budget for budget in budgets if highest[budget.account_id] < THRESHOLDS_PERCENT[-1]]
            spent = await _spent(connection, open_, now_s)
        self._forget_old_refusals()
        reached = [
            _notice(budget, percent, spent.get(budget.account_id, 0), now_s)
            for budget in open_
            for percent in self._reached(budget, spent.get(budget.account_id, 0))
            if percent > highest[budget.account_id]
        ]
        if reached:
            async with changing(self._engine) as connection:
                statement = inserting(connection, BudgetNoticeRow).on_conflict_do_nothing()
                await connection.execute(statement.values(reached))
        await self._publish_noted(now_s)

    def _reached(self, budget: _Budget, spent_nano_usd: int) -> tuple[int, ...]:
        """Return the thresholds that a budget has reached."""
        reached = tuple(p for p in THRESHOLDS_PERCENT if spent_nano_usd * 100 >= budget.limit_nano_usd * p)
        is_refused = USED_UP_FROM_PERCENT in reached and budget.account_id in self._refused
        return THRESHOLDS_PERCENT if is_refused else reached

    def _forget_old_refusals(self) -> None:
        """Forget old reports: the rows of that spending have arrived since."""
        oldest_s = time.monotonic() - REFUSED_FOR_S
        self._refused = {account_id: at_s for account_id, at_s in self._refused.items() if at_s > oldest_s}

    async def _publish_noted(self, now_s: float) -> None:
        noted = select(_NOTICES.c.event_id, _NOTICES.c.message).where(_NOTICES.c.message.is_not(None))
        async with self._engine.connect() as connection:
            found = (await connection.execute(noted)).all()
        for identity, message in found:
            await publish(self._bus, decode_event(message))
            async with changing(self._engine) as connection:
                of_it = update(BudgetNoticeRow).where(BudgetNoticeRow.event_id == identity)
                await connection.execute(of_it.values(message=None))
                old = (
                    BudgetNoticeRow.created_unix_ms < int(now_s * 1000) - NOTICES_KEPT_MS,
                    BudgetNoticeRow.period.not_like("total:%"),
                )
                await connection.execute(delete(BudgetNoticeRow).where(*old))


async def _budgets(connection: AsyncConnection, now_s: float) -> list[_Budget]:
    """Return the budgets whose events have an endpoint."""
    enabled = select(WebhookEndpointRow.team_id, WebhookEndpointRow.event_types).where(
        WebhookEndpointRow.disabled_reason.is_(None)
    )
    wanted = {team_id for team_id, event_types in await connection.execute(enabled) if EVENT_TYPE in event_types}
    if not wanted:
        return []
    teams = select(TeamRow.__table__, TeamRow.id.label("team_id")).where(TeamRow.id.in_(wanted))
    keys = select(ApiKeyRow.__table__).where(ApiKeyRow.team_id.in_(wanted), ApiKeyRow.revoked_unix_ms.is_(None))
    budgets = []
    for kind, statement in (("team", teams), ("key", keys)):
        for row in (await connection.execute(statement)).mappings():
            terms = limits_of(policy_of(row))
            if terms is not None and terms.limits[Kind.MONEY] is not None:
                period = period_at(terms.budget_period, now_s)
                budgets.append(_Budget(row["id"], row["name"], kind, row["team_id"], terms, period))
    return budgets


async def _reported(connection: AsyncConnection, budgets: Iterable[_Budget]) -> set[str]:
    """Return the ids of the stored notices."""
    ids = [budget.account_id for budget in budgets]
    if not ids:
        return set()
    return set((await connection.execute(select(_NOTICES.c.event_id).where(_NOTICES.c.account_id.in_(ids)))).scalars())


async def _spent(connection: AsyncConnection, budgets: Sequence[_Budget], now_s: float) -> Mapping[str, int]:
    """Return the spending of each account in its current period, in nano-USD."""
    groups: dict[tuple[str, BudgetPeriod], list[str]] = defaultdict(list)
    for budget in budgets:
        groups[budget.kind, budget.terms.budget_period].append(budget.account_id)
    spent: dict[str, int] = {}
    for (kind, budget_period), ids in groups.items():
        account = SliceRow.team_id if kind == "team" else SliceRow.key_id
        start_unix_ms = int(period_start_s(budget_period, now_s) * 1000)
        statement = (
            select(account, func.sum(RollupRow.charge_nano_usd))
            .join(RollupRow, RollupRow.slice_id == SliceRow.id)
            .where(RollupRow.width_s == DAY_S, RollupRow.bucket_unix_ms >= start_unix_ms, account.in_(ids))
            .group_by(account)
        )
        for account_id, nano_usd in await connection.execute(statement):
            spent[account_id] = int(nano_usd or 0)
    return spent


def _notice(budget: _Budget, percent: int, spent_nano_usd: int, now_s: float) -> dict[str, Any]:
    """Return the row of a reached threshold, with the event to publish."""
    identity = budget.event_id(percent)
    data = {
        "id": budget.account_id,
        "object": budget.kind,
        "name": budget.name,
        "team_id": budget.team_id,
        "threshold_percent": percent,
        "budget_usd": budget.limit_nano_usd / NANO_USD,
        "spent_usd": spent_nano_usd / NANO_USD,
        "period": budget.terms.budget_period,
        "period_start": int(period_start_s(budget.terms.budget_period, now_s)),
    }
    event = new_event(budget.team_id, EVENT_TYPE, identity, data, created_unix_s=int(now_s))
    return {
        "event_id": identity,
        "account_id": budget.account_id,
        "period": budget.period,
        "threshold_percent": percent,
        "created_unix_ms": int(now_s * 1000),
        "message": encode_event(event),
    }
