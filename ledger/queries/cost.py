"""Cost of tokens in each pool, idle time included, and savings by spot machines."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Select, case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.money import TokenPrice
from db.prices import load_prices
from db.tables import InstanceRow
from ledger.queries.reading import Group
from ledger.queries.traffic import Traffic, totals, totals_by_step
from ledger.queries.window import HOUR_MS, NO_FILTERS, QUARTER_MS, Dimension, Filters, Window

_CHARGED: Final = ("prompt_tokens", "cached_tokens", "completion_tokens")
_POOL: Final[tuple[Dimension, ...]] = ("pool", "provider", "region", "tier")


@dataclass(frozen=True, slots=True)
class PoolCost:
    """Cost of one pool. Money in nano-USD."""

    pool: str
    provider: str
    region: str
    tier: str
    up_ms: int  # instance time: of all its workers together
    busy_ms: int  # of this, with at least one job
    machine_nano_usd: int  # instance time x price, idle time included
    token_nano_usd: int  # what a hosted API charges us for tokens, by the price book
    on_demand_nano_usd: int | None  # cost on demand of the time whose on-demand price is known; None: of no time
    compared_ms: int = 0  # instance time whose on-demand price is known
    compared_nano_usd: int = 0  # its cost, of machine_nano_usd

    @property
    def cost_nano_usd(self) -> int:
        """Cost of machines and tokens together."""
        return self.machine_nano_usd + self.token_nano_usd

    @property
    def idle_share(self) -> float | None:
        """Share of its instance time without any job; None: it was never up."""
        return 1 - self.busy_ms / self.up_ms if self.up_ms else None

    @property
    def saving_nano_usd(self) -> int | None:
        """Saving against on-demand machines in the time whose on-demand price is known; None: of no time."""
        return None if self.on_demand_nano_usd is None else self.on_demand_nano_usd - self.compared_nano_usd


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Cost of one model's tokens in one pool.

    That is the hosted API's charge for them, and their share of the pool's machines, idle time included. Tokens that no
    pool answered (requests refused by the queue) belong to none. A pool that was up but has answered nothing has one
    row, with an empty model.
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
    charge_nano_usd: int  # what its clients were charged
    unpriced_tokens: int  # for which they were not, as the model had no price

    @property
    def nano_usd_per_1k_tokens(self) -> int | None:
        """Cost ÷ (prompt + completion tokens / 1000); None: no tokens."""
        tokens = self.prompt_tokens + self.completion_tokens
        return round(self.cost_nano_usd * 1000 / tokens) if tokens else None


async def costs(
    connection: AsyncConnection, window: Window, *, where: Filters = NO_FILTERS
) -> tuple[list[PoolCost], list[ModelCost]]:
    """Return the cost of each pool, and of each model in each pool, the most expensive first.

    In ``where``, team, key, endpoint and outcome are ignored; a model filters the models only.
    """
    hosted = await _token_costs(connection, window, where)
    pools = await _pool_costs(connection, window, where, hosted)
    return pools, await _model_costs(connection, window, where, hosted, pools)


async def machine_costs(
    connection: AsyncConnection, steps: Sequence[Window], *, where: Filters = NO_FILTERS
) -> list[int]:
    """Return the cost of machines in each step, in nano-USD; the steps are consecutive, without gaps."""
    columns, found = InstanceRow.__table__.columns, [0] * len(steps)
    up_ms = columns.up_until_unix_ms - columns.up_from_unix_ms
    statement = select(columns.bucket_unix_ms, func.sum(up_ms * columns.nano_usd_per_hour // HOUR_MS)).where(
        columns.bucket_unix_ms >= steps[0].since_unix_ms, columns.bucket_unix_ms < steps[-1].until_unix_ms
    )
    allowed = [columns[name].in_(list(values)) for name, values in _of_pools(where).items() if values]
    starts = [step.since_unix_ms for step in steps]
    for bucket, cost in await connection.execute(statement.where(*allowed).group_by(columns.bucket_unix_ms)):
        found[bisect_right(starts, bucket) - 1] += int(cost)
    return found


async def hosted_costs(
    connection: AsyncConnection, steps: Sequence[Window], *, where: Filters = NO_FILTERS
) -> list[int]:
    """Return what hosted APIs charge for tokens in each step, in nano-USD; the steps are consecutive, without gaps.

    In ``where``, team, key, endpoint and outcome are ignored.
    """
    found = [0] * len(steps)
    edges = steps[0].since_unix_ms, steps[-1].until_unix_ms
    for model, pool, price, since, until in await _token_prices(connection, *edges, where):
        if model not in (where.get("model") or (model,)):
            continue
        within = [
            number for number, step in enumerate(steps) if step.since_unix_ms < until and since < step.until_unix_ms
        ]
        parts = [_part(steps[number], since, until) for number in within]
        here: Filters = {**_of_pools(where), "model": [model], "pool": [pool]}
        for points in (await totals_by_step(connection, parts, where=here, names=_CHARGED)).values():
            for number, sums in points.items():
                found[within[number]] += _charge(price, sums)
    return found


def _part(step: Window, since_unix_ms: int, until_unix_ms: int) -> Window:
    since, until = max(step.since_unix_ms, since_unix_ms), min(step.until_unix_ms, until_unix_ms)
    return Window(since, until, step.zone, step.grain_ms)


async def _model_costs(
    connection: AsyncConnection,
    window: Window,
    where: Filters,
    hosted: Mapping[Group, int],
    pool_costs: Iterable[PoolCost],
) -> list[ModelCost]:
    pools = {_pool_group(cost): cost for cost in pool_costs}
    answered = await totals(connection, window, where=_of_pools(where), by=("model", *_POOL))
    of_pool: dict[Group, int] = defaultdict(int)
    for traffic in answered:
        of_pool[traffic.group[1:]] += traffic.tokens
    models = where.get("model")
    costs = [
        _share(
            traffic,
            pools.get(traffic.group[1:]),
            traffic.tokens / max(1, of_pool[traffic.group[1:]]),
            hosted.get(traffic.group, 0),
        )
        for traffic in answered
        if traffic.group[1] and (not models or traffic.group[0] in models)
    ]
    unused = [cost for group, cost in pools.items() if not of_pool.get(group)] if not models else []
    costs += [_share(Traffic(("", *_pool_group(cost))), cost, 1.0, 0) for cost in unused]
    return sorted(costs, key=lambda cost: (-cost.cost_nano_usd, cost.model, cost.pool))


async def _pool_costs(
    connection: AsyncConnection, window: Window, where: Filters, hosted: Mapping[Group, int]
) -> list[PoolCost]:
    tokens: dict[Group, int] = defaultdict(int)
    for group, cost in hosted.items():
        tokens[group[1:]] += cost
    costs: list[PoolCost] = []
    for pool, provider, region, tier, *time, would_cost in await connection.execute(_machine_time(window, where)):
        up_ms, busy_ms, cost, compared_ms, compared = map(int, time)  # PostgreSQL sums bigints into decimals
        on_demand = None if would_cost is None else int(would_cost)
        charged = tokens.pop((pool, provider, region, tier), 0)
        costs.append(
            PoolCost(pool, provider, region, tier, up_ms, busy_ms, cost, charged, on_demand, compared_ms, compared)
        )
    for (pool, provider, region, tier), charged in tokens.items():  # hosted APIs have no machines of ours
        if charged:
            costs.append(PoolCost(pool, provider, region, tier, 0, 0, 0, charged, None))
    return sorted(costs, key=lambda cost: (-cost.cost_nano_usd, cost.pool))


def _machine_time(window: Window, where: Filters) -> Select[Any]:
    """Select pool, provider, region, tier; time up, time busy, cost; of time with an on-demand price: time, cost, that.

    A row without that price (of a time before it was entered) is left out of the comparison, and nothing else is.
    """
    columns = InstanceRow.__table__.columns
    pool = [columns[name] for name in _POOL]
    up_ms = columns.up_until_unix_ms - columns.up_from_unix_ms
    cost = up_ms * columns.nano_usd_per_hour // HOUR_MS
    is_known = columns.on_demand_nano_usd_per_hour.is_not(None)
    statement = select(
        *pool,
        func.sum(up_ms),
        func.sum(columns.busy_until_ms - columns.busy_from_ms),
        func.sum(cost),
        func.sum(case((is_known, up_ms), else_=0)),
        func.sum(case((is_known, cost), else_=0)),
        func.sum(up_ms * columns.on_demand_nano_usd_per_hour // HOUR_MS),
    )
    within = (columns.bucket_unix_ms >= window.since_unix_ms, columns.bucket_unix_ms < window.until_unix_ms)
    allowed = [columns[name].in_(list(values)) for name, values in _of_pools(where).items() if values]
    return statement.where(*within, *allowed).group_by(*pool)


async def _token_costs(connection: AsyncConnection, window: Window, where: Filters) -> dict[Group, int]:
    """Return (model, pool, provider, region, tier) → the provider's charge for tokens, by the prices in force.

    A price applies from the beginning of the quarter of an hour in which it was entered, the finest that rollups have.
    """
    costs: dict[Group, int] = defaultdict(int)
    edges = window.since_unix_ms, window.until_unix_ms
    for model, pool, price, since, until in await _token_prices(connection, *edges, where):
        here: Filters = {**_of_pools(where), "model": [model], "pool": [pool]}
        for sums in await totals(connection, Window(since, until), where=here, by=_POOL):
            costs[model, *sums.group] += _charge(price, sums)
    return costs


async def _token_prices(
    connection: AsyncConnection, since_unix_ms: int, until_unix_ms: int, where: Filters
) -> list[tuple[str, str, TokenPrice, int, int]]:
    """Return the prices of hosted tokens in [since, until): model, pool, price, and the part of that time."""
    found = []
    for (model, pool), dated in (await load_prices(connection)).dated().items():
        starts = [start // QUARTER_MS * QUARTER_MS for start, _ in dated]
        for start, end, (_, entry) in zip(starts, [*starts[1:], until_unix_ms], dated, strict=True):
            since, until = max(start, since_unix_ms), min(end, until_unix_ms)
            is_allowed = model and pool and pool in (where.get("pool") or (pool,))
            if is_allowed and entry.tokens and since < until:
                found.append((model, pool, entry.tokens, since, until))
    return found


def _charge(price: TokenPrice, sums: Traffic) -> int:
    return price.charge_nano_usd(sums.prompt_tokens, sums.cached_tokens, sums.completion_tokens)


def _share(traffic: Traffic, pool: PoolCost | None, part: float, hosted_nano_usd: int) -> ModelCost:
    """Build a model's cost: that part of the pool's machines (None: no known cost), and its own hosted tokens."""
    model, name, provider, region, tier = traffic.group
    return ModelCost(
        model,
        name,
        provider,
        region,
        tier,
        requests=traffic.requests,
        prompt_tokens=traffic.prompt_tokens,
        completion_tokens=traffic.completion_tokens,
        cost_nano_usd=hosted_nano_usd + (round(pool.machine_nano_usd * part) if pool else 0),
        idle_nano_usd=round(_idle(pool) * part) if pool else 0,
        charge_nano_usd=traffic.charge_nano_usd,
        unpriced_tokens=traffic.unpriced_tokens,
    )


def _idle(pool: PoolCost) -> int:
    return round(pool.machine_nano_usd * (pool.idle_share or 0.0))


def _pool_group(cost: PoolCost) -> Group:
    return cost.pool, cost.provider, cost.region, cost.tier


def _of_pools(where: Filters) -> Filters:
    return {name: values for name, values in where.items() if name in _POOL}
