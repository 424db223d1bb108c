"""Tokens: their number, and their distribution over requests and over the hours of the week."""

from dataclasses import replace
from typing import Any, Final, get_args

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.charts import LINE_COLORS, Chart, Line, distribution, heat_map
from console.dashboard.latency import shown
from console.dashboard.pages.overview import DEFAULT_GROUPING, MAX_GROUPS
from console.dashboard.view import View
from gateway.errors import InvalidParameter
from ledger.histogram import Measure
from ledger.queries import traffic
from ledger.queries.distributions import distributions
from ledger.queries.names import load_names
from ledger.queries.traffic import Figure
from ledger.queries.window import Dimension

HEAT_FIGURES: Final[dict[Figure, str]] = {
    "tokens": "tokens",
    "requests": "requests",
    "prompt_tokens": "prompt tokens",
    "completion_tokens": "completion tokens",
    "failovers": "failovers",
    "failed": "failed requests",
}
LENGTHS: Final[dict[Measure, str]] = {"prompt_tokens": "prompt tokens", "completion_tokens": "completion tokens"}


async def tokens(connection: AsyncConnection, view: View, heat: str) -> dict[str, Any]:
    """Return the values of tokens.html; ``heat`` is the figure of the heat map. Raises InvalidParameter."""
    figure = _figure(heat)
    view = replace(view, by=view.by or DEFAULT_GROUPING)
    window, where = view.window, view.filters
    groups = await traffic.totals(connection, window, where=where, by=view.by, order="tokens", top=MAX_GROUPS)
    (before,) = await traffic.totals(connection, view.before, where=where)
    found = await distributions(connection, window, list(LENGTHS), where=where)
    lengths = []
    for measure, name in LENGTHS.items():
        [one] = found[measure]
        lengths.append((name, distribution(one.lengths(), name), one.n, shown(one.percentiles())))
    return {
        "page": "Tokens",
        "view": view,
        "choices": await traffic.choices(connection, window, where=view.scope),
        "names": await load_names(connection, view.teams),
        "now": traffic.merge(groups),
        "before": before,
        "lengths": lengths,
        "figure": figure,
        "figures": HEAT_FIGURES,
        "chart": await _over_time(connection, view, view.by[0]),
        "groups": groups,
    }


async def tokens_heat(connection: AsyncConnection, view: View, heat: str) -> dict[str, Any]:
    """Return the values of heat.html: ``heat`` by hour and weekday. Raises InvalidParameter."""
    figure = _figure(heat)
    rows = await traffic.heat_map(connection, view.window, where=view.filters, figure=figure)
    return {"heat": heat_map(rows, HEAT_FIGURES[figure])}


def _figure(name: str) -> Figure:
    for figure in get_args(Figure):
        if figure == (name or "tokens") and figure in HEAT_FIGURES:
            return figure  # type: ignore[no-any-return]
    raise InvalidParameter(f"heat: must be one of {', '.join(HEAT_FIGURES)}.", param="heat")


async def _over_time(connection: AsyncConnection, view: View, dimension: Dimension) -> Chart:
    names = await load_names(connection, view.teams)
    found = await traffic.series(
        connection,
        view.window,
        view.step,
        where=view.filters,
        by=(dimension,),
        order="tokens",
        top=LINE_COLORS - 1,
        names=("prompt_tokens", "completion_tokens"),
    )
    lines = [
        Line(
            traffic_name(one.group[0], names),
            [point.prompt_tokens + point.completion_tokens for point in one.points],
            color,
        )
        for color, one in enumerate(found, 1)
    ]
    return Chart(f"Tokens by {dimension}", "tokens", view.window.steps(view.step), lines, view)


def traffic_name(value: str, names: dict[str, str]) -> str:
    """Return the name of a group in a chart."""
    return "all others" if value == traffic.OTHER else names.get(value, value) or "none"
