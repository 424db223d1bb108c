"""Pools and workers: running and waiting requests now, and failovers over the selected time."""

from collections.abc import Collection
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.charts import Chart, Line
from console.dashboard.view import DAY_MS, View
from ledger.queries.pools import pools_seen
from ledger.queries.traffic import choices, series

LOST_MS: Final = 7 * DAY_MS  # pools that had a worker since then and have none now are listed


async def pools(connection: AsyncConnection, view: View, live: Collection[str]) -> dict[str, Any]:
    """Return the values of pools.html that come from the ledger. ``live``: the pools that have workers now."""
    steps = view.window.steps(view.step)
    found = await series(connection, view.window, view.step, where=view.filters, names=("failovers",))
    failovers = [point.failovers for point in found[0].points] if found else [0 for _ in steps]
    return {
        "page": "Pools",
        "lost": [one for one in await pools_seen(connection, view.read_unix_ms - LOST_MS) if one.pool not in live],
        "choices": await choices(connection, view.window, where=view.scope),
        "chart": Chart("Failovers", "attempts", steps, [Line("failovers", failovers, 4, bars=True)], view),
    }
