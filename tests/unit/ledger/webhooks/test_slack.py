"""An event's message for Slack."""

import json
from typing import Any

import pytest

from ledger.webhooks.addresses import BadUrl, checked_url
from ledger.webhooks.events import new_event
from ledger.webhooks.settings import WebhookSettings
from ledger.webhooks.slack import is_slack, slack_body

BUDGET: dict[str, Any] = {
    "id": "team_1",
    "object": "team",
    "name": "R&D <all>",
    "threshold_percent": 80,
    "budget_usd": 1000.0,
    "spent_usd": 812.5,
    "period": "month",
}


@pytest.mark.parametrize(
    ("event_type", "data", "text"),
    [
        ("batch.completed", {"id": "batch_1"}, "Spillway: batch.completed: batch_1"),
        ("team.budget.threshold", {"id": "team_test"}, "Spillway: team.budget.threshold: team_test"),
        (
            "team.budget.threshold",
            BUDGET,
            "Spillway: budget of team R&amp;D &lt;all&gt;: 80 % used ($812.50 of $1,000.00) this month.",
        ),
        (
            "team.budget.threshold",
            BUDGET | {"name": "a", "period": "total"},
            "Spillway: budget of team a: 80 % used ($812.50 of $1,000.00).",
        ),
    ],
)
def test_a_message_says_what_happened(event_type: Any, data: dict[str, Any], text: str) -> None:
    event = new_event("team_1", event_type, "evt_1", data, created_unix_s=0)
    assert json.loads(slack_body(event.body)) == {"text": text}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://hooks.slack.com/services/T0/B0/x", True),
        ("https://chat.example.com/hooks/x#slack", True),
        ("https://chat.example.com/slack", False),
        ("https://hooks.slack.com.example.com/", False),
    ],
)
def test_an_endpoint_takes_messages_by_its_host_or_its_fragment(url: str, expected: bool) -> None:
    assert checked_url(url, WebhookSettings()) == url
    assert is_slack(url) == expected


def test_no_other_fragment_is_allowed() -> None:
    with pytest.raises(BadUrl):
        checked_url("https://chat.example.com/hooks/x#other", WebhookSettings())
