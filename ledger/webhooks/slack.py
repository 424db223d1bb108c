"""Events as messages of Slack's incoming webhooks, which Mattermost and others take, too: ``{"text": "…"}``."""

from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

HOST: Final = "hooks.slack.com"
FRAGMENT: Final = "slack"  # of a URL at another host that takes the same messages
_ESCAPED: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})  # as Slack asks for


def is_slack(url: str) -> bool:
    """Return whether an endpoint takes Slack's messages."""
    parts = urlsplit(url)
    return parts.hostname == HOST or parts.fragment == FRAGMENT


def slack_body(body: bytes) -> bytes:
    """Return the message of an event's body."""
    event: dict[str, Any] = msgspec.json.decode(body)
    return msgspec.json.encode({"text": _text(event["type"], event["data"]).translate(_ESCAPED)})


def _text(event_type: str, data: dict[str, Any]) -> str:
    if "threshold_percent" not in data:  # not of a budget, or a test event
        return f"Spillway: {event_type}: {data['id']}"
    used = f"{data['threshold_percent']} % used (${data['spent_usd']:,.2f} of ${data['budget_usd']:,.2f})"
    period = "" if data["period"] == "total" else f" this {data['period']}"
    return f"Spillway: budget of {data['object']} {data['name']}: {used}{period}."
