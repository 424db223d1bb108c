"""A gateway dies without a word: its requests' rows are made of what their workers have recorded."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.db.engine import create_engine
from gateway.db.models import RequestRow
from gateway.ledger.abandoned import ABANDONED_AFTER_MS, AbandonedRequests
from gateway.ledger.store import store_records
from protocol.clock import unix_now_ms
from protocol.usage import AttemptRecord, UsageRecord
from tests.usage_records import attempt_record, request_record

ORIGIN = {
    "received_unix_ms": 1_800_000_000_000,
    "gateway_id": "gw-9",
    "endpoint": "completions",
    "key_id": "key_b",
    "key_name": "team b",
    "stream": False,
    "team_id": "team_b",
    "organisation_id": "org_b",
}


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


STORED_UNIX_MS = unix_now_ms()
OVERDUE_UNIX_MS = STORED_UNIX_MS + 2 * ABANDONED_AFTER_MS  # when a writer that starts now has waited, too


def tried(request_id: str, attempt: int = 1, **changes: Any) -> AttemptRecord:
    return attempt_record(request_id, attempt, **(ORIGIN | changes))


def given_up(request_id: str, attempt: int = 1, **changes: Any) -> AttemptRecord:
    return tried(request_id, attempt, outcome="failed", error_code="gateway_lost", **changes)


async def rows(engine: AsyncEngine) -> dict[str, dict[str, Any]]:
    async with engine.connect() as connection:
        found = (await connection.execute(select(RequestRow))).mappings()
        return {row["request_id"]: dict(row) for row in found}


async def stored(engine: AsyncEngine, *records: UsageRecord) -> AbandonedRequests:
    await store_records(engine, records)
    awaited = AbandonedRequests(engine)
    awaited.note(records, STORED_UNIX_MS)
    return awaited


async def test_the_last_attempt_tells_what_the_gateway_cannot(engine: AsyncEngine) -> None:
    lost = tried("r", 1, outcome="failed", error_code="worker_lost", completion_tokens=9)
    timings = {"engine_queue_ms": 1.5, "prefill_ms": 20.0, "decode_ms": 60.0, "preemptions": 1}
    last = given_up(
        "r", 2, resumed_tokens=7, completion_tokens=3, started_unix_ms=1_800_000_000_250, pool="spot", **timings
    )
    awaited = await stored(engine, lost, last)
    await awaited.record_overdue(OVERDUE_UNIX_MS)
    assert await rows(engine) == {
        "r": {
            **ORIGIN,
            "request_id": "r",
            "model": "demo",
            "outcome": "failed",
            "http_status": 0,
            "error_code": "gateway_lost",
            "finish_reason": None,
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "completion_tokens": 10,
            "attempts": 2,
            "queue_ms": 250.0,
            "ttft_ms": None,
            "total_ms": 345.0,
            "pool": "spot",
            "provider": "local",
            "region": "here",
            "tier": "spot",
            "charge_nano_usd": None,
            **timings,
        }
    }


async def test_answers_whose_records_were_still_in_the_gateways_memory(engine: AsyncEngine) -> None:
    awaited = await stored(engine, tried("answered"), tried("left", outcome="cancelled"))
    await awaited.record_overdue(OVERDUE_UNIX_MS)
    assert {name: row["outcome"] for name, row in (await rows(engine)).items()} == {
        "answered": "ok",
        "left": "cancelled",
    }


async def test_a_gateway_that_lives_has_the_say(engine: AsyncEngine) -> None:
    recorded = request_record("before", completion_tokens=5)
    awaited = await stored(engine, recorded, tried("before", completion_tokens=6), given_up("after"))
    await awaited.record_overdue(OVERDUE_UNIX_MS)
    late = request_record("after", completion_tokens=40)
    await store_records(engine, [late, late])
    found = await rows(engine)
    assert {name: (row["completion_tokens"], row["error_code"]) for name, row in found.items()} == {
        "before": (5, None),
        "after": (40, None),
    }


async def test_an_attempt_that_another_follows_is_not_the_end(engine: AsyncEngine) -> None:
    awaited = await stored(engine, tried("r", outcome="failed", error_code="worker_lost"))
    await awaited.look_back()
    await awaited.record_overdue(OVERDUE_UNIX_MS)
    assert await rows(engine) == {}


async def test_a_gateway_has_time_to_leave_its_record(engine: AsyncEngine) -> None:
    awaited = await stored(engine, given_up("r"))
    await awaited.record_overdue(STORED_UNIX_MS + ABANDONED_AFTER_MS - 1)
    assert await rows(engine) == {}
    await awaited.record_overdue(STORED_UNIX_MS + ABANDONED_AFTER_MS)
    assert set(await rows(engine)) == {"r"}


async def test_a_writer_takes_over_what_the_last_one_awaited(engine: AsyncEngine) -> None:
    await stored(engine, given_up("r"))
    heir = AbandonedRequests(engine)
    await heir.look_back()
    await heir.record_overdue(unix_now_ms() + ABANDONED_AFTER_MS)  # the heir's own clock, when it looked back
    assert set(await rows(engine)) == {"r"}


async def test_attempts_of_an_older_version_tell_too_little(engine: AsyncEngine) -> None:
    awaited = await stored(engine, attempt_record("r"))
    await awaited.record_overdue(OVERDUE_UNIX_MS)
    assert await rows(engine) == {}
