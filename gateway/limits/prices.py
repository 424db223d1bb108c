"""Current prices in memory: budgets are counted by the same price book as the ledger's charges."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import SQL_ERRORS, describe
from db.money import CLIENTS, TokenPrice
from db.prices import PriceBook, load_prices

RELOAD_PERIOD_S: Final = 10.0

log = logging.getLogger(__name__)


class CurrentPrices:
    """The price book, or the configuration's prices where it has none: not yet, or no longer. Run ``run`` as a task."""

    def __init__(self, database: AsyncEngine, configured: Mapping[tuple[str, str], TokenPrice]) -> None:
        """``configured``: by model, and CLIENTS or a hosted pool."""
        self._database = database
        self._book = PriceBook()
        self._configured = configured

    def of(self, model: str, unix_ms: int, pool: str = CLIENTS) -> TokenPrice | None:
        """Return the price of a model's tokens at a time, for clients or for us at a hosted pool; None: free."""
        price = self._book.at(model, pool, unix_ms)
        tokens = None if price is None else price.tokens
        return self._configured.get((model, pool)) if tokens is None else tokens

    async def run(self) -> None:
        """Read the book now and then; never returns. While SQL is away the last known prices stay."""
        while True:
            try:
                async with self._database.connect() as connection:
                    self._book = await load_prices(connection)
            except SQL_ERRORS as error:
                log.warning("cannot load the prices, keeping those known: %s", describe(error))
            await asyncio.sleep(RELOAD_PERIOD_S)
