"""The forms of keys and teams: filling them in, and parsing their fields into bodies of the admin API."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from decimal import Decimal
from typing import Any, Final, TypeVar

from console.admin.routes import principal_answer
from console.admin.schema import PolicyBody
from console.dashboard.view import View, parse_moment
from db.accounts.errors import PrincipalError
from db.accounts.keys import ApiKey
from db.accounts.principal import INFERENCE, SCOPES, Policy
from db.accounts.teams import Team
from db.money import NANO_USD
from gateway.api.fields import parse_body
from gateway.errors import Refused

NUMBERS: Final = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "weight", "retention_days")
CHOICES: Final = ("log_payload", "train_ok", "redact", "trusted_only")  # yes, no, or unspecified
NEVER: Final = "never"  # the field's text where no hosted API is allowed
NEW_TEAM: Final = {"budget_period": "month"}  # the defaults of the form for a new one
NEW_KEY: Final = {**NEW_TEAM, f"scope_{INFERENCE}": "on"}

_NUMBER: Final = re.compile(r"\d{1,18}(\.\d{1,9})?", re.ASCII)
_FORM_NAMES: Final = {"expires_unix_ms": "expires"}  # where a form's field has another name than the API's

_Body = TypeVar("_Body", bound=PolicyBody)


def team_fields(team: Team) -> dict[str, str]:
    """Return the fields of a team's form."""
    return {**_policy_fields(team.policy), "name": team.name, "version": team.version}


def key_fields(key: ApiKey, view: View) -> dict[str, str]:
    """Return the fields of a key's form."""
    return {
        **_policy_fields(key.policy),
        "name": key.name,
        "version": key.version,
        "team": key.team_id,
        "models": " ".join(key.models or ()),
        "expires": "" if key.expires_unix_ms is None else view.local_input(key.expires_unix_ms),
        **{f"scope_{scope}": "on" for scope in key.scopes},
    }


def _policy_fields(policy: Policy) -> dict[str, str]:
    values = asdict(policy)
    budget = values.pop("budget_nano_usd")
    values["allow_hosted"] = _hosted_text(policy.allow_hosted)
    values["budget_usd"] = None if budget is None else f"{Decimal(budget) / NANO_USD:f}"
    return NEW_TEAM | {name: _text(value) for name, value in values.items() if value is not None}


def _hosted_text(allowed: tuple[str, ...] | None) -> str | None:
    return None if allowed is None else " ".join(allowed) or NEVER


def _hosted_grant(text: str) -> list[str] | None:
    return [] if text == NEVER else text.split() or None


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_form(
    kind: type[_Body], fields: Mapping[str, str], view: View, before: Mapping[str, str] | None = None
) -> _Body:
    """Parse a form into a body of the admin API; for a change, only the fields that differ from ``before``.

    Raises InvalidParameter.
    """
    body = _values(kind, fields, view)
    if before is not None:
        shown = _values(kind, before, view)
        changed = {name for name, value in body.items() if value != shown[name]}
        if changed & {"budget_usd", "budget_period"}:
            changed |= {"budget_usd", "budget_period"}  # neither is valid without the other
        body = {name: body[name] for name in changed}
    return parse_body(kind, json.dumps(body).encode())


def _values(kind: type[PolicyBody], fields: Mapping[str, str], view: View) -> dict[str, Any]:
    """Return the fields under the API's names; an empty one is null: no limit."""
    given = {name: text.strip() for name, text in fields.items()}
    expires = given.get("expires")
    values: dict[str, Any] = {
        "name": given.get("name", ""),
        "team": given.get("team", ""),
        "models": given.get("models", "").split() or None,
        "scopes": [scope for scope in SCOPES if f"scope_{scope}" in given],
        "expires_unix_ms": parse_moment("expires_unix_ms", expires, view.zone) if expires else None,
        "budget_usd": given.get("budget_usd") or None,
        "budget_period": given.get("budget_period") if given.get("budget_usd") else None,
        "priority": given.get("priority") or None,
        "allow_hosted": _hosted_grant(given.get("allow_hosted", "")),
        **{name: _number(given.get(name, "")) for name in NUMBERS},
        **{name: {"yes": True, "no": False}.get(given.get(name, "")) for name in CHOICES},
    }
    return {name: value for name, value in values.items() if name in kind.model_fields}


def _number(text: str) -> int | float | str | None:
    """Parse a number; leave invalid text to the API's own check, which names the field."""
    if _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    return text or None


def form_errors(error: PrincipalError | Refused) -> dict[str, str]:
    """Return the error message by the form's field; "" stands for the whole form."""
    answer = principal_answer(error) if isinstance(error, PrincipalError) else error
    field = answer.param or ""
    return {_FORM_NAMES.get(field, field): answer.message}
