"""Cost: the cost of tokens in each pool with idle time included, and the savings by spot machines."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.view import View
from ledger.queries.cost import ModelCost, PoolCost, costs
from ledger.queries.traffic import choices


@dataclass(frozen=True, slots=True)
class CostSum:
    """All pools together. Money in nano-USD."""

    cost: int
    charge: int
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
    pools, models = await costs(connection, view.window.in_quarters, where=view.filters)
    return {
        "page": "Cost",
        "choices": await choices(connection, view.window),
        "pools": pools,
        "models": models,
        "sum": _sum(pools, models),
    }


def _sum(pools: list[PoolCost], models: list[ModelCost]) -> CostSum:
    up_ms = sum(pool.up_ms for pool in pools)
    busy_ms = sum(pool.busy_ms for pool in pools)
    savings = [pool.saving_nano_usd for pool in pools if pool.saving_nano_usd is not None]
    return CostSum(
        cost=sum(model.cost_nano_usd for model in models),
        charge=sum(model.charge_nano_usd for model in models),
        tokens=sum(model.prompt_tokens + model.completion_tokens for model in models),
        up_ms=up_ms,
        idle_share=1 - busy_ms / up_ms if up_ms else None,
        idle_cost=sum(model.idle_nano_usd for model in models),
        saving=sum(savings) if savings else None,
        on_demand=sum(pool.on_demand_nano_usd or 0 for pool in pools),
    )
