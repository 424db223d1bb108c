"""Rollups of tags: what the rows add up to, and how many are kept of a key that gives any number of them."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import create_engine
from db.money import ConfiguredPrice, Price
from db.prices import seed_prices
from db.tables import TagSliceRow
from ledger.check import check_rollups
from ledger.queries.usage import UsageRefused, usage
from ledger.queries.window import DAY_MS, Window
from ledger.store import store_records
from ledger.tags import MAX_NAMES, MAX_VALUES, OTHER
from protocol.usage import RequestRecord
from tests.usage_records import request_record

START_UNIX_MS = 1_800_000_000_000
DAY = Window(START_UNIX_MS // DAY_MS * DAY_MS, START_UNIX_MS // DAY_MS * DAY_MS + DAY_MS)
DEMO = ConfiguredPrice("demo", "", Price(prompt_nano_usd=1_000_000, completion_nano_usd=2_000_000))  # 1 and 2 a token
CHARGE = 10 + 5 * 2  # of the request of ``request_record``


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    await seed_prices(engine, [DEMO], START_UNIX_MS - 1_000_000)
    yield engine
    await engine.dispose()


async def by_tag(engine: AsyncEngine) -> dict[str, tuple[int, int, int]]:
    """Tag → requests, nano-USD and tokens without a price."""
    async with engine.connect() as connection:
        rows = await usage(connection, DAY, ["tag"])
    return {row.tag or "": (row.sums.requests, row.sums.charge_nano_usd, row.sums.unpriced_tokens) for row in rows}


async def test_a_request_counts_for_each_of_its_tags(engine: AsyncEngine) -> None:
    await store_records(
        engine,
        [
            request_record("1", tags={"app": "search", "env": "prod"}),
            request_record("2", tags={"app": "search"}),
            request_record("3", tags={"env": "dev"}, model="free"),
            request_record("4"),
            request_record("5", tags={"app": "search"}, pool=None),  # no worker has accepted it
        ],
    )
    assert await by_tag(engine) == {
        "app=search": (3, 2 * CHARGE, 0),
        "env=prod": (1, CHARGE, 0),
        "env=dev": (1, 0, 15),
    }


async def test_tags_are_of_their_key_and_team(engine: AsyncEngine) -> None:
    records = [request_record(key, key_id=f"key_{key}", team_id=f"team_{key}", tags={"app": "x"}) for key in "ab"]
    await store_records(engine, [*records, request_record("c", key_id="key_b", team_id="team_b", tags={"app": "x"})])
    async with engine.connect() as connection:
        by_both = await usage(connection, DAY, ["team", "key", "tag"])
        [of_b] = await usage(connection, DAY, ["tag"], where={"key": ["key_b"]})
        with pytest.raises(UsageRefused, match="not with model"):
            await usage(connection, DAY, ["tag", "model"])
    assert [(row.team_id, row.key_id, row.tag, row.sums.requests) for row in by_both] == [
        ("team_a", "key_a", "app=x", 1),
        ("team_b", "key_b", "app=x", 2),
    ]
    assert of_b.sums.requests == 2


def run(number: int, name: str = "run", **changes: str) -> RequestRecord:
    return request_record(f"{name} {number}", tags={name: str(number)}, **changes)


async def test_of_a_name_with_any_number_of_values_the_first_are_kept(engine: AsyncEngine) -> None:
    for start in range(0, MAX_VALUES + 60, 40):
        await store_records(engine, [run(number) for number in range(start, start + 40)])
    found = await by_tag(engine)
    beyond = (MAX_VALUES + 60) // 40 * 40 - MAX_VALUES
    assert len(found) == MAX_VALUES + 1
    assert found[f"run={OTHER}"] == (beyond, beyond * CHARGE, 0)
    assert found["run=0"] == (1, CHARGE, 0)
    await store_records(engine, [request_record("again", tags={"run": "5"})])  # a known one
    assert (await by_tag(engine))[f"run={OTHER}"][0] == beyond


async def test_any_number_of_names_and_names_like_the_others_are_bounded(engine: AsyncEngine) -> None:
    names = [f"n{number:03}" for number in range(MAX_NAMES + 8)]
    for chunk in (names[:20], names[20:]):
        await store_records(engine, [request_record(name, tags={name: "x"}) for name in chunk])
    await store_records(engine, [request_record(f"o{n}", tags={OTHER: str(n)}) for n in range(20)])
    await store_records(engine, [request_record(f"v{n}", tags={f"v{n}": OTHER}) for n in range(20)])
    found = await by_tag(engine)
    assert len(found) == MAX_NAMES + 1
    assert found[f"{OTHER}={OTHER}"][0] == 8 + 20 + 20
    async with engine.connect() as connection:
        assert await connection.scalar(select(func.count()).select_from(TagSliceRow)) == MAX_NAMES + 1


async def test_what_is_replaced_is_taken_out_where_it_was_added(engine: AsyncEngine) -> None:
    await store_records(engine, [run(number) for number in range(MAX_VALUES)])
    lost = {"outcome": "failed", "error_code": "gateway_lost"}
    await store_records(engine, [run(500, **lost), run(501, **lost), run(1000, **lost)])
    await store_records(engine, [run(500), request_record("run 501"), request_record("run 1000", tags={"run": "7"})])
    found = await by_tag(engine)
    assert found[f"run={OTHER}"][0] == 1
    assert found["run=7"][0] == 2
    assert sum(check.wrong for check in await check_rollups(engine)) == 0


async def test_the_check_finds_and_repairs_rollups_of_tags(engine: AsyncEngine) -> None:
    await store_records(engine, [run(number) for number in range(MAX_VALUES + 5)])
    before = await by_tag(engine)
    async with engine.begin() as connection:
        await connection.exec_driver_sql("UPDATE tag_rollups SET charge_nano_usd = charge_nano_usd + 1")
    [check] = await check_rollups(engine, repair=True)
    assert check.wrong == 3 * (MAX_VALUES + 1)
    [check] = await check_rollups(engine)
    assert check.wrong == 0
    assert await by_tag(engine) == before
