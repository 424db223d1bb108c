"""What tokens cost callers now, in memory: budgets are counted by the same price book as the ledger's charges."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.errors import SQL_ERRORS, describe
from gateway.ledger.prices import CALLERS, PriceBook, TokenPrice, load_prices
from gateway.money import nano_usd
from gateway.settings import HostedPoolSettings, ModelSettings, PriceSettings

RELOAD_PERIOD_S: Final = 10.0

log = logging.getLogger(__name__)


class CurrentPrices:
    """The price book; of models that it does not have yet, the configuration's prices. Run ``run`` as a task."""

    def __init__(
        self,
        database: AsyncEngine,
        models: Mapping[str, ModelSettings],
        hosted: Mapping[str, HostedPoolSettings] | None = None,
    ) -> None:
        self._database = database
        self._book = PriceBook()
        self._configured = {(name, CALLERS): _token_price(one.price) for name, one in models.items() if one.price}
        for pool, settings in (hosted or {}).items():
            self._configured |= {(model, pool): _token_price(price) for model, price in settings.prices.items()}

    def of(self, model: str, unix_ms: int, pool: str = CALLERS) -> TokenPrice | None:
        """What a model's tokens cost callers at a moment, or us at a hosted pool; None: nothing."""
        price = self._book.at(model, pool, unix_ms)
        if price is not None:
            return price.tokens
        return self._configured.get((model, pool))

    async def run(self) -> None:
        """Read the book now and then; never returns. While SQL is away the last known prices stay."""
        while True:
            try:
                async with self._database.connect() as connection:
                    self._book = await load_prices(connection)
            except SQL_ERRORS as error:
                log.warning("cannot load the prices, keeping those known: %s", describe(error))
            await asyncio.sleep(RELOAD_PERIOD_S)


def _token_price(price: PriceSettings) -> TokenPrice:
    cached = price.prompt if price.cached is None else price.cached
    return TokenPrice(*(nano_usd(usd) for usd in (price.prompt, cached, price.completion)))
