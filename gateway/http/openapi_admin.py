"""Response schemas of the admin API for the OpenAPI document."""

from typing import Any, Final

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_TEXT_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
_TIME: Final[Schema] = {"type": "integer", "description": "Unix time, in milliseconds."}
_TIME_OR_NULL: Final[Schema] = {"type": ["integer", "null"], "description": "Unix time, in milliseconds."}
_COUNT_OR_NULL: Final[Schema] = {"type": ["integer", "null"], "minimum": 0}
_NUMBER_OR_NULL: Final[Schema] = {"type": ["number", "null"]}
_FLAG_OR_NULL: Final[Schema] = {"type": ["boolean", "null"]}
_TEXTS: Final[Schema] = {"type": "array", "items": _TEXT}
_TEXTS_OR_NULL: Final[Schema] = {"type": ["array", "null"], "items": _TEXT}
_ANY_OBJECT_OR_NULL: Final[Schema] = {"type": ["object", "null"]}


def _object(name: str, fields: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    properties = {"object": {"type": "string", "const": name}, **fields}
    return {"type": "object", "required": list(properties), "properties": {**properties, **(optional or {})}}


_POLICY: Final[dict[str, Schema]] = {
    "requests_per_minute": _COUNT_OR_NULL,
    "tokens_per_minute": _COUNT_OR_NULL,
    "max_concurrent": _COUNT_OR_NULL,
    "budget_usd": _NUMBER_OR_NULL,
    "budget_period": _TEXT_OR_NULL,
    "weight": _NUMBER_OR_NULL,
    "priority": _TEXT_OR_NULL,
    "log_payload": _FLAG_OR_NULL,
    "train_ok": _FLAG_OR_NULL,
    "redact": _FLAG_OR_NULL,
    "retention_days": _COUNT_OR_NULL,
    "allow_hosted": _TEXTS_OR_NULL,
    "trusted_only": _FLAG_OR_NULL,
}
_NAMED: Final[dict[str, Schema]] = {"id": _TEXT, "name": _TEXT, "created_unix_ms": _TIME}

_USAGE_COUNTS: Final = (
    "requests", "ok", "failed", "cancelled", "prompt_tokens", "cached_tokens", "completion_tokens", "unpriced_tokens",
)  # fmt: skip

ADMIN_SCHEMAS: Final[dict[str, Schema]] = {
    "Organisation": _object("organisation", _NAMED),
    "Team": _object("team", {**_NAMED, "organisation_id": _TEXT, "organisation_name": _TEXT, **_POLICY}),
    "Key": _object(
        "key",
        {
            **_NAMED,
            "last_four": _TEXT,
            "team_id": _TEXT,
            "team_name": _TEXT,
            "scopes": _TEXTS,
            "models": _TEXTS_OR_NULL,
            "expires_unix_ms": _TIME_OR_NULL,
            "revoked_unix_ms": _TIME_OR_NULL,
            "previous_until_unix_ms": _TIME_OR_NULL,
            **_POLICY,
        },
        {
            "token": {
                "type": "string",
                "description": "The API key. Returned only once, when the key is created or rotated.",
            }
        },
    ),
    "AuditEntry": _object(
        "audit_entry",
        {
            "id": _TEXT,
            "at_unix_ms": _TIME,
            "actor": _TEXT,
            "action": _TEXT,
            "subject_id": _TEXT,
            "before": _ANY_OBJECT_OR_NULL,
            "after": _ANY_OBJECT_OR_NULL,
        },
    ),
    "Webhook": _object(
        "webhook_endpoint",
        {
            "id": _TEXT,
            "team_id": _TEXT,
            "team_name": _TEXT,
            "url": _TEXT,
            "event_types": _TEXTS,
            "enabled": {"type": "boolean"},
            "disabled_reason": _TEXT_OR_NULL,
            "failing_since_unix_ms": _TIME_OR_NULL,
            "previous_until_unix_ms": _TIME_OR_NULL,
            "created_unix_ms": _TIME,
        },
        {
            "secret": {
                "type": "string",
                "description": "The signing secret. Returned only once, when it is created or rotated.",
            }
        },
    ),
    "WebhookDelivery": _object(
        "webhook_delivery",
        {
            "event_id": _TEXT,
            "endpoint_id": _TEXT,
            "event_type": _TEXT,
            "created_unix_ms": _TIME,
            "due_unix_ms": _TIME_OR_NULL,
            "outcome": _TEXT,
            "attempts": {"type": "integer", "minimum": 0},
            "attempted_unix_ms": _TIME_OR_NULL,
            "http_status": {"type": ["integer", "null"]},
            "error": _TEXT_OR_NULL,
        },
    ),
    "UsageReport": _object(
        "usage",
        {
            "since_unix_ms": _TIME,
            "until_unix_ms": _TIME,
            "by": _TEXTS,
            "total": {"$ref": "#/components/schemas/UsageSums"},
            "data": {
                "type": "array",
                "items": {"$ref": "#/components/schemas/UsageSums"},
                "description": "Totals by group. Each group has its team_id, key_id, model, tag, day, or month.",
            },
        },
    ),
    "UsageSums": {
        "type": "object",
        "required": ["requests", "charge_nano_usd", "charge_usd"],
        "properties": {
            **{name: {"type": "integer"} for name in _USAGE_COUNTS},
            "charge_nano_usd": {"type": "integer", "description": "1e-9 USD."},
            "charge_usd": {"type": "string", "description": "The same amount in USD, as an exact decimal."},
        },
    },
    "WebhookSent": _object("webhook_test", {"event_id": _TEXT, "endpoint_id": _TEXT}),
}


_VERSIONED: Final = ("/admin/v1/teams/{reference}", "/admin/v1/keys/{reference}")
ADMIN_IF_MATCH: Final = frozenset((path, "patch") for path in _VERSIONED)  # routes that read If-Match
ADMIN_ETAG: Final = frozenset((path, method) for path in _VERSIONED for method in ("get", "patch"))
ETAG_HEADER: Final[Schema] = {
    "schema": _TEXT,
    "description": "The version of the object. Send it as `If-Match` with a change: if the object has changed since,"
    " the answer is 412 and nothing is saved.",
}


def _one(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _several(name: str) -> dict[str, Any]:
    rows = {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}}
    return {"application/json": {"schema": _object("list", {"data": rows, "has_more": {"type": "boolean"}})}}


def _routes(path: str, one: str, name: str, *, has_secret: bool = False) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the responses of one kind of object's routes. Objects with a secret can be revoked and rotated."""
    methods = [(path, "post"), (one, "get"), (one, "patch")]
    if has_secret:
        methods += [(one, "delete"), (f"{one}/rotate", "post")]
    return {(path, "get"): _several(name), **{where: _one(name) for where in methods}}


ADMIN_CONTENT: Final[dict[tuple[str, str], dict[str, Any]]] = {  # content of a success, by path and method
    **_routes("/admin/v1/organisations", "/admin/v1/organisations/{reference}", "Organisation"),
    **_routes("/admin/v1/teams", "/admin/v1/teams/{reference}", "Team"),
    **_routes("/admin/v1/keys", "/admin/v1/keys/{reference}", "Key", has_secret=True),
    **_routes("/admin/v1/webhooks", "/admin/v1/webhooks/{endpoint_id}", "Webhook", has_secret=True),
    ("/admin/v1/audit", "get"): _several("AuditEntry"),
    ("/admin/v1/usage", "get"): {**_one("UsageReport"), "text/csv": {"schema": _TEXT}},
    ("/v1/usage", "get"): _one("UsageReport"),
    ("/admin/v1/webhooks/{endpoint_id}/test", "post"): _one("WebhookSent"),
    ("/admin/v1/webhooks/{endpoint_id}/deliveries", "get"): _several("WebhookDelivery"),
}
