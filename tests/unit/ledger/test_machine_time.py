"""Time up and busy, from heartbeats: the same however many writers receive them, and whatever they miss."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import create_engine
from db.money import ConfiguredPrice, Price
from db.prices import seed_prices
from db.set_aside import SetAside
from db.tables import InstanceRow
from ledger.machine_time import QUARTER_MS, MachineTime
from protocol.job import PROTOCOL_VERSION, Heartbeat
from protocol.nats.bus import Bus

START_UNIX_MS = 1_800_000_000_000 // QUARTER_MS * QUARTER_MS + 60_000
NO_BUS = cast("Bus", None)  # heartbeats are given by hand


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


def beat(after_ms: int, busy_ms: int, worker_id: str = "w") -> Heartbeat:
    values: dict[str, Any] = {"v": PROTOCOL_VERSION, "worker_id": worker_id, "pool": "spot", "provider": "p"}
    values |= {"region": "r", "tier": "spot", "engine": "e", "models": ("m",), "usd_per_hour": 0.5}
    values |= {"max_sequences": 1, "max_kv_tokens": 1, "free_sequences": 1, "free_kv_tokens": 1, "running": 0}
    return Heartbeat(**values, started_unix_ms=START_UNIX_MS, sent_unix_ms=START_UNIX_MS + after_ms, busy_ms=busy_ms)


async def rows(engine: AsyncEngine) -> list[dict[str, Any]]:
    async with engine.connect() as connection:
        found = await connection.execute(select(InstanceRow.__table__).order_by(InstanceRow.bucket_unix_ms))
        return [dict(row) for row in found.mappings()]


async def times(engine: AsyncEngine) -> tuple[int, int]:
    """(up, busy), in all."""
    found = await rows(engine)
    up_ms = sum(row["up_until_unix_ms"] - row["up_from_unix_ms"] for row in found)
    return up_ms, sum(row["busy_until_ms"] - row["busy_from_ms"] for row in found)


async def test_time_is_cut_into_quarters_of_an_hour_and_adds_up(engine: AsyncEngine) -> None:
    writer = MachineTime(NO_BUS, engine, SetAside(engine))
    for minutes in (1, 10, 20, 31):
        writer.receive(beat(minutes * 60_000, minutes * 20_000))
        await writer.flush()
    assert await times(engine) == (31 * 60_000, 31 * 20_000)
    starts = [row["bucket_unix_ms"] for row in await rows(engine)]
    assert starts == [START_UNIX_MS - 60_000 + n * QUARTER_MS for n in range(3)]


async def test_two_writers_and_one_that_comes_back_agree(engine: AsyncEngine) -> None:
    first, second = MachineTime(NO_BUS, engine, SetAside(engine)), MachineTime(NO_BUS, engine, SetAside(engine))
    for minute in range(1, 40):
        for number, writer in enumerate((first, second)):
            writer.receive(beat(minute * 60_000, minute * 30_000))
            if minute % (3 + number) == 0:
                await writer.flush()
    heir = MachineTime(NO_BUS, engine, SetAside(engine))  # both have died; for two hours nobody has listened
    heir.receive(beat(160 * 60_000, 80 * 60_000))
    heir.receive(beat(100 * 60_000, 50 * 60_000))  # late, and told already
    await heir.flush()
    await heir.flush()
    assert await times(engine) == (160 * 60_000, 80 * 60_000)


async def prices(engine: AsyncEngine) -> list[tuple[int, int | None]]:
    return [(row["nano_usd_per_hour"], row["on_demand_nano_usd_per_hour"]) for row in await rows(engine)]


async def test_the_price_book_has_the_say_and_heartbeats_where_it_is_silent(engine: AsyncEngine) -> None:
    price = Price(machine_nano_usd=300_000_000, on_demand_nano_usd=900_000_000)
    await seed_prices(engine, [ConfiguredPrice("", "spot", price)], START_UNIX_MS + 20 * 60_000)
    writer = MachineTime(NO_BUS, engine, SetAside(engine))
    writer.receive(beat(20 * 60_000, 0))
    await writer.flush()
    assert await prices(engine) == [(500_000_000, None), (300_000_000, 900_000_000)]


async def test_a_price_counts_for_the_quarter_in_which_it_was_entered(engine: AsyncEngine) -> None:
    # As at the first start: the price is entered in the middle of a quarter of an hour, and the worker is up before.
    writer = MachineTime(NO_BUS, engine, SetAside(engine))
    writer.receive(beat(60_000, 0))
    await writer.flush()
    assert await prices(engine) == [(500_000_000, None)]
    price = Price(machine_nano_usd=300_000_000, on_demand_nano_usd=900_000_000)
    await seed_prices(engine, [ConfiguredPrice("", "spot", price)], START_UNIX_MS + 120_000)
    writer.receive(beat(180_000, 0))
    await writer.flush()
    assert await prices(engine) == [(300_000_000, 900_000_000)]
