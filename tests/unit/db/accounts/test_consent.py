"""Consent: a key's setting overrides its team's, and by default nothing is stored."""

import pytest

from db.accounts.principal import NO_POLICY, Consent, Policy, Principal, consent_of


def consent(key: Policy, team: Policy = NO_POLICY) -> Consent | None:
    return consent_of(Principal("key_a", "a", "team_a", "A", "org_a", key_policy=key, team_policy=team))


@pytest.mark.parametrize(
    ("key", "team"),
    [
        (NO_POLICY, NO_POLICY),
        (Policy(train_ok=True), Policy(train_ok=True)),
        (Policy(log_payload=False), Policy(log_payload=True)),
        (NO_POLICY, Policy(log_payload=False)),
    ],
)
def test_no_consent(key: Policy, team: Policy) -> None:
    assert consent(key, team) is None


def test_its_terms() -> None:
    yes = Policy(log_payload=True)
    assert consent(yes) == consent(NO_POLICY, yes) == Consent(train_ok=False, redact=True, retention_days=None)
    team = Policy(log_payload=True, train_ok=True, redact=False, retention_days=9)
    assert consent(NO_POLICY, team) == Consent(train_ok=True, redact=False, retention_days=9)
    key = Policy(train_ok=False, redact=True, retention_days=2)
    assert consent(key, team) == Consent(train_ok=False, redact=True, retention_days=2)
