"""The audit log in words: each action, and each changed field with its formatted value."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from console.dashboard import formats
from console.dashboard.view import View
from db.accounts.audit import AuditEntry

ACTIONS: Final[Mapping[str, str]] = {
    "key.create": "created the key",
    "key.update": "changed the key",
    "key.rotate": "rotated the key",
    "key.revoke": "revoked the key",
    "team.create": "created the team",
    "team.update": "changed the team",
    "organisation.create": "created the organization",
    "organisation.update": "renamed the organization",
    "webhook.create": "created the webhook",
    "webhook.update": "changed the webhook",
    "webhook.rotate": "rotated the secret of the webhook",
    "webhook.delete": "deleted the webhook",
    "webhook.test": "sent a test event to the webhook",
    "webhook.disable": "disabled the webhook",
    "payloads.read": "read the stored prompt and answer of",
    "payloads.export": "exported stored prompts and answers of",
    "payloads.delete": "deleted stored prompts and answers of",
    "admin.password": "set the password of",
    "login": "logged in",
    "login.failed": "failed to log in",
    "logout": "logged out",
    "session.end": "ended the session of",
    "export": "exported",
}
OF_ONESELF: Final = ("login", "login.failed", "logout")  # the subject is the actor
FIELDS: Final[Mapping[str, str]] = {
    "team_id": "team",
    "organisation_id": "organization",
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "max_concurrent": "concurrent requests",
    "budget_nano_usd": "budget",
    "budget_period": "budget period",
    "expires_unix_ms": "expires",
    "revoked_unix_ms": "revoked",
    "stops_running": "running requests end",
    "last_four": "last four characters",
    "grace_s": "grace period in seconds",
    "log_payload": "stores prompts and answers",
    "train_ok": "may be used for training",
    "redact": "redacts personal data",
    "retention_days": "retention in days",
    "allow_hosted": "hosted APIs",
    "trusted_only": "trusted pools only",
    "event_types": "events",
    "disabled_reason": "disabled reason",
}


@dataclass(frozen=True, slots=True)
class EntryInWords:
    """An entry as a page shows it."""

    at_unix_ms: int
    actor: str
    actor_id: str  # as the log's filter takes it
    deed: str
    subject_id: str
    changes: list[str]


def in_words(entry: AuditEntry, names: Mapping[str, str], view: View) -> EntryInWords:
    """Return an entry as a page shows it; ``names``: of keys and teams, by id."""
    return EntryInWords(
        entry.at_unix_ms,
        actor_words(entry.actor, names),
        entry.actor,
        deed(entry, names),
        entry.subject_id,
        list(changes(entry, names, view)),
    )


def deed(entry: AuditEntry, names: Mapping[str, str]) -> str:
    """Return the action and its subject, such as "changed the key nightly"."""
    said = ACTIONS.get(entry.action, entry.action)
    subject = names.get(entry.subject_id, entry.subject_id.removeprefix("user:"))
    return said if entry.action in OF_ONESELF else f"{said} {subject}"


def actor_words(actor: str, names: Mapping[str, str]) -> str:
    """Return the actor: a user by name, a key by its name, the command line by the operating system's user."""
    kind, _, name = actor.partition(":")
    if kind == "key":
        return f"key {names.get(name, name)}"
    return f"{name} (command line)" if kind == "cli" else name or actor


def changes(entry: AuditEntry, names: Mapping[str, str], view: View) -> Iterator[str]:
    """Yield each field in words: "requests a minute: 60", or "requests a minute: 60, was 30"."""
    before, after = entry.before or {}, entry.after or {}
    for name in dict.fromkeys((*after, *before)):
        field = FIELDS.get(name, name.replace("_", " "))
        now = _words(name, after[name], names, view) if name in after else None
        was = _words(name, before[name], names, view) if name in before else None
        if now is None:
            yield f"{field}: was {was}"
        else:
            yield f"{field}: {now}" if was is None else f"{field}: {now}, was {was}"


def _words(name: str, value: Any, names: Mapping[str, str], view: View) -> str:  # noqa: ANN401  # of JSON
    if name.endswith("nano_usd") and value is not None:
        return formats.money(value)
    if name.endswith("_unix_ms") and value is not None:
        return formats.moment(value, view.zone)
    match value:
        case None | [] | ():
            text = "none"
        case bool():
            text = "yes" if value else "no"
        case list():
            text = ", ".join(str(one) for one in value)
        case int() | float():
            text = f"{value:,}"
        case _:
            text = names.get(str(value), str(value))
    return text
