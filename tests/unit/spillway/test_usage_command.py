"""``spillway usage``, as typed."""

import asyncio
import csv
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from db.engine import create_engine
from db.money import ConfiguredPrice, Price
from db.prices import seed_prices
from ledger.store import store_records
from spillway.cli import app
from tests.usage_records import request_record


async def fill(database_url: str) -> None:
    engine = create_engine(database_url)
    records = [
        request_record(str(n), key_id=f"key_{n}", key_name=name) for n, name in enumerate(("=1+1", "-a;=b", "k"))
    ]
    await store_records(engine, records)
    await engine.dispose()


def test_what_a_spreadsheet_would_run_is_a_text(sqlite_url: str, tmp_path: Path) -> None:
    asyncio.run(fill(sqlite_url))
    arguments = ["usage", "--format", "csv", "--by", "key", "--data", str(tmp_path)]
    done = CliRunner().invoke(app, arguments, env={"SPILLWAY_DATABASE__URL": sqlite_url})
    assert done.exit_code == 0, done.stderr
    rows = list(csv.DictReader(done.stdout.splitlines()))
    assert {row["key_name"] for row in rows} == {"'=1+1", "'-a;'=b", "k"}
    assert {row["requests"] for row in rows} == {"1"}


async def fill_month(database_url: str) -> None:
    engine = create_engine(database_url)
    price = Price(prompt_nano_usd=1_000_000, completion_nano_usd=2_000_000)  # 1 and 2 nano-USD a token
    await seed_prices(engine, [ConfiguredPrice("demo", "", price)], 0)
    months = [int(datetime(2026, month, 1, tzinfo=UTC).timestamp()) * 1000 for month in (10, 11, 12)]
    await store_records(
        engine,
        [
            request_record("october", received_unix_ms=months[1] - 1, team_id="team_a"),
            request_record("first", received_unix_ms=months[1], team_id="team_a", tags={"app": "x"}),
            request_record("last", received_unix_ms=months[2] - 1, team_id="team_a"),
            request_record("free", received_unix_ms=months[1], team_id="team_b", model="free"),
        ],
    )
    await engine.dispose()


def typed(sqlite_url: str, tmp_path: Path, *arguments: str) -> str:
    environment = {"SPILLWAY_DATABASE__URL": sqlite_url}
    done = CliRunner().invoke(app, ["usage", *arguments, "--data", str(tmp_path)], env=environment)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_money_by_team_in_a_calendar_month(sqlite_url: str, tmp_path: Path) -> None:
    asyncio.run(fill_month(sqlite_url))
    month = ("--month", "2026-11", "--timezone", "UTC")
    rows = json.loads(typed(sqlite_url, tmp_path, "--by", "team", *month, "--format", "json"))
    found = [(row["team_id"], row["charge_nano_usd"], row["charge_usd"], row["unpriced_tokens"]) for row in rows]
    assert found == [("team_a", 40, "0.00000004", 0), ("team_b", 0, "0.00", 15)]
    table = typed(sqlite_url, tmp_path, "--by", "team", *month)
    assert "$0.00000004" in table
    assert ["no price" in line for line in table.splitlines() if "team_b" in line] == [True]
    months = json.loads(typed(sqlite_url, tmp_path, "--by", "month", "--timezone", "UTC", "--format", "json"))
    assert [(row["month"], row["requests"]) for row in months] == [("2026-10", 1), ("2026-11", 3)]
    [tag] = json.loads(typed(sqlite_url, tmp_path, "--by", "tag", *month, "--format", "json"))
    assert (tag["tag"], tag["charge_nano_usd"], tag["failed"]) == ("app=x", 20, None)
    assert "app=x" in typed(sqlite_url, tmp_path, "--by", "tag", *month)


def test_the_columns_of_focus(sqlite_url: str, tmp_path: Path) -> None:
    asyncio.run(fill_month(sqlite_url))
    month = ("--month", "2026-11", "--timezone", "UTC", "--by", "day", "--format", "focus")
    rows = list(csv.DictReader(typed(sqlite_url, tmp_path, *month).splitlines()))
    assert [(row["SubAccountId"], row["SkuId"], row["BilledCost"], row["ConsumedQuantity"]) for row in rows] == [
        ("team_a", "demo", "0.00000002", "15"),
        ("team_b", "free", "0.00", "15"),
        ("team_a", "demo", "0.00000002", "15"),
    ]
    assert (rows[0]["ChargePeriodStart"], rows[0]["ChargePeriodEnd"]) == (
        "2026-11-01T00:00:00Z",
        "2026-11-02T00:00:00Z",
    )
    assert json.loads(rows[0]["Tags"]) == {"team": "team_a", "key": "key_a", "model": "demo"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--month", "2026-13"], "is not a month. Example: 2026-11"),
        (["--month", "2026-11", "--since", "2026-11-01"], "cannot be combined with --since or --until"),
        (["--by", "team,colour"], "cannot group by colour"),
        (["--by", "tag,model"], "not with model"),
    ],
)
def test_what_cannot_be_reported_is_said(sqlite_url: str, tmp_path: Path, arguments: list[str], said: str) -> None:
    asyncio.run(fill_month(sqlite_url))
    environment = {"SPILLWAY_DATABASE__URL": sqlite_url, "COLUMNS": "200"}
    done = CliRunner().invoke(app, ["usage", *arguments, "--data", str(tmp_path)], env=environment)
    assert done.exit_code != 0
    assert said in done.stderr
