"""``[pools.<name>]`` of spillway.toml, and what a gateway must know of the hosted ones."""

from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import Field, model_validator

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
    on_demand_usd_per_hour: Annotated[float, Field(ge=0)] | None = None  # what it would cost if not spot or reserved
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
    engine: EngineSettings

    @property
    def is_hosted(self) -> bool:
        """Whether its engine is somebody else's API."""
        return self.tier == subjects.HOSTED_TIER

    @property
    def takes_messages(self) -> bool:
        """Whether its engine is sent conversations, and not token ids."""
        return isinstance(self.engine, ChatEngineSettings)

    @model_validator(mode="after")
    def _what_belongs_to_hosted_pools(self) -> "PoolSettings":
        caps = [name for name in ("usd_per_day", "usd_per_month") if getattr(self, name) is not None]
        if caps and not self.is_hosted:
            raise ValueError(f'{caps[0]}: only pools of tier = "hosted" have one')
        unpriced = [model for model in self.models if model not in self.prices]
        if caps and unpriced:
            raise ValueError(f"{caps[0]}: cannot be kept without prices.{unpriced[0]}")
        if self.gate is not None and self.is_hosted:
            raise ValueError("gate: a hosted pool takes what gateways send it, and has none")
        return self


def hosted_pools(pools: Mapping[str, PoolSettings]) -> dict[str, HostedPoolSettings]:
    """The pools of tier "hosted", as gateways know them."""
    names = HostedPoolSettings.model_fields
    return {
        name: HostedPoolSettings(**{field: getattr(pool, field) for field in names})
        for name, pool in pools.items()
        if pool.is_hosted
    }


def only_hosted(pools: Mapping[str, PoolSettings]) -> frozenset[str]:
    """The models that hosted pools alone serve."""
    return _models_of(pool for pool in pools.values() if pool.is_hosted) - _models_of(
        pool for pool in pools.values() if not pool.is_hosted
    )


def by_messages(pools: Mapping[str, PoolSettings]) -> frozenset[str]:
    """The models that a pool serves which takes messages."""
    return _models_of(pool for pool in pools.values() if pool.takes_messages)


def only_by_messages(pools: Mapping[str, PoolSettings]) -> dict[str, int]:
    """The models that such pools alone serve, and the longest context that one of these has for it."""
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
