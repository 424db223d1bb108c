"""Latency: percentiles of waiting and answering times, over time and by group, always with their n."""

from dataclasses import replace
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.latency import MIN_VALUES, TITLES, shown
from console.dashboard.pages.overview import DEFAULT_GROUPING
from console.dashboard.view import View
from ledger.queries.distributions import distributions, merge
from ledger.queries.names import load_names
from ledger.queries.traffic import choices

MAX_GROUPS: Final = 50


async def latency(connection: AsyncConnection, view: View) -> dict[str, Any]:
    """Return the values of latency.html."""
    view = replace(view, by=view.by or DEFAULT_GROUPING)
    found = await distributions(connection, view.window, list(TITLES), where=view.filters, by=view.by)
    whole, by_group = [], []
    for measure, title in TITLES.items():
        all_of_them = merge(found[measure]).percentiles()
        whole.append((title, all_of_them.n, shown(all_of_them)))
        groups = [one.percentiles() for one in found[measure][:MAX_GROUPS]]
        by_group.append((title, [(one.group, one.n, shown(one)) for one in groups]))
    return {
        "page": "Latency",
        "view": view,
        "choices": await choices(connection, view.window, where=view.scope),
        "names": await load_names(connection, view.teams),
        "whole": whole,
        "later": TITLES,
        "by_group": by_group,
        "min_values": MIN_VALUES,
    }
