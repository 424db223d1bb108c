"""Current token prices, and spending caps of hosted pools."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import SQL_ERRORS, describe
from db.money import CLIENTS, TokenPrice
from db.prices import PriceBook, load_prices
from db.tables import AttemptRow

# --- prices of tokens -------------------------------------------------------------------------------------------------
#
# Current prices in memory. Budgets use the same price book as the ledger's charges.

log = logging.getLogger(__name__)


RELOAD_PERIOD_S: Final = 10.0


class CurrentPrices:
    """The price book, with the configuration's prices as a fallback. Run ``run`` as a task."""

    def __init__(self, database: AsyncEngine, configured: Mapping[tuple[str, str], TokenPrice]) -> None:
        """``configured``: by (model, CLIENTS or a hosted pool)."""
        self._database = database
        self._book = PriceBook()
        self._configured = configured

    def of(self, model: str, unix_ms: int, pool: str = CLIENTS) -> TokenPrice | None:
        """Return the price of a model's tokens at a time, for clients or at a hosted pool; None: free."""
        price = self._book.at(model, pool, unix_ms)
        tokens = None if price is None else price.tokens
        return self._configured.get((model, pool)) if tokens is None else tokens

    async def run(self) -> None:
        """Reload the price book periodically; never returns. While SQL is unavailable the last known prices apply."""
        while True:
            try:
                async with self._database.connect() as connection:
                    self._book = await load_prices(connection)
            except SQL_ERRORS as error:
                log.warning("cannot load prices; keeping the last known ones: %s", describe(error))
            await asyncio.sleep(RELOAD_PERIOD_S)


# --- pools ------------------------------------------------------------------------------------------------------------
#
# The accounts of hosted pools' caps, and the spending that the ledger recorded.

POOL: Final = "pool"  # owner of an account, besides "key" and "team"
HOUR_MS: Final = 3_600_000


def cap_account(pool: str, period: str) -> str:
    """Return the id of the account of a pool's daily or monthly cap."""
    return f"pool:{pool}:{period}"


def pool_of_account(account_id: str) -> str:
    """Return the pool of a cap's account."""
    return account_id.partition(":")[2].rpartition(":")[0]


async def spent_at_pool(connection: AsyncConnection, pool: str, since_unix_ms: int) -> dict[str, int]:
    """Return the nano-USD that a hosted pool's attempts cost since a time, by gateway; "" if unknown.

    A price applies to the whole hour in which it was entered. Raises SQLAlchemyError.
    """
    row = AttemptRow.__table__.c
    hour, tokens = row.started_unix_ms // HOUR_MS, (row.prompt_tokens, row.cached_tokens, row.completion_tokens)
    statement = (
        select(row.model, hour, row.gateway_id, *(func.sum(column) for column in tokens))
        # Attempts that failed before their first token were not charged.
        .where(row.pool == pool, row.started_unix_ms >= since_unix_ms)
        .where(or_(row.outcome != "failed", row.completion_tokens > 0))
        .group_by(row.model, hour, row.gateway_id)
    )
    prices, spent = await load_prices(connection), defaultdict[str, int](int)
    for model, at_hour, gateway_id, *sums in await connection.execute(statement):
        price = prices.at(model, pool, (at_hour + 1) * HOUR_MS - 1)
        if price is not None and price.tokens is not None:
            spent[gateway_id or ""] += price.tokens.charge_nano_usd(*map(int, sums))
    return spent
