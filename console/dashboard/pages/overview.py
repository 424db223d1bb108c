"""Overview: traffic, tokens, latency, errors and failovers, now and over the selected time."""

from dataclasses import replace
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.charts import Chart, Line, Mark
from console.dashboard.latency import MIN_VALUES, TITLES
from console.dashboard.pages.refusals import refusal_chart
from console.dashboard.view import View
from db.money import NANO_USD
from ledger.queries.distributions import percentiles
from ledger.queries.fleet import lost_machines
from ledger.queries.names import load_names
from ledger.queries.refusals import refusal_totals
from ledger.queries.set_aside import set_aside_counts
from ledger.queries.traffic import Traffic, choices, merge, series, totals
from ledger.queries.window import Dimension, Window

MAX_GROUPS: Final = 50
MAX_MARKS: Final = 200
DEFAULT_GROUPING: Final[tuple[Dimension, ...]] = ("model", "pool")
CHARTED: Final = (
    "ok",
    "failed",
    "cancelled",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "failovers",
    "charge_nano_usd",
)


async def overview(connection: AsyncConnection, view: View) -> dict[str, Any]:
    """Return the values of overview.html."""
    view = replace(view, by=view.by or DEFAULT_GROUPING)
    window, where, steps = view.window, view.filters, view.window.steps(view.step)
    groups = await totals(connection, window, where=where, by=view.by, top=MAX_GROUPS)
    (before,) = await totals(connection, view.before, where=where)
    (ttft,) = await percentiles(connection, window, "ttft_ms", where=where)
    return {
        "page": "Overview",
        "view": view,
        "choices": await choices(connection, window, where=view.scope),
        "names": await load_names(connection, view.teams),
        "now": merge(groups),
        "before": before,
        "ttft": ttft,
        "min_values": MIN_VALUES,
        "refused": sum((await refusal_totals(connection, window, where=where)).values()),
        "refused_before": sum((await refusal_totals(connection, view.before, where=where)).values()),
        "charts": [*await _traffic_charts(connection, view, steps), await refusal_chart(connection, view, steps)],
        "later": {"ttft_ms": TITLES["ttft_ms"]},
        "groups": groups,
        "set_aside": 0
        if view.teams is not None
        else sum((await set_aside_counts(connection, view.since_unix_ms, view.until_unix_ms)).values()),
    }


async def _losses(connection: AsyncConnection, view: View) -> list[Mark]:
    """Return the moments at which machines were lost; none for a viewer who does not see machines."""
    if view.teams is not None:
        return []
    found = await lost_machines(connection, view.window, MAX_MARKS, where=view.filters)
    return [Mark(at_unix_ms, pool) for at_unix_ms, pool in found]


async def _traffic_charts(connection: AsyncConnection, view: View, steps: list[Window]) -> list[Chart]:
    marks = await _losses(connection, view)
    found = await series(connection, view.window, view.step, where=view.filters, names=CHARTED)
    points: tuple[Traffic, ...] = found[0].points if found else tuple(Traffic(()) for _ in steps)
    return [
        Chart(
            "Requests",
            "requests",
            steps,
            [
                Line("ok", [point.ok for point in points], 1, fill=True),
                Line("failed", [point.failed for point in points], 4),
                Line("cancelled", [point.cancelled for point in points], 6),
            ],
            view,
            marks=marks,
        ),
        Chart(
            "Tokens",
            "tokens",
            steps,
            [
                Line("prompt", [point.prompt_tokens for point in points], 1, fill=True),
                Line("cached", [point.cached_tokens for point in points], 6),
                Line("completion", [point.completion_tokens for point in points], 2, fill=True),
            ],
            view,
        ),
        Chart(
            "Charged",
            "USD",
            steps,
            [Line("charged to clients", [point.charge_nano_usd / NANO_USD for point in points], 2, fill=True)],
            view,
            whole=False,
        ),
        Chart(
            "Failovers",
            "attempts",
            steps,
            [Line("failovers", [point.failovers for point in points], 4, bars=True)],
            view,
            marks=marks,
        ),
    ]
