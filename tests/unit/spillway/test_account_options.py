"""Options of keys and teams: limits, money and times as people write them on the command line."""

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from console.admin import schema
from db.accounts.principal import Policy
from spillway.cli import app
from spillway.cli.account_options import (
    KEY_OPTIONS,
    NAME_OPTION,
    TEAM_OPTIONS,
    changes_of,
    duration_s,
    expiry_unix_ms,
    limits_text,
)
from spillway.cli.output import zoned_time


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"rpm": None, "scope": None}, {}),
        (
            {"team": "search", "scope": ["admin"], "model": ["m"]},
            {"team": "search", "scopes": ("admin",), "models": ["m"]},
        ),
        ({"expires": "never"}, {"expires_unix_ms": None}),
        ({"rpm": "60", "tpm": "1_000_000"}, {"requests_per_minute": 60, "tokens_per_minute": 1_000_000}),
        ({"concurrent": "none", "weight": "2.5"}, {"max_concurrent": None, "weight": 2.5}),
        ({"budget": "50 USD/month"}, {"budget_nano_usd": 50 * 10**9, "budget_period": "month"}),
        ({"budget": "$2.50/day"}, {"budget_nano_usd": 2_500_000_000, "budget_period": "day"}),
        ({"budget": "0.000000001 usd total"}, {"budget_nano_usd": 1, "budget_period": "total"}),
        ({"budget": "none"}, {"budget_nano_usd": None, "budget_period": None}),
        ({"batch_only": True, "redact": False}, {"priority": "batch", "redact": False}),
        ({"allow_hosted": ["openai", "azure/gpt-*"]}, {"allow_hosted": ("openai", "azure/gpt-*")}),
        ({"allow_hosted": ["never"]}, {"allow_hosted": ()}),
        ({"allow_hosted": ["none"]}, {"allow_hosted": None}),
        ({"trusted_only": True}, {"trusted_only": True}),
        ({"trusted_only": False}, {"trusted_only": False}),
        ({"batch_only": False, "train_ok": True}, {"priority": "interactive", "train_ok": True}),
    ],
)
def test_options_become_changes(options: dict[str, Any], changes: dict[str, Any]) -> None:
    assert changes_of(KEY_OPTIONS, options) == changes


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--rpm", "many"),
        ("--rpm", "1.5"),
        ("--weight", "heavy"),
        ("--budget", "50 USD"),
        ("--budget", "5 EUR/day"),
        ("--retention-days", "long"),
        ("--expires", "soon"),
    ],
)
@pytest.mark.parametrize("command", ["create", "update"])
def test_what_cannot_be_read_is_refused_by_its_option(command: str, option: str, text: str) -> None:
    refused = CliRunner().invoke(app, ["keys", command, "app", option, text], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert f"Invalid value for {option}: " in refused.stderr


@pytest.mark.parametrize(
    ("options", "body"),
    [(KEY_OPTIONS | NAME_OPTION, schema.KeyChanges), (TEAM_OPTIONS | NAME_OPTION, schema.TeamChanges)],
)
def test_every_field_of_the_admin_api_has_an_option(options: dict[str, Any], body: type[schema.PolicyBody]) -> None:
    said = {"budget": "1 USD/day", "expires": "never"}
    fields: set[str] = set()
    for name, option in options.items():
        fields |= option.read(said.get(name, "1")).keys()
    assert {"budget_usd" if field == "budget_nano_usd" else field for field in fields} == body.model_fields.keys()


@pytest.fixture
def in_nepal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "NPT-5:45")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_nepal")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2127-01-31", "2127-01-31 00:00 NPT"),
        ("2127-01-31T18:00", "2127-01-31 18:00 NPT"),
        ("2127-01-31T18:00Z", "2127-01-31 23:45 NPT"),
        ("2127-01-31T18:00+01:00", "2127-01-31 22:45 NPT"),
    ],
)
def test_an_expiry_names_its_time_zone(text: str, shown: str) -> None:
    assert zoned_time(expiry_unix_ms(text)) == shown


@pytest.mark.usefixtures("in_nepal")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("soon", r"such as 90d, 12h, 2027-01-31 \(00:00 NPT\), 2027-01-31T18:00Z or never"),
        ("2001-01-31", "2001-01-31 00:00 NPT is not in the future"),
    ],
)
def test_a_wrong_expiry_is_refused_with_the_time_zone(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        expiry_unix_ms(text)


def test_no_time_is_no_text() -> None:
    assert zoned_time(None) == ""


def test_times() -> None:
    in_90_days = expiry_unix_ms("90d")
    assert in_90_days is not None
    assert abs(in_90_days / 1000 - time.time() - 90 * 86_400) < 60
    assert expiry_unix_ms("never") is None
    assert expiry_unix_ms("2127-01-31") == datetime(2127, 1, 31).timestamp() * 1000  # noqa: DTZ001  # local, as said
    assert (duration_s("24h", "--grace"), duration_s("0", "--grace")) == (86_400, 0)
    with pytest.raises(typer.BadParameter):
        duration_s("1w", "--grace")


def test_limits_are_told_in_a_few_words() -> None:
    policy = Policy(60, 50_000, 4, 2_500_000_000, "day", 3.0, "batch")
    assert limits_text(policy) == "60 rpm, 50,000 tpm, 4 concurrent, 2.5 USD/day, weight 3, batch only"
    assert limits_text(Policy()) == ""
