"""The forms of keys and teams: what they show of one, and what their fields ask of the admin API's functions."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from decimal import Decimal
from typing import Any, Final, TypeVar

from accounts.errors import PrincipalError
from accounts.keys import ApiKey
from accounts.principal import INFERENCE, SCOPES, Policy
from accounts.teams import Team
from console.admin.routes import principal_answer
from console.admin.schema import PolicyBody
from console.dashboard.view import View, parse_moment
from db.money import NANO_USD
from web.errors import ApiError
from web.schema import parse_body

NUMBERS: Final = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "weight", "retention_days")
CHOICES: Final = ("log_payload", "train_ok", "redact")  # yes, no, or nothing said
NEVER: Final = "never"  # what the field says where no hosted API is allowed
NEW_TEAM: Final = {"budget_period": "month"}  # what the form for a new one shows
NEW_KEY: Final = {**NEW_TEAM, f"scope_{INFERENCE}": "on"}

_NUMBER: Final = re.compile(r"\d{1,18}(\.\d{1,9})?", re.ASCII)
_SHOWN_AS: Final = {"expires_unix_ms": "expires"}  # where a form's field has another name than the API's

_Body = TypeVar("_Body", bound=PolicyBody)


def team_fields(team: Team) -> dict[str, str]:
    """What a team's form shows."""
    return {**_policy_fields(team.policy), "name": team.name}


def key_fields(key: ApiKey, view: View) -> dict[str, str]:
    """What a key's form shows."""
    return {
        **_policy_fields(key.policy),
        "name": key.name,
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


def _hosted_text(leaves: tuple[str, ...] | None) -> str | None:
    return None if leaves is None else " ".join(leaves) or NEVER


def _hosted_grant(text: str) -> list[str] | None:
    return [] if text == NEVER else text.split() or None


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_form(
    kind: type[_Body], fields: Mapping[str, str], view: View, before: Mapping[str, str] | None = None
) -> _Body:
    """A form's fields as a body of the admin API; of a change, only what is not as the form has shown it ``before``.

    Raises InvalidParameter.
    """
    body = _values(kind, fields, view)
    if before is not None:
        shown = _values(kind, before, view)
        changed = {name for name, value in body.items() if value != shown[name]}
        if changed & {"budget_usd", "budget_period"}:
            changed |= {"budget_usd", "budget_period"}  # neither is anything without the other
        body = {name: body[name] for name in changed}
    return parse_body(kind, json.dumps(body).encode())


def _values(kind: type[PolicyBody], fields: Mapping[str, str], view: View) -> dict[str, Any]:
    """What the fields say, as the API calls it; an empty one is null: no bound."""
    said = {name: text.strip() for name, text in fields.items()}
    expires = said.get("expires")
    values: dict[str, Any] = {
        "name": said.get("name", ""),
        "team": said.get("team", ""),
        "models": said.get("models", "").split() or None,
        "scopes": [scope for scope in SCOPES if f"scope_{scope}" in said],
        "expires_unix_ms": parse_moment("expires_unix_ms", expires, view.zone) if expires else None,
        "budget_usd": said.get("budget_usd") or None,
        "budget_period": said.get("budget_period") if said.get("budget_usd") else None,
        "priority": said.get("priority") or None,
        "allow_hosted": _hosted_grant(said.get("allow_hosted", "")),
        **{name: _number(said.get(name, "")) for name in NUMBERS},
        **{name: {"yes": True, "no": False}.get(said.get(name, "")) for name in CHOICES},
    }
    return {name: value for name, value in values.items() if name in kind.model_fields}


def _number(text: str) -> int | float | str | None:
    """A number; what is none is left to the API's own check, which names the field."""
    if _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    return text or None


def form_errors(error: PrincipalError | ApiError) -> dict[str, str]:
    """What is wrong, by the form's field; "" stands for the whole form."""
    answer = principal_answer(error) if isinstance(error, PrincipalError) else error
    field = answer.param or ""
    return {_SHOWN_AS.get(field, field): answer.message}
