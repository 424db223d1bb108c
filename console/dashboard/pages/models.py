"""Models: what is configured and served now, prices, and traffic over the selected time."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.latency import shown
from console.dashboard.live import ModelNow
from console.dashboard.view import View
from db.money import CLIENTS
from db.prices import load_prices
from ledger.queries.distributions import percentiles
from ledger.queries.refusals import refusal_totals
from ledger.queries.traffic import Traffic, totals


async def models(connection: AsyncConnection, view: View, known: Sequence[ModelNow]) -> dict[str, Any]:
    """Return the values of models.html."""
    prices, window = await load_prices(connection), view.window
    current = {model.name: prices.at(model.name, CLIENTS, view.read_unix_ms) for model in known}
    ttft = await percentiles(connection, window, "ttft_ms", by=("model",))
    refused = await refusal_totals(connection, window, by=("model",))
    return {
        "page": "Models",
        "models": known,
        "prices": {name: price.tokens for name, price in current.items() if price is not None},
        "traffic": {sums.group[0]: sums for sums in await totals(connection, window, by=("model",))},
        "ttft_p95_ms": {one.group[0]: shown(one)[1] for one in ttft},
        "refused": {model: number for (model,), number in refused.items()},
        "NO_TRAFFIC": Traffic(("",)),
    }
