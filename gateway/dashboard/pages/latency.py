"""Latency: percentiles of how long requests wait and take, over time and by group, always with their n."""

from dataclasses import replace
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.dashboard.latency import MIN_VALUES, TITLES, shown
from gateway.dashboard.names import load_names
from gateway.dashboard.pages.overview import USUAL_GROUPING
from gateway.dashboard.view import View
from gateway.ledger.queries.distributions import percentiles
from gateway.ledger.queries.traffic import choices

MAX_GROUPS: Final = 50


async def latency(connection: AsyncConnection, view: View) -> dict[str, Any]:
    """The values of latency.html."""
    view = replace(view, by=view.by or USUAL_GROUPING)
    whole, by_group = [], []
    for measure, title in TITLES.items():
        (found,) = await percentiles(connection, view.window, measure, where=view.filters)
        whole.append((title, found.n, shown(found)))
        grouped = await percentiles(connection, view.window, measure, where=view.filters, by=view.by)
        by_group.append((title, [(one.group, one.n, shown(one)) for one in grouped[:MAX_GROUPS]]))
    return {
        "page": "Latency",
        "view": view,
        "choices": await choices(connection, view.window),
        "names": await load_names(connection),
        "whole": whole,
        "later": TITLES,
        "by_group": by_group,
        "min_values": MIN_VALUES,
    }
