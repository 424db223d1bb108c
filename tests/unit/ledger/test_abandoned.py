"""A gateway dies without a word: its requests' rows are made of their intents and of what their workers recorded."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.aio.msg import Msg
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import create_engine
from db.tables import OpenRequestRow, RequestRow
from ledger.abandoned import AbandonedRequests
from ledger.intents import Intents
from ledger.store import store_records
from protocol import subjects
from protocol.job import encode
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.usage import AttemptRecord, StillOpen, UsageRecord, decode_open_requests_query
from tests.usage_records import attempt_record, request_intent, request_record
from tests.waiting import HANGS_S

ABANDONED_AFTER_MS = 30_000
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


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="test")
    yield bus
    await bus.close()


def later_unix_ms() -> int:
    """Return when those missed now have been missed for long enough."""
    return unix_now_ms() + ABANDONED_AFTER_MS


def intent(request_id: str, **changes: Any) -> UsageRecord:
    return request_intent(request_id, **(ORIGIN | changes))


def tried(request_id: str, attempt: int = 1, **changes: Any) -> AttemptRecord:
    return attempt_record(request_id, attempt, **(ORIGIN | changes))


def given_up(request_id: str, attempt: int = 1, **changes: Any) -> AttemptRecord:
    return tried(request_id, attempt, outcome="failed", error_code="gateway_lost", **changes)


async def rows(engine: AsyncEngine) -> dict[str, dict[str, Any]]:
    async with engine.connect() as connection:
        found = (await connection.execute(select(RequestRow))).mappings()
        return {row["request_id"]: dict(row) for row in found}


async def open_requests(engine: AsyncEngine) -> int:
    async with engine.connect() as connection:
        return int((await connection.execute(select(func.count()).select_from(OpenRequestRow))).scalar_one())


async def write(engine: AsyncEngine, *records: UsageRecord) -> None:
    """As a writer does that has held the intents for long enough."""
    await store_records(engine, records)
    intents = Intents(engine, hold_s=3.0)
    intents.hold(records, None)
    await intents.write_due(flush=True)


async def look_and_record(bus: Bus, engine: AsyncEngine, **limits: Any) -> None:
    abandoned = AbandonedRequests(bus, engine, ABANDONED_AFTER_MS, **limits)
    await abandoned.check()
    await abandoned.record_overdue(later_unix_ms())


class LivingGateway:
    """Answers the ledger's question with what it is told to."""

    def __init__(self, bus: Bus, still_open: dict[str, int]) -> None:
        self._bus = bus
        self.still_open = still_open

    async def start(self) -> None:
        await self._bus.subscribe(subjects.open_requests_subject(str(ORIGIN["gateway_id"])), self._on_question)

    async def _on_question(self, message: Msg) -> None:
        asked = decode_open_requests_query(message.data).request_ids
        answer = StillOpen({name: tokens for name, tokens in self.still_open.items() if name in asked})
        await self._bus.publish(message.reply, encode(answer))


async def test_an_intent_tells_what_nobody_else_can(bus: Bus, engine: AsyncEngine) -> None:
    # The machine that held gateway and workers is gone: no attempt was recorded.
    await write(engine, intent("r", prompt_tokens=12, tags={"team": "search"}))
    await look_and_record(bus, engine)
    [row] = (await rows(engine)).values()
    told = {name: row[name] for name in ORIGIN}
    assert told == ORIGIN
    assert (row["outcome"], row["error_code"], row["http_status"]) == ("failed", "gateway_lost", 0)
    assert (row["prompt_tokens"], row["completion_tokens"], row["attempts"], row["pool"]) == (12, 0, 0, None)
    assert row["tags"] == '{"team":"search"}'
    assert await open_requests(engine) == 0


async def test_a_request_that_its_gateway_still_has_is_left_alone_and_its_tokens_are_noted(
    bus: Bus, engine: AsyncEngine
) -> None:
    gateway = LivingGateway(bus, {"hour-long": 7000})
    await gateway.start()
    await write(engine, intent("hour-long"), intent("forgotten"))
    abandoned = AbandonedRequests(bus, engine, ABANDONED_AFTER_MS)
    await abandoned.check()
    await abandoned.record_overdue(later_unix_ms())
    assert set(await rows(engine)) == {"forgotten"}
    gateway.still_open = {}  # it has been killed
    await abandoned.check()
    await abandoned.record_overdue(later_unix_ms())
    assert (await rows(engine))["hour-long"]["completion_tokens"] == 7000


async def test_a_gateway_that_cannot_be_asked_may_still_have_everything(bus: Bus, engine: AsyncEngine) -> None:
    async def is_frozen(_message: Msg) -> None:
        pass

    frozen = await bus.subscribe(subjects.open_requests_subject(str(ORIGIN["gateway_id"])), is_frozen)
    await write(engine, intent("r"))
    await look_and_record(bus, engine, answer_limit_s=0.05)
    assert await rows(engine) == {}
    await frozen.unsubscribe()
    await look_and_record(bus, engine)
    assert set(await rows(engine)) == {"r"}


