"""Monthly budgets, and how fast they are spent."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.accounts.principal import BudgetPeriod, period_end_s, period_start_s
from db.tables import ApiKeyRow, TeamRow
from ledger.queries.traffic import totals
from ledger.queries.window import HOUR_MS, MINUTE_MS, Dimension, Window

MONTH: Final[BudgetPeriod] = "month"


@dataclass(frozen=True, slots=True)
class BudgetPace:
    """A team's or key's budget of the current month. Money in nano-USD."""

    account_id: str
    name: str
    budget_nano_usd: int
    spent_nano_usd: int  # since the month began
    hour_nano_usd: int  # in the last hour
    left_ms: int  # until the month ends

    @property
    def lasts_ms(self) -> int | None:
        """How long the rest lasts at the rate of the last hour; None: longer than the month, or all is spent."""
        rest = self.budget_nano_usd - self.spent_nano_usd
        if rest <= 0 or self.hour_nano_usd * self.left_ms <= rest * HOUR_MS:
            return None
        return rest * HOUR_MS // self.hour_nano_usd


async def budget_paces(connection: AsyncConnection, now_unix_ms: int) -> list[BudgetPace]:
    """Return the monthly budgets of teams and of active keys, with what has been spent of each."""
    of_teams = select(TeamRow.id, TeamRow.name, TeamRow.budget_nano_usd).where(
        TeamRow.budget_nano_usd.is_not(None), TeamRow.budget_period == MONTH
    )
    of_keys = select(ApiKeyRow.id, ApiKeyRow.name, ApiKeyRow.budget_nano_usd).where(
        ApiKeyRow.budget_nano_usd.is_not(None), ApiKeyRow.budget_period == MONTH, ApiKeyRow.revoked_unix_ms.is_(None)
    )
    begin_ms = int(period_start_s(MONTH, now_unix_ms / 1000) * 1000)
    end_ms = int((period_end_s(MONTH, now_unix_ms / 1000) or 0) * 1000)
    month, hour = Window(begin_ms, now_unix_ms), Window(now_unix_ms - HOUR_MS, now_unix_ms, grain_ms=MINUTE_MS)
    paces = []
    dimensions: tuple[Dimension, ...] = ("team", "key")
    for dimension, statement in zip(dimensions, (of_teams, of_keys), strict=True):
        budgets = (await connection.execute(statement)).all()
        if not budgets:
            continue
        ids = [row.id for row in budgets]
        spent = await _charges(connection, month, dimension, ids)
        last_hour = await _charges(connection, hour, dimension, ids)
        paces += [
            BudgetPace(
                row.id,
                row.name,
                row.budget_nano_usd,
                spent.get(row.id, 0),
                last_hour.get(row.id, 0),
                end_ms - now_unix_ms,
            )
            for row in budgets
        ]
    return paces


async def _charges(
    connection: AsyncConnection, window: Window, dimension: Dimension, ids: Iterable[str]
) -> dict[str, int]:
    found = await totals(connection, window, where={dimension: list(ids)}, by=(dimension,))
    return {sums.group[0]: sums.charge_nano_usd for sums in found}
