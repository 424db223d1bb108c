"""Pools and workers: running and waiting requests now, and failovers over the selected time."""

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.charts import Chart, Line
from console.dashboard.view import View
from ledger.queries.traffic import choices, series


async def pools(connection: AsyncConnection, view: View) -> dict[str, Any]:
    """Return the values of pools.html that come from the ledger."""
    steps = view.window.steps(view.step)
    found = await series(connection, view.window, view.step, where=view.filters, names=("failovers",))
    failovers = [point.failovers for point in found[0].points] if found else [0 for _ in steps]
    return {
        "page": "Pools",
        "choices": await choices(connection, view.window),
        "chart": Chart("Failovers", "attempts", steps, [Line("failovers", failovers, 4, bars=True)], view),
    }