async def test_what_has_a_record_is_forgotten(bus: Bus, engine: AsyncEngine) -> None:
    await write(engine, intent("r"))
    await write(engine, request_record("r", completion_tokens=5, **ORIGIN))
    await write(engine, intent("r"))  # delivered again
    assert await open_requests(engine) == 1
    await look_and_record(bus, engine)
    assert {name: row["completion_tokens"] for name, row in (await rows(engine)).items()} == {"r": 5}
    assert await open_requests(engine) == 0


async def test_the_last_attempt_tells_what_the_gateway_cannot(bus: Bus, engine: AsyncEngine) -> None:
    lost = tried("r", 1, outcome="failed", error_code="worker_lost", completion_tokens=9)
    timings = {"engine_queue_ms": 1.5, "prefill_ms": 20.0, "decode_ms": 60.0, "preemptions": 1}
    last = given_up(
        "r", 2, resumed_tokens=7, completion_tokens=3, started_unix_ms=1_800_000_000_250, pool="spot", **timings
    )
    await write(engine, lost, last)
    await look_and_record(bus, engine)
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
            "tags": None,
            "counted_by": "engine",
            **timings,
        }
    }


async def test_an_answer_that_a_dead_gateway_cut_has_failed(bus: Bus, engine: AsyncEngine) -> None:
    # Its worker ended it without knowing, so the tokens count; its caller never saw the end.
    await write(engine, tried("cut", completion_tokens=9), tried("left", outcome="cancelled"))
    await look_and_record(bus, engine)
    assert {name: (row["outcome"], row["completion_tokens"]) for name, row in (await rows(engine)).items()} == {
        "cut": ("failed", 9),
        "left": ("cancelled", 5),
    }


async def test_a_gateway_that_lives_has_the_say(bus: Bus, engine: AsyncEngine) -> None:
    recorded = request_record("before", completion_tokens=5)
    await write(engine, recorded, tried("before", completion_tokens=6), given_up("after"))
    await look_and_record(bus, engine)
    late = request_record("after", completion_tokens=40)
    await store_records(engine, [late, late])
    found = await rows(engine)
    assert {name: (row["completion_tokens"], row["error_code"]) for name, row in found.items()} == {
        "before": (5, None),
        "after": (40, None),
    }


async def test_what_its_gateway_has_recorded_meanwhile_is_not_said_to_be_of_a_dead_one(
    bus: Bus, engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await write(engine, intent("late"), intent("lost"))
    abandoned = AbandonedRequests(bus, engine, ABANDONED_AFTER_MS)
    await abandoned.check()
    await store_records(engine, [request_record("late", **ORIGIN)])
    await abandoned.record_overdue(later_unix_ms())
    found = await rows(engine)
    assert {name: row["error_code"] for name, row in found.items()} == {"late": None, "lost": "gateway_lost"}
    assert [text for text in caplog.messages if "died" in text] == ["recorded 1 requests of gateways that died"]


async def test_an_attempt_that_another_follows_is_not_the_end(bus: Bus, engine: AsyncEngine) -> None:
    await write(engine, tried("r", outcome="failed", error_code="worker_lost"))
    await look_and_record(bus, engine)
    assert await rows(engine) == {}


async def test_a_gateway_has_time_to_leave_its_record(bus: Bus, engine: AsyncEngine) -> None:
    await write(engine, given_up("r"))
    abandoned = AbandonedRequests(bus, engine, ABANDONED_AFTER_MS)
    before_unix_ms = unix_now_ms()
    await abandoned.check()
    await abandoned.check()  # nobody has it, again: its time goes on
    await abandoned.record_overdue(before_unix_ms + ABANDONED_AFTER_MS - 1)
    assert await rows(engine) == {}
    await abandoned.record_overdue(later_unix_ms())
    assert set(await rows(engine)) == {"r"}


async def test_attempts_of_an_older_version_tell_too_little(bus: Bus, engine: AsyncEngine) -> None:
    await write(engine, attempt_record("r"))
    await look_and_record(bus, engine)
    assert await rows(engine) == {}


async def test_it_goes_by_the_streams_clock_and_not_by_its_own(
    bus: Bus, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await topology.apply(bus, ["m"], topology.QueueBounds(), limit_s=HANGS_S)
    await bus.clock.measure()
    await write(engine, intent("r"))
    right_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() - 60_000_000_000)
    abandoned = AbandonedRequests(bus, engine, ABANDONED_AFTER_MS)
    await abandoned.check()
    await abandoned.record_overdue(int(bus.clock.now_s() * 1000))
    assert await rows(engine) == {}  # its worker may still tell what it made
