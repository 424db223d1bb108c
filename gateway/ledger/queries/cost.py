"""What tokens cost in each pool, idle time included, and what spot machines save."""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.queries.window import NO_FILTERS, Filters, Window


@dataclass(frozen=True, slots=True)
class PoolCost:
    """What one pool has cost. Money in nano-USD."""

    pool: str
    provider: str
    region: str
    tier: str
    up_ms: int  # instance time: of all its workers together
    busy_ms: int  # of this, with at least one job
    machine_nano_usd: int  # instance time x price, idle time included
    token_nano_usd: int  # what a hosted API charges us for tokens, by the price book
    on_demand_nano_usd: int | None  # what the same instance time would have cost on demand; None: unknown

    @property
    def cost_nano_usd(self) -> int:
        """All in all."""
        return self.machine_nano_usd + self.token_nano_usd

    @property
    def idle_share(self) -> float | None:
        """The share of its instance time without any job; None: it was never up."""
        return 1 - self.busy_ms / self.up_ms if self.up_ms else None

    @property
    def saving_nano_usd(self) -> int | None:
        """What it has saved against on-demand machines; None: their price is unknown."""
        return None if self.on_demand_nano_usd is None else self.on_demand_nano_usd - self.machine_nano_usd


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one model's tokens have cost in one pool: its share, by tokens, of the pool's machines, idle time included.

    Tokens that no pool answered (requests refused by the queue) are in none. A pool that was up but has answered
    nothing has one row, with an empty model.
    """

    model: str
    pool: str
    provider: str
    region: str
    tier: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost_nano_usd: int
    idle_nano_usd: int  # of this, for time in which the machines had no job
    charge_nano_usd: int  # what its callers were charged

    @property
    def nano_usd_per_1k_tokens(self) -> int | None:
        """Cost ÷ (prompt + completion tokens / 1000); None: no tokens."""
        tokens = self.prompt_tokens + self.completion_tokens
        return round(self.cost_nano_usd * 1000 / tokens) if tokens else None


async def pool_costs(connection: AsyncConnection, window: Window, *, where: Filters = NO_FILTERS) -> list[PoolCost]:
    """Of each pool, the dearest first. Of ``where`` only pool, provider, region and tier count."""
    raise NotImplementedError


async def model_costs(connection: AsyncConnection, window: Window, *, where: Filters = NO_FILTERS) -> list[ModelCost]:
    """Of each model in each pool, the dearest first. Of ``where``, team, key, endpoint and outcome do not count."""
    raise NotImplementedError
