import asyncio

from db.engine import create_engine
from db.money import CLIENTS, ConfiguredPrice, Price, TokenPrice
from db.prices import seed_prices
from gateway.limits.prices import CurrentPrices
from tests.waiting import until


async def test_a_configured_price_applies_after_the_price_books_ended(sqlite_url: str) -> None:
    """A gateway that starts before the ledger uses its configured price, although the price book ended it."""
    engine = create_engine(sqlite_url)
    old, kept = (ConfiguredPrice(name, CLIENTS, Price(1, 1, 1)) for name in ("old", "kept"))
    await seed_prices(engine, [old, kept], 1)
    await seed_prices(engine, [kept], 2)
    configured = TokenPrice(5, 5, 5)
    prices = CurrentPrices(engine, {("old", CLIENTS): configured, ("kept", CLIENTS): configured})
    reading = asyncio.create_task(prices.run())

    async def is_read() -> bool:
        return prices.of("kept", 3) == TokenPrice(1, 1, 1)

    await until(is_read)
    assert prices.of("old", 1) == TokenPrice(1, 1, 1)
    assert prices.of("old", 3) == configured
    assert CurrentPrices(engine, {}).of("old", 3) is None
    reading.cancel()
    await asyncio.wait([reading])
    await engine.dispose()
