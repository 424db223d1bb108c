from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import create_engine
from db.tables import RefusalCountRow, RefusalGroupRow, RefusalRow
from ledger.refusals import NAMED_OF_A_KEY, QUARTER_MS, tidy_refusals
from ledger.store import store_records
from protocol.nats.clock import unix_now_ms
from protocol.refusals import MINUTE_MS, RefusalCount, RefusalRecord

LONG_AGO_MS = 1_700_000_000_000 // QUARTER_MS * QUARTER_MS


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


def count(refusals: int, minute_unix_ms: int = LONG_AGO_MS, **changes: Any) -> RefusalCount:
    values: dict[str, Any] = {
        "v": 1,
        "gateway_id": "gw-1",
        "run_id": "run",
        "minute_unix_ms": minute_unix_ms,
        "refusals": refusals,
        "code": "insufficient_quota",
        "status": 429,
        "endpoint": "chat.completions",
        "key_id": "key_a",
    }
    return RefusalCount(**(values | changes))


def refusal(request_id: str, **changes: Any) -> RefusalRecord:
    values: dict[str, Any] = {
        "v": 1,
        "request_id": request_id,
        "gateway_id": "gw-1",
        "received_unix_ms": LONG_AGO_MS,
        "endpoint": "chat.completions",
        "code": "insufficient_quota",
        "status": 429,
        "method": "POST",
        "path": "/v1/chat/completions",
        "client": "10.0.0.1",
    }
    return RefusalRecord(**(values | changes))


async def counts(engine: AsyncEngine) -> list[tuple[int, str, str, int]]:
    group, table = RefusalGroupRow.__table__.columns, RefusalCountRow.__table__.columns
    statement = (
        select(table.bucket_unix_ms, table.run_id, group.code, table.refusals)
        .join(RefusalGroupRow, group.id == table.group_id)
        .order_by(table.bucket_unix_ms, table.run_id, group.code)
    )
    async with engine.connect() as connection:
        return [tuple(row) for row in await connection.execute(statement)]


async def names(engine: AsyncEngine) -> set[str]:
    async with engine.connect() as connection:
        return set(await connection.scalars(select(RefusalRow.request_id)))


async def test_counts_that_come_twice_or_late_change_nothing(engine: AsyncEngine) -> None:
    await store_records(engine, [count(3), count(5), count(4), count(7, code="model_not_found")])
    await store_records(engine, [count(2), count(5)])
    await store_records(engine, [count(1, run_id="other")])
    assert [row[1:] for row in await counts(engine)] == [
        ("other", "insufficient_quota", 1),
        ("run", "insufficient_quota", 5),
        ("run", "model_not_found", 7),
    ]


async def test_a_refusal_is_stored_as_it_was_told_and_once(engine: AsyncEngine) -> None:
    record = refusal("r", message="No.", param="model", model="gpt", key_id="key_a", key_name="a", team_id="team_a")
    await store_records(engine, [record])
    await store_records(engine, [record, msgspec.structs.replace(record, code="another")])
    async with engine.connect() as connection:
        [row] = (await connection.execute(select(RefusalRow.__table__))).mappings()
    assert {"v": 1, **row} == msgspec.structs.asdict(record)


async def test_earlier_days_are_merged_and_nothing_is_lost_or_counted_twice(engine: AsyncEngine) -> None:
    today = unix_now_ms() // MINUTE_MS * MINUTE_MS
    minutes = [LONG_AGO_MS + number * MINUTE_MS for number in range(20)]
    await store_records(engine, [count(1 + number, minute) for number, minute in enumerate(minutes)])
    await store_records(engine, [count(100, minutes[3], run_id="other"), count(9, today)])
    for _ in range(2):
        await tidy_refusals(engine, None)
        assert [(row[0], row[1], row[3]) for row in await counts(engine)] == [
            (LONG_AGO_MS, "", sum(range(1, 16)) + 100),
            (LONG_AGO_MS + QUARTER_MS, "", sum(range(16, 21))),
            (today, "run", 9),
        ]
    await store_records(engine, [count(1, minutes[0], run_id="third")])
    await tidy_refusals(engine, None)
    assert (await counts(engine))[0][3] == sum(range(1, 16)) + 101


async def test_the_latest_of_each_key_stay_by_name(engine: AsyncEngine) -> None:
    flood = [refusal(f"f{n:05}", received_unix_ms=LONG_AGO_MS + n, key_id="key_a") for n in range(NAMED_OF_A_KEY + 7)]
    await store_records(engine, [*flood, refusal("b", key_id="key_b"), refusal("nobody")])
    await tidy_refusals(engine, None)
    kept = {record.request_id for record in flood[7:]}
    assert await names(engine) == kept | {"b", "nobody"}
    await tidy_refusals(engine, LONG_AGO_MS + NAMED_OF_A_KEY)
    assert await names(engine) == {record.request_id for record in flood[NAMED_OF_A_KEY:]}
    async with engine.connect() as connection:
        assert await connection.scalar(select(func.count()).select_from(RefusalCountRow)) == 0
