"""JSON views of organizations, teams, keys and audit entries, for the admin API and the command line."""

from dataclasses import asdict
from typing import Any

from db.accounts.audit import AuditEntry
from db.accounts.keys import ApiKey
from db.accounts.principal import Policy
from db.accounts.teams import Organisation, Team
from db.money import NANO_USD


def organisation_view(organisation: Organisation) -> dict[str, Any]:
    """Return the view of an organization."""
    return {
        "object": "organisation",
        "id": organisation.organisation_id,
        "name": organisation.name,
        "created_unix_ms": organisation.created_unix_ms,
    }


def team_view(team: Team) -> dict[str, Any]:
    """Return the view of a team and its policy."""
    return {
        "object": "team",
        "id": team.team_id,
        "name": team.name,
        "organisation_id": team.organisation_id,
        "organisation_name": team.organisation_name,
        "created_unix_ms": team.created_unix_ms,
        **policy_view(team.policy),
    }


def key_view(key: ApiKey, token: str | None = None) -> dict[str, Any]:
    """Return the view of a key and its policy; ``token`` only for a key that has just been created or rotated."""
    view = {
        "object": "key",
        "id": key.key_id,
        "name": key.name,
        "last_four": key.last_four,
        "team_id": key.team_id,
        "team_name": key.team_name,
        "scopes": list(key.scopes),
        "models": None if key.models is None else list(key.models),
        "created_unix_ms": key.created_unix_ms,
        "expires_unix_ms": key.expires_unix_ms,
        "revoked_unix_ms": key.revoked_unix_ms,
        "previous_until_unix_ms": key.previous_until_unix_ms,
        **policy_view(key.policy),
    }
    return view if token is None else {**view, "token": token}


def policy_view(policy: Policy) -> dict[str, Any]:
    """Return the view of limits and consents; money in USD."""
    view = asdict(policy)
    budget = view.pop("budget_nano_usd")
    hosted = None if policy.allow_hosted is None else list(policy.allow_hosted)
    return {**view, "allow_hosted": hosted, "budget_usd": None if budget is None else budget / NANO_USD}


def audit_view(entry: AuditEntry) -> dict[str, Any]:
    """Return the view of an entry of the audit log."""
    return {"object": "audit_entry", **asdict(entry)}
