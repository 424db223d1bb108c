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
        raise ValueError(f"no model's name may end with {subjects.TRUSTED_MARK}, which marks queues of trusted pools")
    return name


ModelName = Annotated[str, AfterValidator(_is_unmarked)]


class PoolSettings(Settings):
    """``[pools.<name>]``: workers of one provider, region, engine, model set and price tier."""

    provider: str = "local"
    region: str = "local"
    tier: Tier = "on-demand"
    usd_per_hour: Annotated[float, Field(ge=0)] = 0.0  # of one worker's machine
    on_demand_usd_per_hour: Annotated[float, Field(ge=0)] | None = None  # its cost if it were not spot or reserved
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    prices: dict[str, PriceSettings] = Field(default_factory=dict)  # what a hosted API charges us, by model
    # Caps of a hosted pool: docs/how-to/hosted.md.
    usd_per_day: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    usd_per_month: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    workers: Annotated[int, Field(ge=0, le=64)] = 1  # that `spillway up` starts on this machine
    drain_s: Seconds = 25.0
    notice: NoticeKind = "none"
    notice_url: HttpUrlText | None = None
    batch_reserve: Share = 0.1
    trusted: bool = False  # it serves the keys that demand trusted pools, and no others: docs/explanation/security.md
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
        if self.trusted and self.is_hosted:
            raise ValueError("trusted: not for hosted pools, which are a third party's")
        return self


def gateway_view(pools: Mapping[str, PoolSettings]) -> dict[str, Any]:
    """Return what a gateway's settings say of pools."""
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
    """Return the models that only pools that take messages serve, with the longest context of these pools."""
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
