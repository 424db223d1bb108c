from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import DatabaseUnavailable, create_engine
from db.tables import AttemptRow, Base, RequestRow
from ledger.store import RecordRefused, store_records
from protocol.usage import AttemptRecord, RequestRecord, UsageRecord
from tests.usage_records import attempt_record, request_record


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


async def rows(engine: AsyncEngine, table: type[Base]) -> list[dict[str, Any]]:
    async with engine.connect() as connection:
        return [dict(row) for row in (await connection.execute(select(table))).mappings()]


@pytest.mark.parametrize(("table", "record"), [(RequestRow, RequestRecord), (AttemptRow, AttemptRecord)])
def test_tables_have_the_fields_of_their_records(table: type[Base], record: type[UsageRecord]) -> None:
    fields = [field.name for field in msgspec.structs.fields(record) if field.name != "v"]
    columns = [column.name for column in table.__table__.columns]
    assert [name for name in columns if name != "charge_nano_usd"] == fields  # which the price book tells


async def test_every_field_comes_back_as_it_went(engine: AsyncEngine) -> None:
    request = request_record("r", model="org/モデル", queue_ms=None, prompt_tokens=90_000_000)
    attempt = attempt_record("r", 2, total_ms=0.1 + 0.2, error_code="engine_error", outcome="failed")
    await store_records(engine, [request, attempt])
    for table, record in ((RequestRow, request), (AttemptRow, attempt)):
        [row] = await rows(engine, table)
        row.pop("charge_nano_usd", None)
        assert {"v": 1, **row} == msgspec.structs.asdict(record)


async def test_a_record_is_stored_once_and_the_first_stays(engine: AsyncEngine) -> None:
    await store_records(engine, [request_record("r"), attempt_record("r", 1), request_record("r", prompt_tokens=99)])
    await store_records(engine, [request_record("r", prompt_tokens=99), attempt_record("r", 1), attempt_record("r", 2)])
    assert [row["prompt_tokens"] for row in await rows(engine, RequestRow)] == [10]
    assert sorted(row["attempt"] for row in await rows(engine, AttemptRow)) == [1, 2]


async def test_two_workers_with_the_same_attempt_are_two_rows_and_the_first_word_of_each_stays(
    engine: AsyncEngine,
) -> None:
    lost = attempt_record("r", 1, worker_id="lost", outcome="failed", completion_tokens=3)
    await store_records(engine, [lost, attempt_record("r", 1, worker_id="second")])
    await store_records(engine, [attempt_record("r", 1, worker_id="lost", outcome="cancelled", completion_tokens=9)])
    found = {row["worker_id"]: (row["outcome"], row["completion_tokens"]) for row in await rows(engine, AttemptRow)}
    assert found == {"lost": ("failed", 3), "second": ("ok", 5)}


@pytest.mark.parametrize("refused", [request_record("bad", prompt_tokens=2**63), attempt_record("bad", 2**63)])
async def test_a_number_too_large_for_sql_is_refused_and_nothing_is_stored(
    engine: AsyncEngine, refused: UsageRecord
) -> None:
    with pytest.raises(RecordRefused):
        await store_records(engine, [request_record("good"), refused])
    assert await rows(engine, RequestRow) == []


async def test_a_character_that_postgresql_cannot_hold_is_refused(postgres_url: str) -> None:
    engine = create_engine(postgres_url)
    with pytest.raises(RecordRefused):
        await store_records(engine, [request_record("a\x00b")])
    await engine.dispose()


async def test_a_missing_table_is_an_outage_and_no_refusal(engine: AsyncEngine) -> None:
    # Taking it for a refusal would throw away every record until somebody looks.
    async with engine.begin() as connection:
        await connection.execute(text("ALTER TABLE requests RENAME TO requests_away"))
    with pytest.raises(DatabaseUnavailable):
        await store_records(engine, [request_record("r")])


@pytest.mark.parametrize("url", ["sqlite:////no/such/folder/x.db", "postgresql://x@127.0.0.1:1/x"])
async def test_an_unreachable_database_is_an_outage_and_no_refusal(url: str) -> None:
    engine = create_engine(url)
    with pytest.raises(DatabaseUnavailable):
        await store_records(engine, [request_record("r")])
    await engine.dispose()
