"""Checks of the fields of organizations, teams and keys. Each error names its field."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, get_args

from db.accounts.errors import InvalidField
from db.accounts.principal import SCOPES, BudgetPeriod, Policy, why_no_leave

PRIORITIES: Final = ("interactive", "batch")
PERIODS: Final[tuple[str, ...]] = get_args(BudgetPeriod)
MAX_WEIGHT: Final = 1000.0
MAX_NUMBER: Final = 2**63 - 1  # largest integer of SQL
MAX_RETENTION_DAYS: Final = 36_500
MAX_LEAVES: Final = 64
_COUNTS: Final = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "budget_nano_usd", "retention_days")
# Field names of the API that differ from the table's columns.
_API_NAMES: Final = {"budget_nano_usd": "budget_usd"}


def check_policy(policy: Policy) -> None:
    """Check a policy's limits, budget, choices and consents. Raises InvalidField."""
    for field in _COUNTS:
        value = getattr(policy, field)
        if value is not None and not 1 <= value <= MAX_NUMBER:
            raise InvalidField(_API_NAMES.get(field, field), "must be positive")
    if policy.retention_days is not None and policy.retention_days > MAX_RETENTION_DAYS:
        raise InvalidField("retention_days", f"must be at most {MAX_RETENTION_DAYS}")
    if policy.budget_nano_usd is not None and policy.budget_period is None:
        raise InvalidField("budget_period", f"required with a budget: one of {', '.join(PERIODS)}")
    if policy.budget_period is not None and policy.budget_nano_usd is None:
        raise InvalidField("budget_usd", "required with budget_period")
    _check_choice("budget_period", policy.budget_period, PERIODS)
    _check_choice("priority", policy.priority, PRIORITIES)
    if policy.weight is not None and not 0 < policy.weight <= MAX_WEIGHT:
        raise InvalidField("weight", f"must be above 0 and at most {MAX_WEIGHT:g}")
    _check_leaves(policy.allow_hosted or ())
    if policy.train_ok and policy.log_payload is False:
        raise InvalidField("train_ok", "requires log_payload: only stored payloads can be used for training")


def check_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    """Return the scopes without duplicates, in the order of SCOPES. Raises InvalidField."""
    wanted = set(scopes)
    unknown = sorted(wanted.difference(SCOPES))
    if unknown:
        raise InvalidField("scopes", f"{unknown[0]!r} is not one of {', '.join(SCOPES)}")
    if not wanted:
        raise InvalidField("scopes", f"must have at least one of {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in wanted)


def check_models(models: Iterable[str] | None, names: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the models' canonical names without duplicates; None: all. ``names``: canonical names by name and alias.

    Raises InvalidField.
    """
    if models is None:
        return None
    found: dict[str, None] = {}
    for model in models:
        if model not in names:
            raise InvalidField("models", f"{model!r} is not configured. Configured models: {', '.join(sorted(names))}")
        found[names[model]] = None
    if not found:
        raise InvalidField("models", "must have at least one model; omit the field to allow all")
    return tuple(found)


def checked_grant(changes: Mapping[str, Any], names: Mapping[str, str], now_unix_ms: int) -> dict[str, Any]:
    """Return the changes of a grant with canonical model names, after checking that models exist and its expiry.

    Raises InvalidField.
    """
    check_expiry(changes.get("expires_unix_ms"), now_unix_ms)
    return {**changes, "models": check_models(changes["models"], names)} if "models" in changes else dict(changes)


def check_expiry(expires_unix_ms: int | None, now_unix_ms: int) -> None:
    """Check that an expiry is in the future. Raises InvalidField."""
    if expires_unix_ms is not None and not now_unix_ms < expires_unix_ms <= MAX_NUMBER:
        raise InvalidField("expires_unix_ms", "must be in the future")


def _check_leaves(leaves: Sequence[str]) -> None:
    if len(leaves) > MAX_LEAVES:
        raise InvalidField("allow_hosted", f"must have at most {MAX_LEAVES} entries")
    for leave in leaves:
        reason = why_no_leave(leave)
        if reason is not None:
            raise InvalidField("allow_hosted", reason)


def _check_choice(field: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise InvalidField(field, f"{value!r} is not one of {', '.join(choices)}")
