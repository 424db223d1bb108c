"""The client behind an API key, and its rights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

DEFAULT_TEAM_ID: Final = "team_default"  # made by the migration
INFERENCE: Final = "inference"  # generate, embed, count
METRICS: Final = "metrics"  # read /metrics
ADMIN: Final = "admin"  # everything under /admin
SCOPES: Final = (INFERENCE, METRICS, ADMIN)

BudgetPeriod = Literal["day", "week", "month", "total"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits and consents of one team or one key; see db.models._Policy."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    budget_nano_usd: int | None = None
    budget_period: BudgetPeriod | None = None
    weight: float | None = None
    priority: str | None = None
    log_payload: bool | None = None
    train_ok: bool | None = None
    redact: bool | None = None
    retention_days: int | None = None
    allow_hosted: tuple[str, ...] | None = None
    trusted_only: bool | None = None


NO_POLICY: Final = Policy()
POLICY_FIELDS: Final = tuple(field.name for field in fields(Policy))


def policy_of(values: Mapping[Any, Any]) -> Policy:
    """A policy out of what holds its fields among others; those that are missing are None."""
    return Policy(**{name: values[name] for name in POLICY_FIELDS if name in values})


@dataclass(frozen=True, slots=True)
class Principal:
    """The client behind an API key."""

    key_id: str  # ApiKeyRow.id
    key_name: str
    team_id: str  # TeamRow.id
    team_name: str
    organisation_id: str
    scopes: frozenset[str] = frozenset({INFERENCE})
    models: frozenset[str] | None = None  # those it may name; None: all
    expires_unix_ms: int | None = None  # from when on this key, or this token of it, is refused
    key_policy: Policy = NO_POLICY
    team_policy: Policy = NO_POLICY
    tenant: str = field(init=False)  # the fairness domain: the team; a key outside any team is a tenant of its own

    def __post_init__(self) -> None:  # once: a request reads it some thirty times
        object.__setattr__(self, "tenant", self.key_id if self.team_id == DEFAULT_TEAM_ID else self.team_id)

    @property
    def weight(self) -> float | None:
        """Its share of the workers, as the key or else the team says; None: neither does."""
        return self.team_policy.weight if self.key_policy.weight is None else self.key_policy.weight

    @property
    def is_batch_only(self) -> bool:
        """True if its requests take what interactive ones leave, as the key or else the team says."""
        return (self.key_policy.priority or self.team_policy.priority) == "batch"

    @property
    def trusted_only(self) -> bool:
        """True if its requests go to trusted pools and nowhere else, as the key or the team demands."""
        return bool(self.key_policy.trusted_only or self.team_policy.trusted_only)

    def has_expired(self, now_unix_ms: int) -> bool:
        """Return whether the key has expired."""
        return self.expires_unix_ms is not None and now_unix_ms >= self.expires_unix_ms

    def may_use(self, model: str) -> bool:
        """Return whether it may use this model."""
        return self.models is None or model in self.models
