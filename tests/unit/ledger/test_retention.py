"""Old rows go in whole UTC days; figures stay."""

from sqlalchemy import func, select

from db.engine import create_engine
from db.tables import AttemptRow, RequestRow, RollupRow
from ledger.check import check_rollups
from ledger.retention import DAY_MS, Retention, kept_since_unix_ms
from ledger.store import store_records
from protocol.nats.clock import unix_now_ms
from tests.usage_records import attempt_record, request_record


async def test_what_is_older_goes_a_little_at_a_time_and_rollups_stay(database_url: str) -> None:
    engine = create_engine(database_url)
    now = unix_now_ms()
    oldest_kept = kept_since_unix_ms(2, now)
    for number in range(10):
        received = oldest_kept + (number - 5) * 1000  # half of them a moment too old
        started = received + 4000  # attempts stay or go with their requests
        record = request_record(f"r{number}", received_unix_ms=received)
        tried = attempt_record(f"r{number}", received_unix_ms=received, started_unix_ms=started)
        await store_records(engine, [record, tried])
    assert not await Retention(engine, None).delete_some()
    rounds = 1
    while await Retention(engine, 2, batch_rows=3, clock=lambda: now).delete_some():
        rounds += 1
    async with engine.connect() as connection:
        for table in (RequestRow, AttemptRow):
            kept = await connection.scalars(select(table.request_id).order_by(table.request_id))
            assert list(kept) == [f"r{number}" for number in range(5, 10)]
        assert await connection.scalar(select(func.sum(RollupRow.requests)).where(RollupRow.width_s == 900)) == 10
    assert rounds == 2
    assert [day.wrong for day in await check_rollups(engine, repair=True, since_unix_ms=oldest_kept)] == [0]
    assert oldest_kept % DAY_MS == 0
    assert oldest_kept <= now - 2 * DAY_MS < oldest_kept + DAY_MS
    await engine.dispose()
