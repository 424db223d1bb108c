"""The client behind an API key, and its rights."""

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, TypeVar

from msgspec import Struct
from pydantic import SecretStr

from protocol.gateways import Amounts

DEFAULT_TEAM_ID: Final = "team_default"  # created by the migration
INFERENCE: Final = "inference"  # generate, embed, count
METRICS: Final = "metrics"  # read /metrics
ADMIN: Final = "admin"  # everything under /admin
SCOPES: Final = (INFERENCE, METRICS, ADMIN)

BudgetPeriod = Literal["day", "week", "month", "total"]


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits and consents of one team or one key; see db.tables._Policy."""

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
    """Return a policy from a mapping that has some of its fields; missing fields are None."""
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
    models: frozenset[str] | None = None  # allowed models; None: all
    expires_unix_ms: int | None = None  # when this key, or this token of it, becomes invalid
    key_policy: Policy = NO_POLICY
    team_policy: Policy = NO_POLICY
    tenant: str = field(init=False)  # the unit of fairness: the team, or the key itself if it has no team

    def __post_init__(self) -> None:  # computed once: a request reads it about thirty times
        object.__setattr__(self, "tenant", self.key_id if self.team_id == DEFAULT_TEAM_ID else self.team_id)

    @property
    def weight(self) -> float | None:
        """Share of the workers, from the key or else the team; None: not set."""
        return self.team_policy.weight if self.key_policy.weight is None else self.key_policy.weight

    @property
    def is_batch_only(self) -> bool:
        """True if all its requests are batch work, by the key's or else the team's setting."""
        return (self.key_policy.priority or self.team_policy.priority) == "batch"

    @property
    def trusted_only(self) -> bool:
        """True if the key or the team requires trusted pools."""
        return bool(self.key_policy.trusted_only or self.team_policy.trusted_only)

    def has_expired(self, now_unix_ms: int) -> bool:
        """Return whether the key has expired."""
        return self.expires_unix_ms is not None and now_unix_ms >= self.expires_unix_ms

    def may_use(self, model: str) -> bool:
        """Return whether the key may use this model."""
        return self.models is None or model in self.models


# --- consent ----------------------------------------------------------------------------------------------------------
#
# Consent to store payloads: read from the policies when a request arrives, and stored with its payload.

_Value = TypeVar("_Value", bool, int)


class Consent(Struct, frozen=True):
    """Consent to store requests and answers, with its conditions."""

    train_ok: bool  # whether training sets may be built from them
    redact: bool  # whether personal data is redacted first
    retention_days: int | None  # None: the installation's default


def consent_of(principal: Principal) -> Consent | None:
    """Return the consent of a key and its team; the key takes precedence. None, the default: store nothing."""
    key, team = principal.key_policy, principal.team_policy
    if not _first(key.log_payload, team.log_payload):
        return None
    return Consent(
        train_ok=may_train(key, team),
        redact=_first(key.redact, team.redact) is not False,
        retention_days=_first(key.retention_days, team.retention_days),
    )


def may_train(key: Policy, team: Policy) -> bool:
    """Return whether training sets may be built from the key's payloads."""
    return bool(_first(key.train_ok, team.train_ok))


def _first(of_key: _Value | None, of_team: _Value | None) -> _Value | None:
    return of_team if of_key is None else of_key


# --- hosted -----------------------------------------------------------------------------------------------------------
#
# Permissions for hosted APIs, by provider and model. By default, there are none.
#
# A permission is ``provider`` or ``provider/model``. Both can have wildcards: ``openai``, ``openai/gpt-*``, ``*``.
#
#     team (if not set: [tenants.X])  AND  key (if not set: all permissions of its team)
#
# A key can only narrow its team's permissions. A key without a team needs only its own permission. A key or team that
# requires trusted pools has no permission at all.

MAX_LEAVE_CHARS: Final = 200

Leaves = tuple[str, ...]  # empty: none


def why_no_leave(text: str) -> str | None:
    """Return why an ``allow_hosted`` permission is invalid; None if it is valid."""
    provider, slash, model = text.partition("/")
    if not provider or (slash and not model) or len(text) > MAX_LEAVE_CHARS or not text.isprintable() or " " in text:
        return f"{text[:MAX_LEAVE_CHARS]!r} must be provider or provider/model, such as openai or openai/gpt-*"
    return None


