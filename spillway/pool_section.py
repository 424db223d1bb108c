"""``[pools.<name>]`` of spillway.toml, and the gateway's view of hosted pools."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from fleet.settings import PoolFleetSettings
from gateway.settings import HostedPoolSettings, PriceSettings
from pool_worker.settings import (
    ChatEngineSettings,
    EngineSettings,
    GateSettings,
    NoticeKind,
    Seconds,
    Share,
    Tier,
    WatchSettings,
)
from protocol import subjects
from protocol.process import HttpUrlText, Settings


def _is_unmarked(name: str) -> str:
    if name.endswith(subjects.TRUSTED_MARK):
        raise ValueError(f"a model's name must not end with {subjects.TRUSTED_MARK}: it marks queues of trusted pools")
    return name


ModelName = Annotated[str, AfterValidator(_is_unmarked)]


class PoolSettings(Settings):
    """``[pools.<name>]``: workers of one provider, region, engine, model set and price tier."""

    provider: str = "local"
    region: str = "local"
    tier: Tier = "on-demand"
    usd_per_hour: Annotated[float, Field(ge=0)] = 0.0  # cost of one worker's machine
    on_demand_usd_per_hour: Annotated[float, Field(ge=0)] | None = None  # on-demand price of the same machine
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    prices: dict[str, PriceSettings] = Field(default_factory=dict)  # the hosted API's prices, by model
    # Caps of a hosted pool: docs/how-to/hosted.md.
    usd_per_day: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    usd_per_month: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    workers: Annotated[int, Field(ge=0, le=64)] = 1  # workers that `spillway up` starts on this machine
    drain_s: Seconds = 25.0
    notice: NoticeKind = "none"
    notice_url: HttpUrlText | None = None
    batch_reserve: Share = 0.1
    trusted: bool = False  # serves only keys and teams that require trusted pools: docs/explanation/security.md
    gate: GateSettings | None = None
    watch: WatchSettings | None = None
    fleet: PoolFleetSettings | None = None  # None: the fleet controller does not scale this pool
    engine: EngineSettings

    @property
    def is_hosted(self) -> bool:
        """True if the pool's engine is a hosted API."""
        return self.tier == subjects.HOSTED_TIER

    def lanes(self, name: str) -> tuple[str, ...]:
        """Return the lanes of each of its models that a pool with this name serves."""
        return (subjects.hosted_lane(name),) if self.is_hosted else subjects.LANES

    @property
    def takes_messages(self) -> bool:
        """True if the pool's engine takes conversations instead of token ids."""
        return isinstance(self.engine, ChatEngineSettings)

    @model_validator(mode="after")
    def _caps_and_gates_must_fit_the_tier(self) -> "PoolSettings":
        caps = [name for name in ("usd_per_day", "usd_per_month") if getattr(self, name) is not None]
        if caps and not self.is_hosted:
            raise ValueError(f'{caps[0]}: only for pools of tier = "hosted"')
        unpriced = [model for model in self.models if model not in self.prices]
        if caps and unpriced:
            raise ValueError(f"{caps[0]}: requires prices.{unpriced[0]}")
        if self.gate is not None and self.is_hosted:
            raise ValueError("gate: not for hosted pools: they take every job that gateways send to them")
        if self.trusted and self.is_hosted:
            raise ValueError("trusted: not for hosted pools: they belong to a third party")
        return self


def gateway_view(pools: Mapping[str, PoolSettings]) -> dict[str, Any]:
    """Return the fields of a gateway's settings that are derived from pools."""
    names = HostedPoolSettings.model_fields
    hosted = {name: pool for name, pool in pools.items() if pool.is_hosted}
    trusted = _models_of(pool for pool in pools.values() if pool.trusted)
    others = _models_of(pool for pool in pools.values() if not (pool.is_hosted or pool.trusted))
    return {
        "hosted": {
            name: HostedPoolSettings(**{field: getattr(pool, field) for field in names})
            for name, pool in hosted.items()
        },
        "pools": {
            model: tuple(name for name, pool in pools.items() if model in pool.models)
            for model in sorted(_models_of(pools.values()))
        },
        "only_hosted": _models_of(hosted.values()) - others,
        "trusted": trusted,
        "only_trusted": trusted - others - _models_of(hosted.values()),
        "by_messages": _models_of(pool for pool in pools.values() if pool.takes_messages),
        "only_by_messages": frozenset(only_by_messages(pools)),
    }


def only_by_messages(pools: Mapping[str, PoolSettings]) -> dict[str, int]:
    """Return the models served only by pools that take messages, with the longest context of these pools."""
    models = _models_of(pools.values()) - _models_of(pool for pool in pools.values() if not pool.takes_messages)
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
