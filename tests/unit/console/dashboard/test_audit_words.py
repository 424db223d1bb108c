import re
from pathlib import Path

from console.dashboard.audit_words import ACTIONS, actor_words, changes, deed
from console.dashboard.view import make_view
from db.accounts.audit import AuditEntry

HOUSE = Path(__file__).parents[4]
NAMES = {"key_1": "nightly", "team_1": "search"}
VIEW = make_view({}, {})
CALL_CHARS = 120


def entry(action: str, subject: str, before: dict[str, object] | None, after: dict[str, object] | None) -> AuditEntry:
    return AuditEntry("aud_1", 0, "user:ann", action, subject, before, after)


def test_every_action_that_is_recorded_has_words() -> None:
    files = [path for root in ("db", "console", "ledger", "spillway") for path in (HOUSE / root).rglob("*.py")]
    calls = [call for path in files for call in path.read_text().split("Change(")[1:]]
    found = [re.search(r'(?<!f)"([a-z]+(?:\.[a-z]+)?)"', call[:CALL_CHARS]) for call in calls]
    recorded = {one[1] for one in found if one is not None}
    assert {"key.create", "login.failed", "webhook.disable", "export"} <= recorded
    assert recorded <= set(ACTIONS)


def test_an_entry_is_said_in_words() -> None:
    changed = entry(
        "key.update",
        "key_1",
        {"budget_nano_usd": None, "scopes": ["inference"], "team_id": "team_1"},
        {"budget_nano_usd": 10_000_000_000, "scopes": ["inference", "metrics"], "team_id": None},
    )
    assert deed(changed, NAMES) == "changed the key nightly"
    assert list(changes(changed, NAMES, VIEW)) == [
        "budget: $10.00, was none",
        "scopes: inference, metrics, was inference",
        "team: none, was search",
    ]
    made = entry("key.create", "key_9", None, {"log_payload": True, "expires_unix_ms": 0, "tokens_per_minute": 50_000})
    assert deed(made, NAMES) == "created the key key_9"
    assert list(changes(made, NAMES, VIEW)) == [
        "stores prompts and answers: yes",
        "expires: 1970-01-01 00:00:00",
        "tokens a minute: 50,000",
    ]
    ended = entry("session.end", "user:bob", {"address": "10.0.0.1"}, None)
    assert (deed(ended, NAMES), list(changes(ended, NAMES, VIEW))) == (
        "ended the session of bob",
        ["address: was 10.0.0.1"],
    )


def test_who_did_it_is_a_name() -> None:
    assert [actor_words(actor, NAMES) for actor in ("user:ann", "key:key_1", "cli:root", "system")] == [
        "ann",
        "key nightly",
        "root (command line)",
        "system",
    ]
