"""JSON views of webhooks, for the admin API and the command line."""

from dataclasses import asdict
from typing import Any

from ledger.webhooks.deliveries import Delivery
from ledger.webhooks.endpoints import Endpoint


def endpoint_view(endpoint: Endpoint, secret: str | None = None) -> dict[str, Any]:
    """Return the view of a webhook endpoint; ``secret`` only for one that has just been created or rotated."""
    view = {"object": "webhook_endpoint", "id": endpoint.endpoint_id, **asdict(endpoint)}
    del view["endpoint_id"]
    view["event_types"] = list(endpoint.event_types)
    view["enabled"] = endpoint.enabled
    return view if secret is None else {**view, "secret": secret}


def delivery_view(delivery: Delivery) -> dict[str, Any]:
    return {"object": "webhook_delivery", **asdict(delivery)}
