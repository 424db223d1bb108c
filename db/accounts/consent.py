"""Consent to keep payloads: read from the policies when a request arrives, and kept with its payload."""

from typing import TypeVar

from msgspec import Struct

from db.accounts.principal import Policy, Principal

_Value = TypeVar("_Value", bool, int)


class Consent(Struct, frozen=True):
    """Agreement to keep requests and answers, and on which terms."""

    train_ok: bool  # whether training sets may be made of them
    redact: bool  # whether personal data is taken out first
    retention_days: int | None  # None: the installation's default


def consent_of(principal: Principal) -> Consent | None:
    """The consent of a key and its team; None, the default: nothing is kept. What the key says goes first."""
    key, team = principal.key_policy, principal.team_policy
    if not _first(key.log_payload, team.log_payload):
        return None
    return Consent(
        train_ok=may_train(key, team),
        redact=_first(key.redact, team.redact) is not False,
        retention_days=_first(key.retention_days, team.retention_days),
    )


def may_train(key: Policy, team: Policy) -> bool:
    """Return whether training sets may be made from the key's payloads."""
    return bool(_first(key.train_ok, team.train_ok))


def _first(of_key: _Value | None, of_team: _Value | None) -> _Value | None:
    return of_team if of_key is None else of_key
