"""Limits, money and times as people write them on the command line."""

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
import typer

from db.accounts.principal import Policy
from spillway.cli.policy import duration_s, expiry_unix_ms, limits_text, policy_changes, zoned_time

NOTHING: dict[str, Any] = dict.fromkeys(
    (
        "rpm",
        "tpm",
        "concurrent",
        "budget",
        "weight",
        "batch_only",
        "log_payload",
        "train_ok",
        "redact",
        "retention_days",
        "allow_hosted",
        "trusted_only",
    )
)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
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
    assert policy_changes(**{**NOTHING, **options}) == changes


@pytest.mark.parametrize(
    "options", [{"rpm": "many"}, {"weight": "heavy"}, {"budget": "50 USD"}, {"budget": "5 EUR/day"}, {"rpm": "1.5"}]
)
def test_what_cannot_be_read_is_refused_by_its_option(options: dict[str, str]) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        policy_changes(**{**NOTHING, **options})
    assert refused.value.param_hint == f"--{next(iter(options))}"


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
    with pytest.raises(typer.BadParameter, match=said):
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
        expiry_unix_ms("soon")
    with pytest.raises(typer.BadParameter):
        duration_s("1w", "--grace")


def test_limits_are_told_in_a_few_words() -> None:
    policy = Policy(60, 50_000, 4, 2_500_000_000, "day", 3.0, "batch")
    assert limits_text(policy) == "60 rpm, 50,000 tpm, 4 concurrent, 2.5 USD/day, weight 3, batch only"
    assert limits_text(Policy()) == ""
