"""Cost: the cost of tokens in each pool, including idle time, and the savings by spot machines."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.charts import LINE_COLORS, Chart, Line
from console.dashboard.pages.overview import MAX_GROUPS
from console.dashboard.pages.tokens import traffic_name
from console.dashboard.view import View
from db.money import NANO_USD
from ledger.queries.cost import ModelCost, PoolCost, costs, hosted_costs, machine_costs
from ledger.queries.names import load_names
from ledger.queries.tags import TAG_DIMENSIONS, tag_totals
from ledger.queries.traffic import Traffic, choices, merge, series, totals
from ledger.queries.window import Dimension

STACKED: Final = LINE_COLORS - 2  # groups of the chart; the others are one more, and machines another


@dataclass(frozen=True, slots=True)
class CostSum:
    """All pools together. Money in nano-USD."""

    cost: int
    charge: int
    unpriced_tokens: int
    tokens: int
    up_ms: int
    idle_share: float | None
    idle_cost: int
    saving: int | None  # against on-demand machines, of pools whose on-demand price is known
    on_demand: int

    @property
    def per_1k_tokens(self) -> float | None:
        """Cost ÷ (tokens / 1000)."""
        return self.cost * 1000 / self.tokens if self.tokens else None


async def cost(connection: AsyncConnection, view: View) -> dict[str, Any]:
    """Return the values of cost.html."""
    view = replace(view, by=view.by or ("model",))
    pools, models = await costs(connection, view.window.in_quarters, where=view.filters)
    names = await load_names(connection, view.teams)
    groups = await totals(
        connection, view.window, where=view.filters, by=view.by, order="charge_nano_usd", top=MAX_GROUPS
    )
    return {
        "page": "Cost",
        "view": view,
        "choices": await choices(connection, view.window, where=view.scope),
        "names": names,
        "pools": pools,
        "models": models,
        "sum": _sum(pools, models),
        "chart": await _over_time(connection, view, names),
        "groups": groups,
        "charged": merge(groups) if groups else Traffic(()),
        "machines": _machines(pools, view.by),
        "tags": await _tags(connection, view),
    }


async def _tags(connection: AsyncConnection, view: View) -> list[Traffic]:
    """Return the sums of each tag, the most expensive first; none where a filter is set that tags are not kept by."""
    if not view.filters.keys() <= TAG_DIMENSIONS.keys():
        return []
    found = await tag_totals(connection, [view.window.in_quarters], where=view.filters)
    sums = [of_tag[0] for of_tag in found.values() if 0 in of_tag]
    return sorted(sums, key=lambda one: (-one.charge_nano_usd, -one.tokens, one.group))[:MAX_GROUPS]


async def _over_time(connection: AsyncConnection, view: View, names: dict[str, str]) -> Chart:
    """Return dollars charged over time, stacked, and the cost of machines and of hosted tokens as lines."""
    dimension, steps = view.by[0], view.window.steps(view.step)
    hosted = [cost / NANO_USD for cost in await hosted_costs(connection, steps, where=view.filters)]
    found = await series(
        connection,
        view.window,
        view.step,
        where=view.filters,
        by=(dimension,),
        order="charge_nano_usd",
        top=STACKED - any(hosted),
        names=("charge_nano_usd",),
    )
    charged = [
        Line(
            traffic_name(one.group[0], names),
            [point.charge_nano_usd / NANO_USD for point in one.points],
            color,
            bars=True,
            stacked=True,
        )
        for color, one in enumerate(found, 1)
    ]
    machines = [cost / NANO_USD for cost in await machine_costs(connection, steps, where=view.filters)]
    lines = [*charged, Line("cost of machines", machines, LINE_COLORS)]
    if any(hosted):
        lines.append(Line("cost of hosted tokens", hosted, LINE_COLORS - 1))
    what = "machines and hosted tokens" if any(hosted) else "machines"
    return Chart(f"Charged by {dimension}, and the cost of {what}", "USD", steps, lines, view, whole=False)


def _machines(pools: list[PoolCost], by: tuple[Dimension, ...]) -> dict[str, int]:
    """Return the cost of machines and hosted tokens by the first dimension, where pools have it."""
    found: dict[str, int] = defaultdict(int)
    if len(by) == 1 and by[0] in {"pool", "provider", "region", "tier"}:
        for pool in pools:
            found[getattr(pool, by[0])] += pool.cost_nano_usd
    return found


def _sum(pools: list[PoolCost], models: list[ModelCost]) -> CostSum:
    up_ms = sum(pool.up_ms for pool in pools)
    busy_ms = sum(pool.busy_ms for pool in pools)
    savings = [pool.saving_nano_usd for pool in pools if pool.saving_nano_usd is not None]
    return CostSum(
        cost=sum(model.cost_nano_usd for model in models),
        charge=sum(model.charge_nano_usd for model in models),
        unpriced_tokens=sum(model.unpriced_tokens for model in models),
        tokens=sum(model.prompt_tokens + model.completion_tokens for model in models),
        up_ms=up_ms,
        idle_share=1 - busy_ms / up_ms if up_ms else None,
        idle_cost=sum(model.idle_nano_usd for model in models),
        saving=sum(savings) if savings else None,
        on_demand=sum(pool.on_demand_nano_usd or 0 for pool in pools),
    )
