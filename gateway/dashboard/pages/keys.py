"""Keys and budgets: who may call, within which limits, and what they have used."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.admin.schema import NewKey
from gateway.api.schema import parse_body
from gateway.auth import keys
from gateway.auth.checks import checked_grant
from gateway.auth.keys import ApiKey
from gateway.auth.principal import policy_of
from gateway.dashboard.view import DAY_MS, View
from gateway.ledger.queries.traffic import Traffic, totals
from gateway.ledger.queries.window import Window
from gateway.settings import GatewaySettings, canonical_names
from protocol.clock import unix_now_ms

USED_DAYS: Final = 30
MAX_SHOWN: Final = 500  # keys; the admin API lists all
NUMBERS: Final = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "retention_days")
CONSENTS: Final = ("log_payload", "train_ok")


@dataclass(frozen=True, slots=True)
class KeyLine:
    """One key in the list."""

    key: ApiKey
    state: str  # "active" | "expired" | "revoked"
    used: Traffic


async def key_lines(connection: AsyncConnection, view: View, known: Sequence[ApiKey]) -> dict[str, Any]:
    """The values of keys.html: the newest of the ``known`` keys, active ones first."""
    now_unix_ms = unix_now_ms()
    found = sorted(known, key=lambda key: (key.revoked_unix_ms is not None, -key.created_unix_ms))
    window = Window(now_unix_ms - USED_DAYS * DAY_MS, now_unix_ms, view.zone)
    used = {sums.group[0]: sums for sums in await totals(connection, window, by=("key",))}
    return {
        "page": "Keys",
        "lines": [
            KeyLine(key, _state(key, now_unix_ms), used.get(key.key_id, Traffic((key.key_id,))))
            for key in found[:MAX_SHOWN]
        ],
        "left_out": max(0, len(found) - MAX_SHOWN),
        "used_days": USED_DAYS,
    }


def _state(key: ApiKey, now_unix_ms: int) -> str:
    if key.revoked_unix_ms is not None:
        return "revoked"
    return "expired" if key.expires_unix_ms is not None and key.expires_unix_ms <= now_unix_ms else "active"


async def key_from_form(
    database: AsyncEngine, settings: GatewaySettings, fields: Mapping[str, str], actor: str
) -> tuple[ApiKey, str]:
    """Make the key that a form asks for; returns its plaintext with it. Raises what the admin API's functions raise."""
    body = parse_body(NewKey, json.dumps(_body_of(fields)).encode())
    now_unix_ms = unix_now_ms()
    changes = checked_grant(body.changes(), canonical_names(settings.models), now_unix_ms)
    grant = keys.Grant(body.team, body.scopes, changes.get("models"), body.expires_unix_ms, policy_of(changes))
    return await keys.create_key(database, body.name, settings.key_pepper, grant, actor)


def _body_of(fields: Mapping[str, str]) -> dict[str, Any]:
    """A form's fields as the admin API's body; empty ones are left out."""
    body: dict[str, Any] = {name: fields[name].strip() for name in ("name", "team") if name in fields}
    for name in NUMBERS:
        if fields.get(name, "").strip():
            text = fields[name].strip()
            body[name] = int(text) if text.isascii() and text.isdigit() else text
    if fields.get("budget_usd", "").strip():
        body |= {"budget_usd": fields["budget_usd"].strip(), "budget_period": fields.get("budget_period") or "month"}
    if fields.get("models", "").strip():
        body["models"] = fields["models"].split()
    if fields.get("expires_days", "").strip().isdigit():
        body["expires_unix_ms"] = unix_now_ms() + int(fields["expires_days"][:6]) * DAY_MS
    body |= {name: True for name in CONSENTS if fields.get(name)}
    return body
