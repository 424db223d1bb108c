"""Prices with their start dates: charges to clients, and costs of hosted APIs and machines.

All money is integer nano-USD (1e-9 USD): sums of millions of small charges stay exact.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from sqlalchemy import insert, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import writing
from db.money import CLIENTS, ConfiguredPrice, Price
from db.tables import PriceRow

FROM_CONFIG: Final = "config"
NO_PRICE: Final = Price()  # ends the previous price


@dataclass(frozen=True, slots=True)
class MachinePrice:
    """Nano-USD per hour of one machine, and its on-demand price (None: unknown)."""

    nano_usd_per_hour: int
    on_demand_nano_usd_per_hour: int | None


class PriceBook:
    """All prices, looked up by model, pool and moment."""

    def __init__(self, rows: Iterable[tuple[str, str, int, Price]] = ()) -> None:
        """Index ``rows``: (model, pool, from_unix_ms, price) in any order."""
        self._dated: dict[tuple[str, str], list[tuple[int, Price]]] = defaultdict(list)
        for model, pool, from_unix_ms, price in sorted(rows, key=lambda row: row[2]):
            self._dated[model, pool].append((from_unix_ms, price))

    def at(self, model: str, pool: str, unix_ms: int) -> Price | None:
        """Return the price in force at a moment; None before the first."""
        dated = self._dated.get((model, pool))
        if not dated:
            return None
        number = bisect_right(dated, unix_ms, key=lambda entry: entry[0])
        return dated[number - 1][1] if number else None

    def charge_nano_usd(
        self, model: str, unix_ms: int, prompt_tokens: int, cached_tokens: int, completion_tokens: int
    ) -> int | None:
        """Return the charge of a request received at a moment; None: the model has no price."""
        price = self.at(model, CLIENTS, unix_ms)
        tokens = price.tokens if price else None
        return tokens.charge_nano_usd(prompt_tokens, cached_tokens, completion_tokens) if tokens else None

    def dated(self) -> Mapping[tuple[str, str], list[tuple[int, Price]]]:
        """Return (model, pool) → its prices, the oldest first, each with the moment from which it holds."""
        return self._dated


async def seed_prices(engine: AsyncEngine, configured: Iterable[ConfiguredPrice], now_unix_ms: int) -> None:
    """Bring the price book in line with the configuration from now on: add changed prices, end removed ones.

    Prices that an operator has set are kept. Raises SQL errors.
    """
    wanted = {(entry.model, entry.pool): entry.price for entry in configured}
    async with writing(engine) as connection:
        latest = {
            (row.model, row.pool): row
            for row in await connection.execute(select(PriceRow.__table__).order_by(PriceRow.from_unix_ms))
        }
        for model, pool in [*wanted, *(latest.keys() - wanted.keys())]:
            before, price = latest.get((model, pool)), wanted.get((model, pool), NO_PRICE)
            if before is None or (before.source == FROM_CONFIG and _price(before) != price):
                # The newest row must be the one in force, even if the clock was set back.
                from_unix_ms = now_unix_ms if before is None else max(now_unix_ms, before.from_unix_ms + 1)
                await add_price(connection, model, pool, price, from_unix_ms=from_unix_ms, source=FROM_CONFIG)


async def add_price(
    connection: AsyncConnection, model: str, pool: str, price: Price, *, from_unix_ms: int, source: str
) -> None:
    """Add one price. Requests that are already charged do not change."""
    row = {"model": model, "pool": pool, "from_unix_ms": from_unix_ms, "source": source, **asdict(price)}
    await connection.execute(insert(PriceRow), row)


async def load_prices(connection: AsyncConnection) -> PriceBook:
    """Read the whole price book: one row per model, pool and change."""
    rows = (await connection.execute(select(PriceRow.__table__))).all()
    return PriceBook((row.model, row.pool, row.from_unix_ms, _price(row)) for row in rows)


def _price(row: object) -> Price:
    return Price(**{name: getattr(row, name) for name in Price.__dataclass_fields__})
