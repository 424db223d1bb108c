import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from math import ceil

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import DatabaseUnavailable, create_engine
from ledger.days import parse_zone
from ledger.report import usage_report
from ledger.store import store_records
from tests.usage_records import request_record


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


def utc_ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


async def test_numbers_are_those_computed_by_hand(engine: AsyncEngine) -> None:
    await store_records(
        engine,
        [
            request_record("1", ttft_ms=10.0, total_ms=50.0, completion_tokens=5, queue_ms=1.0),  # TPOT 40/4 = 10
            request_record("2", ttft_ms=20.0, total_ms=110.0, completion_tokens=4, queue_ms=3.0),  # TPOT 90/3 = 30
            request_record("3", ttft_ms=40.0, total_ms=80.0, completion_tokens=3, queue_ms=5.0),  # TPOT 40/2 = 20
            request_record("4", ttft_ms=30.0, total_ms=31.0, completion_tokens=1, queue_ms=7.0, attempts=3),  # no TPOT
            request_record("5", outcome="cancelled", ttft_ms=90.0, total_ms=900.0, queue_ms=None),
            request_record("6", outcome="failed", ttft_ms=None, queue_ms=None, completion_tokens=0, attempts=2),
        ],
    )
    [row] = await usage_report(engine)
    assert (row.requests, row.ok, row.cancelled, row.failed, row.retried) == (6, 4, 1, 1, 2)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (60, 24, 5 + 4 + 3 + 1 + 5)
    assert (row.ttft_p50_ms, row.ttft_p95_ms) == (30.0, 90.0)  # ranks 3 and 5 of 10, 20, 30, 40, 90
    assert row.tpot_p50_ms == 20.0  # rank 2 of 10, 20, 30
    assert (row.queue_p50_ms, row.queue_p95_ms) == (3.0, 7.0)  # ranks 2 and 4 of 1, 3, 5, 7
    assert (row.day, row.model, row.key_id, row.key_name) == (None, None, None, None)


async def test_what_engines_told_is_summed_and_what_they_did_not_is_left_out(engine: AsyncEngine) -> None:
    told = [request_record(str(ms), prefill_ms=ms, preemptions=2) for ms in (5.0, 7.0, 9.0)]
    await store_records(engine, [*told, request_record("of an older gateway")])
    [row] = await usage_report(engine)
    assert (row.prefill_p50_ms, row.prefill_p95_ms, row.preemptions) == (7.0, 9.0, 6)
    await store_records(engine, [request_record("other", model="other")])
    [other] = [row for row in await usage_report(engine, group_by=["model"]) if row.model == "other"]
    assert (other.prefill_p50_ms, other.preemptions) == (None, 0)


async def test_requests_whose_tokens_are_estimated_are_counted(engine: AsyncEngine) -> None:
    counted_by = ("engine", "provider", "estimate", "estimate")
    await store_records(engine, [request_record(str(n), counted_by=who) for n, who in enumerate(counted_by)])
    [row] = await usage_report(engine)
    assert (row.requests, row.estimated) == (4, 2)


async def test_no_requests_no_rows_and_percentiles_of_nothing_are_none(engine: AsyncEngine) -> None:
    assert await usage_report(engine, group_by=["model", "key", "day"]) == []
    assert await usage_report(engine) == []
    await store_records(engine, [request_record("1", ttft_ms=None, queue_ms=None, outcome="failed")])
    [row] = await usage_report(engine, group_by=["model"])
    assert (row.ttft_p50_ms, row.ttft_p95_ms, row.tpot_p50_ms, row.queue_p50_ms, row.queue_p95_ms) == (None,) * 5


async def test_groups_by_model_and_key(engine: AsyncEngine) -> None:
    def record(request_id: str, model: str, key: str, ttft_ms: float):
        return request_record(request_id, model=model, key_id=f"key_{key}", key_name=f"team {key}", ttft_ms=ttft_ms)

    await store_records(
        engine,
        [
            record("1", "m2", "a", 1.0),
            record("2", "m1", "b", 2.0),
            record("3", "m1", "a", 3.0),
            record("4", "m1", "a", 4.0),
        ],
    )
    by_both = await usage_report(engine, group_by=["key", "model"])
    assert [(row.model, row.key_id, row.key_name, row.requests, row.ttft_p95_ms) for row in by_both] == [
        ("m1", "key_a", "team a", 2, 4.0),
        ("m1", "key_b", "team b", 1, 2.0),
        ("m2", "key_a", "team a", 1, 1.0),
    ]
    by_key = await usage_report(engine, group_by=["key"])
    assert [(row.model, row.key_name, row.requests) for row in by_key] == [(None, "team a", 3), (None, "team b", 1)]


async def test_days_are_the_viewers(engine: AsyncEngine) -> None:
    moments = ("2026-01-10T18:29:59.999", "2026-01-10T18:30", "2026-01-11T18:29", "2026-01-11T23:00")
    await store_records(engine, [request_record(moment, received_unix_ms=utc_ms(moment)) for moment in moments])
    kolkata = await usage_report(engine, group_by=["day"], zone=parse_zone("Asia/Kolkata"))
    assert [(row.day, row.requests) for row in kolkata] == [
        ("2026-01-10", 1),
        ("2026-01-11", 2),
        ("2026-01-12", 1),
    ]
    utc = await usage_report(engine, group_by=["day"], zone=UTC)
    assert [(row.day, row.requests) for row in utc] == [("2026-01-10", 2), ("2026-01-11", 2)]


async def test_the_day_on_which_clocks_change_is_one_day(engine: AsyncEngine) -> None:
    # Berlin, 29 March 2026: from 23:00 UTC the evening before to 22:00 UTC.
    moments = ("2026-03-28T22:59", "2026-03-28T23:00", "2026-03-29T01:30", "2026-03-29T21:59", "2026-03-29T22:00")
    await store_records(engine, [request_record(moment, received_unix_ms=utc_ms(moment)) for moment in moments])
    rows = await usage_report(engine, group_by=["day", "model"], zone=parse_zone("Europe/Berlin"))
    assert [(row.day, row.requests) for row in rows] == [
        ("2026-03-28", 1),
        ("2026-03-29", 3),
        ("2026-03-30", 1),
    ]


async def test_since_is_included_and_until_is_not(engine: AsyncEngine) -> None:
    moments = (899_999, 900_000, 1_799_999, 1_800_000)
    await store_records(engine, [request_record(str(at), received_unix_ms=at) for at in moments])
    for since, until in ((900_000, 1_800_000), (1_000_000, 1_700_000)):  # widened to its quarter of an hour
        [row] = await usage_report(engine, since_unix_ms=since, until_unix_ms=until)
        assert row.requests == 2
    assert await usage_report(engine, since_unix_ms=2_700_000) == []


async def test_percentiles_are_exact_over_many_values(engine: AsyncEngine) -> None:
    source = random.Random(7)
    values = [source.uniform(1, 1000) for _ in range(317)]
    await store_records(engine, [request_record(str(n), ttft_ms=value) for n, value in enumerate(values)])
    [row] = await usage_report(engine, group_by=["model"])
    ordered = sorted(values)
    assert row.ttft_p50_ms == ordered[ceil(len(values) * 0.50) - 1]
    assert row.ttft_p95_ms == ordered[ceil(len(values) * 0.95) - 1]


async def test_a_database_without_tables_is_unavailable(tmp_path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/empty.db")
    with pytest.raises(DatabaseUnavailable, match=r"empty\.db: .*rollups"):
        await usage_report(engine)
    await engine.dispose()