def allowed_providers(
    principal: Principal, configured: Leaves | None, providers: Iterable[str], model: str
) -> tuple[str, ...]:
    """Return the subset of ``providers`` to which the client's prompts for a model may be sent.

    ``configured``: the tenant's permissions in the configuration; None: not set.
    """
    team, key = principal.team_policy.allow_hosted, principal.key_policy.allow_hosted
    team = configured if team is None else team
    if team is None and principal.team_id == DEFAULT_TEAM_ID:
        team, key = key, None
    if not team or principal.trusted_only:
        return ()
    return tuple(one for one in providers if _allows(team, one, model) and (key is None or _allows(key, one, model)))


def _allows(leaves: Leaves, provider: str, model: str) -> bool:
    for leave in leaves:
        allowed_provider, _, allowed_model = leave.partition("/")
        if fnmatchcase(provider, allowed_provider) and fnmatchcase(model, allowed_model or "*"):
            return True
    return False


# --- limits -----------------------------------------------------------------------------------------------------------
#
# Limits of a policy, and the amounts that one request needs.

TOTAL: Final = "total"

LimitValues = tuple[int | None, int | None, int | None, int | None]  # by Kind; None: no limit


class Limits(Struct, frozen=True):
    """The limits of one key or team."""

    limits: LimitValues
    budget_period: BudgetPeriod = TOTAL

    def needs(self, amounts: Amounts) -> Amounts:
        """Return a request's amounts, with 0 for those that are not limited here."""
        if None not in self.limits:
            return amounts
        requests, tokens, concurrent, money = self.limits
        return (
            0 if requests is None else amounts[0],
            0 if tokens is None else amounts[1],
            0 if concurrent is None else amounts[2],
            0 if money is None else amounts[3],
        )


def limits_of(policy: Policy) -> Limits | None:
    """Return the limits of a policy; None if it has none."""
    limits = (policy.requests_per_minute, policy.tokens_per_minute, policy.max_concurrent, policy.budget_nano_usd)
    if limits == (None, None, None, None):
        return None
    return Limits(limits, policy.budget_period or TOTAL)


def period_at(budget_period: BudgetPeriod, unix_s: float) -> str:
    """Return the name of a time's calendar period, such as "month:2026-11-01": its kind and its first day.

    Days are UTC days, weeks start on Monday. The name for "total" is "total:".
    """
    if budget_period == TOTAL:
        return f"{TOTAL}:"
    return f"{budget_period}:{_first_day(budget_period, unix_s).date().isoformat()}"


def is_later(period: str, other: str) -> bool:
    """Return whether a period is later than another. A period of another kind always is: the policy has changed.

    Protects against a gateway whose clock is slow at midnight: it must not restart the old day.
    """
    return period.partition(":")[0] != other.partition(":")[0] or period > other


def period_start_s(budget_period: BudgetPeriod, unix_s: float) -> float:
    """Return the start of that period, in seconds since 1970."""
    return 0.0 if budget_period == TOTAL else _first_day(budget_period, unix_s).timestamp()


def period_end_s(budget_period: BudgetPeriod, unix_s: float) -> float | None:
    """Return the end of that period, in seconds since 1970; None: never."""
    if budget_period == TOTAL:
        return None
    first = _first_day(budget_period, unix_s)
    # 32 days later is in the next month, for every month.
    days = {"day": 1, "week": 7, "month": 32}[budget_period]
    return _first_day(budget_period, (first + timedelta(days=days)).timestamp()).timestamp()


def _first_day(budget_period: BudgetPeriod, unix_s: float) -> datetime:
    midnight = datetime.fromtimestamp(unix_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if budget_period == "month":
        return midnight.replace(day=1)
    return midnight - timedelta(days=midnight.weekday() if budget_period == "week" else 0)


def plus(one: Amounts, other: Amounts) -> Amounts:
    """Add two amounts by kind."""
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3])


def minus(one: Amounts, other: Amounts) -> Amounts:
    """Subtract two amounts by kind."""
    return (one[0] - other[0], one[1] - other[1], one[2] - other[2], one[3] - other[3])


# --- cache salt -------------------------------------------------------------------------------------------------------
#
# The salt of a tenant, which separates its prompts from those of other tenants in prefix caches.

CACHE_SALT_BYTES: Final = 16


def cache_salt_of(tenant: str, pepper: SecretStr) -> str:
    """Return a tenant's salt for workers' prefix caches.

    It is the same on all gateways and after restarts, and cannot be guessed without the pepper. The label separates it
    from the hashes of API keys, which use the same pepper.
    """
    label = f"prefix cache of {tenant}"
    return hmac.digest(pepper.get_secret_value().encode(), label.encode(), "sha256")[:CACHE_SALT_BYTES].hex()
