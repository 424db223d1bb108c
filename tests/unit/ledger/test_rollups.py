"""Rollups are what the rows add up to: after any batches, repetitions, replacements and rivals."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import create_engine
from db.money import CLIENTS, MACHINE, ConfiguredPrice, Price
from db.prices import add_price, load_prices, seed_prices
from db.tables import RollupRow, SliceRow
from ledger.abandoned import AbandonedRequests
from ledger.check import check_rollups
from ledger.histogram import MEASURES
from ledger.intents import Intents
from ledger.rollups import WIDTHS_S, slice_id
from ledger.store import store_records
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.usage import RequestRecord
from tests.usage_records import attempt_record, request_record
from tests.waiting import HANGS_S

START_UNIX_MS = 1_800_000_000_000
DEMO = ConfiguredPrice("demo", "", Price(prompt_nano_usd=150_000_000, completion_nano_usd=600_000_000))


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url, lock_limit_s=HANGS_S)  # two writers of SQLite; a busy machine is slow
    await seed_prices(engine, [DEMO], START_UNIX_MS - 1_000_000)
    yield engine
    await engine.dispose()


def any_request(source: random.Random, number: int) -> RequestRecord:
    outcome = source.choice(["ok", "ok", "failed", "cancelled"])
    accepted = source.random() < 0.9
    return request_record(
        f"r{number}",
        received_unix_ms=START_UNIX_MS + source.randrange(3 * 86_400_000),
        model=source.choice(["demo", "other"]),
        team_id=source.choice(["team_a", "team_b", None]),
        outcome=outcome,
        attempts=source.randrange(4),
        prompt_tokens=source.randrange(9999),
        completion_tokens=source.randrange(999),
        queue_ms=source.expovariate(0.01) if accepted else None,
        ttft_ms=source.expovariate(0.01) if accepted else None,
        total_ms=source.expovariate(0.001),
        pool=source.choice(["spot", "dear"]) if accepted else None,
        tags=source.choice([None, {"team": "search"}, {"team": "ads", "run": str(source.randrange(300))}]),
    )


async def sums(engine: AsyncEngine, *names: str, **where: str) -> dict[int, tuple[int, ...]]:
    """Width → sums over all buckets and slices."""
    columns = [func.sum(getattr(RollupRow, name)) for name in names]
    statement = select(RollupRow.width_s, *columns).join(SliceRow, SliceRow.id == RollupRow.slice_id)
    statement = statement.where(*(getattr(SliceRow, name) == value for name, value in where.items()))
    async with engine.connect() as connection:
        rows = await connection.execute(statement.group_by(RollupRow.width_s))
        return {row[0]: tuple(int(value) for value in row[1:]) for row in rows}


async def wrong(engine: AsyncEngine, **options: Any) -> int:
    return sum(check.wrong for check in await check_rollups(engine, **options))


async def test_batches_with_repetitions_add_up(engine: AsyncEngine) -> None:
    source = random.Random(5)
    records = [any_request(source, number) for number in range(400)]
    delivered = records + source.sample(records, 100)
    for start in range(0, len(delivered), 60):
        await store_records(engine, delivered[start : start + 60])
    expected = (400, sum(record.prompt_tokens for record in records))
    assert await sums(engine, "requests", "prompt_tokens") == dict.fromkeys(WIDTHS_S, expected)
    checks = await check_rollups(engine)
    assert [sum(check.requests for check in checks), sum(check.wrong for check in checks)] == [400, 0]


async def test_two_writers_at_once_count_once(engine: AsyncEngine) -> None:
    source = random.Random(6)
    records = [any_request(source, number) for number in range(200)]
    batches = [records[start : start + 25] for start in range(0, 200, 25)]

    async def write_all(order: list[list[RequestRecord]]) -> None:
        for batch in order:
            await store_records(engine, batch)

    await asyncio.gather(write_all(batches), write_all(batches[::-1]))
    assert await sums(engine, "requests") == dict.fromkeys(WIDTHS_S, (200,))
    assert await wrong(engine) == 0


async def test_a_gateways_own_word_takes_the_place_of_what_was_said_for_it(engine: AsyncEngine, nats_url: str) -> None:
    origin: dict[str, Any] = {"gateway_id": "g", "endpoint": "completions", "key_id": "key_b", "key_name": "b"}
    origin["stream"] = False
    last = attempt_record("r", received_unix_ms=START_UNIX_MS, completion_tokens=3, **origin)
    await store_records(engine, [last])
    intents = Intents(engine, hold_s=3.0)
    intents.hold([last], None)
    await intents.write_due(flush=True)
    bus = await Bus.connect(nats_url, name="test")
    abandoned = AbandonedRequests(bus, engine, abandoned_after_ms=0)
    await abandoned.check()
    await abandoned.record_overdue(unix_now_ms())
    await bus.close()
    assert await sums(engine, "requests", "completion_tokens") == dict.fromkeys(WIDTHS_S, (1, 3))
    late = request_record("r", completion_tokens=40, received_unix_ms=START_UNIX_MS)
    await store_records(engine, [late, late])
    assert await sums(engine, "requests", "completion_tokens") == dict.fromkeys(WIDTHS_S, (1, 40))
    assert await sums(engine, "requests", key_id="key_b") == {}
    assert await wrong(engine) == 0


async def test_what_is_wrong_is_found_and_mended(engine: AsyncEngine) -> None:
    source = random.Random(7)
    await store_records(engine, [any_request(source, number) for number in range(50)])
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE rollups SET requests = requests + 1 WHERE width_s = 3600"))
        await connection.execute(text("DELETE FROM histograms WHERE width_s = 86400"))
    columns = tuple(sorted(("requests", *MEASURES)))
    assert {check.columns for check in await check_rollups(engine) if check.wrong} == {columns}
    assert await wrong(engine, repair=True) > 0
    assert {(check.wrong, check.columns) for check in await check_rollups(engine)} == {(0, ())}
    assert await sums(engine, "requests") == dict.fromkeys(WIDTHS_S, (50,))


async def test_sums_that_an_older_ledger_writer_does_not_know_are_rebuilt(engine: AsyncEngine) -> None:
    source = random.Random(8)
    await store_records(engine, [any_request(source, number) for number in range(20)])
    expected = await sums(engine, "unpriced_tokens")
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE rollups SET unpriced_tokens = 0"))
    found = await check_rollups(engine, repair=True)
    assert {check.columns for check in found if check.wrong} == {("unpriced_tokens",)}
    assert await sums(engine, "unpriced_tokens") == expected
    assert expected[WIDTHS_S[-1]] > (0,)


async def test_charges_are_those_of_the_price_that_held_at_that_time(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await add_price(connection, "demo", "", Price(3_000_000), from_unix_ms=START_UNIX_MS - 1000, source="cli:test")
        await add_price(
            connection, "demo", "", Price(1_000_000, 100_000, 2_000_000), from_unix_ms=START_UNIX_MS, source="cli:test"
        )
    tokens = {"prompt_tokens": 1000, "cached_tokens": 400, "completion_tokens": 10}
    before, after = ({"received_unix_ms": START_UNIX_MS + late_ms, **tokens} for late_ms in (-1, 0))
    unpriced = request_record("c", model="free", **after)
    unrun = request_record("d", pool=None, **after)
    await store_records(engine, [request_record("a", **before), request_record("b", **after), unpriced, unrun])
    async with engine.connect() as connection:
        rows = await connection.execute(text("SELECT request_id, charge_nano_usd FROM requests ORDER BY request_id"))
        assert [tuple(row) for row in rows] == [("a", 3000), ("b", 600 + 40 + 20), ("c", None), ("d", 0)]


async def test_the_configuration_adds_what_it_changes_and_leaves_what_somebody_has_set(engine: AsyncEngine) -> None:
    cheaper = ConfiguredPrice("demo", "", Price(prompt_nano_usd=1))
    at = START_UNIX_MS
    await seed_prices(engine, [DEMO], at)
    await seed_prices(engine, [cheaper], at + 1)
    async with engine.begin() as connection:
        await add_price(connection, "demo", "", Price(2), from_unix_ms=at + 2, source="user:ops")
    await seed_prices(engine, [cheaper], at + 3)
    async with engine.connect() as connection:
        rows = await connection.execute(text("SELECT from_unix_ms, prompt_nano_usd FROM price_book ORDER BY 1"))
        assert [tuple(row) for row in rows] == [(at - 1_000_000, 150_000_000), (at + 1, 1), (at + 2, 2)]


async def test_a_price_that_the_configuration_no_longer_has_ends(engine: AsyncEngine) -> None:
    at = START_UNIX_MS
    hosted = ConfiguredPrice("demo", "hosted", Price(prompt_nano_usd=7))
    machine = ConfiguredPrice(MACHINE, "spot", Price(machine_nano_usd=9, on_demand_nano_usd=10))
    free = ConfiguredPrice("free", CLIENTS, Price(0, 0, 0))
    await seed_prices(engine, [DEMO, hosted, machine, free], at)
    async with engine.begin() as connection:
        await add_price(connection, "set", CLIENTS, Price(2), from_unix_ms=at, source="user:ops")
    for _ in range(2):  # a second start enters nothing
        await seed_prices(engine, [], at + 1)
    async with engine.connect() as connection:
        rows = await connection.execute(text("SELECT model, pool FROM price_book WHERE from_unix_ms > :at"), {"at": at})
        ended = {("demo", CLIENTS), ("demo", "hosted"), (MACHINE, "spot"), ("free", CLIENTS)}
        assert sorted(tuple(row) for row in rows) == sorted(ended)
        book = await load_prices(connection)
    assert {key: book.at(*key, at + 1) for key in ended} == dict.fromkeys(ended, Price())
    assert book.at("demo", "hosted", at) == hosted.price
    assert book.charge_nano_usd("demo", at, 1000, 0, 0) == 150_000
    assert book.charge_nano_usd("demo", at + 1, 1000, 0, 0) is None
    assert book.charge_nano_usd("set", at + 1, 1_000_000, 0, 0) == 2

    await seed_prices(engine, [hosted], at)  # back again, by a clock that was set back
    async with engine.connect() as connection:
        book = await load_prices(connection)
    assert book.at("demo", "hosted", at + 2) == hosted.price
    assert book.charge_nano_usd("demo", at + 2, 1000, 0, 0) is None


def test_slices_do_not_run_into_one_another() -> None:
    assert slice_id(("a", "b", "")) != slice_id(("a", "", "b")) != slice_id(("", "a", "b"))
    assert 0 <= slice_id(("a",)) < 2**63
