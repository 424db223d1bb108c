"""``[pools.<name>]`` of spillway.toml, and the gateway's view of hosted pools."""

from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field, model_validator

from fleet.settings import PoolFleetSettings
from gateway.settings import HostedPoolSettings, PriceSettings
from pool_worker.settings import (
    ChatEngineSettings,
    EngineSettings,
    GateSettings,
    HttpAddress,
    NoticeKind,
    Seconds,
    Share,
    Tier,
    WatchSettings,
)
from protocol import subjects
from protocol.settings import Settings


class PoolSettings(Settings):
    """``[pools.<name>]``: workers of one provider, region, engine, model set and price tier."""

    provider: str = "local"
    region: str = "local"
    tier: Tier = "on-demand"
    usd_per_hour: Annotated[float, Field(ge=0)] = 0.0  # of one worker's machine
    on_demand_usd_per_hour: Annotated[float, Field(ge=0)] | None = None  # its cost if it were not spot or reserved
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    prices: dict[str, PriceSettings] = Field(default_factory=dict)  # what a hosted API charges us, by model
    usd_per_day: Annotated[float, Field(gt=0, le=1_000_000)] | None = None  # caps of a hosted pool: docs/HOSTED.md
    usd_per_month: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    workers: Annotated[int, Field(ge=0, le=64)] = 1  # that `spillway up` starts on this machine
    drain_s: Seconds = 25.0
    notice: NoticeKind = "none"
    notice_url: HttpAddress | None = None
    batch_reserve: Share = 0.1
    gate: GateSettings | None = None
    watch: WatchSettings | None = None
    fleet: PoolFleetSettings | None = None  # None: somebody else decides how many workers there are
    engine: EngineSettings

    @property
    def is_hosted(self) -> bool:
        """True if its engine is a third party's API."""
        return self.tier == subjects.HOSTED_TIER

    def lanes(self, name: str) -> tuple[str, ...]:
        """Return the lanes that a pool of this name serves, of each of its models."""
        return (subjects.hosted_lane(name),) if self.is_hosted else subjects.LANES

    @property
    def takes_messages(self) -> bool:
        """True if its engine takes conversations instead of token ids."""
        return isinstance(self.engine, ChatEngineSettings)

    @model_validator(mode="after")
    def _caps_and_gates_must_fit_the_tier(self) -> "PoolSettings":
        caps = [name for name in ("usd_per_day", "usd_per_month") if getattr(self, name) is not None]
        if caps and not self.is_hosted:
            raise ValueError(f'{caps[0]}: only for pools of tier = "hosted"')
        unpriced = [model for model in self.models if model not in self.prices]
        if caps and unpriced:
            raise ValueError(f"{caps[0]}: cannot be enforced without prices.{unpriced[0]}")
        if self.gate is not None and self.is_hosted:
            raise ValueError("gate: not for hosted pools, which take every job that gateways send them")
        return self


def hosted_pools(pools: Mapping[str, PoolSettings]) -> dict[str, HostedPoolSettings]:
    """Return the settings of hosted pools for gateways."""
    names = HostedPoolSettings.model_fields
    return {
        name: HostedPoolSettings(**{field: getattr(pool, field) for field in names})
        for name, pool in pools.items()
        if pool.is_hosted
    }


def only_hosted(pools: Mapping[str, PoolSettings]) -> frozenset[str]:
    """Return the models that only hosted pools serve."""
    return _models_of(pool for pool in pools.values() if pool.is_hosted) - _models_of(
        pool for pool in pools.values() if not pool.is_hosted
    )


def by_messages(pools: Mapping[str, PoolSettings]) -> frozenset[str]:
    """Return the models served by a pool that takes messages."""
    return _models_of(pool for pool in pools.values() if pool.takes_messages)


def only_by_messages(pools: Mapping[str, PoolSettings]) -> dict[str, int]:
    """Return the models that only such pools serve, with the longest context of these pools."""
    models = by_messages(pools) - _models_of(pool for pool in pools.values() if not pool.takes_messages)
    return {
        model: max(
            pool.engine.max_model_len
            for pool in pools.values()
            if isinstance(pool.engine, ChatEngineSettings) and model in pool.models
        )
        for model in models
    }


def _models_of(pools: Iterable[PoolSettings]) -> frozenset[str]:
    return frozenset(model for pool in pools for model in pool.models)
