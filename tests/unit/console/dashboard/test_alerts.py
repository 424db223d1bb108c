from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from console.dashboard.alerts import ledger_alerts
from db.accounts.keys import Grant, create_key, update_key
from db.accounts.teams import create_team, update_team
from db.engine import create_engine
from db.money import CLIENTS, NANO_USD, ConfiguredPrice, Price
from db.prices import seed_prices
from db.set_aside import SetAside
from db.tables import MachineRow
from ledger.queries.fleet import ENDING_MS, STARTING_MS, has_machines
from ledger.queries.window import DAY_MS, HOUR_MS
from ledger.store import store_records
from protocol.nats.clock import unix_now_ms
from protocol.refusals import MINUTE_MS, RefusalCount
from protocol.usage import UsageRecord
from tests.usage_records import request_record

NOW = unix_now_ms()


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


def requests(number: int, failed: int, age_ms: int = MINUTE_MS) -> list[UsageRecord]:
    return [
        request_record(f"r{n}", received_unix_ms=NOW - age_ms, outcome="failed" if n < failed else "ok")
        for n in range(number)
    ]


def refused(number: int, code: str = "invalid_value", age_ms: int = MINUTE_MS) -> UsageRecord:
    minute = (NOW - age_ms) // MINUTE_MS * MINUTE_MS
    return RefusalCount(
        v=1, gateway_id="g", run_id="r", minute_unix_ms=minute, refusals=number, code=code, status=429, endpoint="e",
        key_id="key_a",
    )  # fmt: skip


def machine(name: str, state: str, age_ms: int, **times: int) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(MachineRow.__table__.columns.keys())
    return values | {
        "machine_id": name, "pool": "spot", "place": "", "state": state, "wanted_unix_ms": NOW - age_ms, "reason": "",
        **times,
    }  # fmt: skip


async def names(engine: AsyncEngine) -> list[str]:
    async with engine.connect() as connection:
        return [alert.name for alert in await ledger_alerts(connection, NOW)]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], []),
        (requests(100, failed=5), []),
        (requests(100, failed=6), ["SpillwayRequestsFail"]),
        (requests(19, failed=19), []),  # a share of a few says nothing
        (requests(100, failed=100, age_ms=20 * MINUTE_MS), []),  # is over
        ([*requests(30, failed=0), refused(30)], []),
        ([*requests(30, failed=0), refused(31)], ["SpillwayRefused"]),
        ([refused(31, age_ms=20 * MINUTE_MS)], []),
        ([refused(1, "insufficient_quota")], ["SpillwayBudgetSpent"]),
    ],
)
async def test_requests_that_fail_or_are_refused(
    engine: AsyncEngine, records: list[UsageRecord], expected: list[str]
) -> None:
    await store_records(engine, records)
    assert await names(engine) == expected


@pytest.mark.parametrize(
    ("row", "is_leaked"),
    [
        (machine("m", "launched", STARTING_MS - 1), False),
        (machine("m", "launched", STARTING_MS + 1), True),
        (machine("m", "wanted", STARTING_MS + 1), True),
        (machine("m", "serving", 10 * STARTING_MS), False),
        (machine("m", "ending", 10 * STARTING_MS, drained_unix_ms=NOW - ENDING_MS + 1), False),
        (machine("m", "ending", 10 * STARTING_MS, drained_unix_ms=NOW - ENDING_MS - 1), True),
        (machine("m", "gone", 10 * STARTING_MS), False),
    ],
)
async def test_machines_that_serve_nobody(engine: AsyncEngine, row: dict[str, Any], is_leaked: bool) -> None:
    async with engine.begin() as connection:
        await connection.execute(insert(MachineRow), [row])
    assert await names(engine) == (["SpillwayMachineLeaked"] if is_leaked else [])
    async with engine.connect() as connection:
        assert await has_machines(connection) == (row["state"] != "gone")


async def test_what_was_set_aside(engine: AsyncEngine) -> None:
    notes = SetAside(engine)
    notes.note("usage record", "r", "key_a", "damaged")
    await notes.flush()
    async with engine.connect() as connection:
        [alert] = await ledger_alerts(connection, unix_now_ms() + 1)
    assert (alert.name, alert.severity) == ("SpillwayUsageParked", "ticket")
    assert "usage record" in alert.text


@pytest.mark.parametrize(
    ("budget_usd", "period", "spent_usd", "hour_usd", "expected"),
    [
        (1000, "month", 100, 10, True),  # some 19 days are left, or 456 hours
        (1000, "month", 100, 1, False),
        (1000, "month", 1000, 10, False),  # is spent already: another alert
        (1000, "day", 100, 10, False),
        (None, None, 100, 10, False),
    ],
)
@pytest.mark.parametrize("kind", ["team", "key"])
async def test_a_budget_that_runs_out_before_its_month_ends(
    engine: AsyncEngine, kind: str, budget_usd: int | None, period: Any, spent_usd: int, hour_usd: int, expected: bool
) -> None:
    now = int(datetime(2026, 11, 11, 23, 55, tzinfo=UTC).timestamp()) * 1000
    policy = {"budget_nano_usd": budget_usd and budget_usd * NANO_USD, "budget_period": period}
    team = await create_team(engine, "search", "cli:test")
    key, _ = await create_key(engine, "nightly", SecretStr("p" * 64), Grant(team_id=team.team_id), "cli:test")
    if kind == "team":
        await update_team(engine, team.team_id, policy, "cli:test")
    else:
        await update_key(engine, key.key_id, policy, "cli:test")
    await seed_prices(engine, [ConfiguredPrice("demo", CLIENTS, Price(0, 0, 1_000_000 * NANO_USD))], 0)
    whose = {"team_id": team.team_id, "key_id": key.key_id, "model": "demo"}
    before = request_record("r1", received_unix_ms=now - 2 * DAY_MS, completion_tokens=spent_usd - hour_usd, **whose)
    lately = request_record("r2", received_unix_ms=now - HOUR_MS // 2, completion_tokens=hour_usd, **whose)
    await store_records(engine, [before, lately])
    async with engine.connect() as connection:
        found = [one for one in await ledger_alerts(connection, now) if one.name == "SpillwayBudgetPace"]
    assert bool(found) == expected
    if expected:
        name = "search" if kind == "team" else "nightly"
        assert f"{name} ($10.00 an hour, $1,000.00 a month: spent in 90 h 0 min)" in found[0].text
