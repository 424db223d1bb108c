"""The writer inside the test's process: records that cannot be written, and SQL that goes away."""

import asyncio
import contextlib
import logging
import re
import sqlite3
from collections.abc import AsyncIterator
from typing import Any

import pytest

from db.engine import DatabaseUnavailable, create_engine
from ledger.abandoned import AbandonedRequests
from ledger.settings import LedgerSettings
from ledger.writer import LedgerWriter
from protocol import subjects
from protocol.job import encode
from protocol.nats.clock import unix_now_ms
from protocol.usage import UsageRecord, encode_usage
from tests.integration.ledger.conftest import Ledger
from tests.postgres import PostgresServer
from tests.usage_records import attempt_record, request_intent, request_record
from tests.waiting import until

ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # what the queue does is the same


class RunningWriter:
    def __init__(self, ledger: Ledger, database_url: str, **pace: Any) -> None:
        self.stopping = asyncio.Event()
        self._engine = create_engine(database_url, lock_limit_s=0.1)
        settings = LedgerSettings(nats_urls=(), database_url=database_url, batch_records=50, batch_wait_s=0.05, **pace)
        writer = LedgerWriter(ledger.bus, self._engine, settings, self.stopping)
        self.told_ready: list[bool] = []
        self.task = asyncio.create_task(writer.run(self.told_ready.append))

    async def die(self) -> None:
        """End without a word to the queue."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        await self._engine.dispose()

    async def stop(self) -> None:
        self.stopping.set()
        await self.task
        await self._engine.dispose()


@contextlib.asynccontextmanager
async def sql_away(database_url: str, request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """SQLite: another process holds the write lock. PostgreSQL: the server is stopped."""
    if database_url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(database_url.removeprefix("sqlite:///"))) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.rollback()
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    await asyncio.to_thread(server.stop)
    try:
        yield
    finally:
        await asyncio.to_thread(server.start)


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_nothing_is_lost_while_sql_is_away_and_one_line_says_so(
    ledger: Ledger, database_url: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    await ledger.apply_topology(ack_wait_s=0.5)  # the outage outlasts it: redeliveries come on top
    caplog.set_level(logging.INFO)
    writer = RunningWriter(ledger, database_url)
    await ledger.publish([request_record(f"before{number}") for number in range(75)])
    await until(lambda: ledger.has(75, 0))
    async with sql_away(database_url, request):
        await ledger.publish([request_record(f"during{number}") for number in range(300)])

        async def complains() -> bool:
            return any("cannot write usage" in message for message in errors(caplog))

        await until(complains)
    await ledger.publish([attempt_record("after")])
    await until(lambda: ledger.has(375, 1))

    async def all_acknowledged() -> bool:
        return await ledger.unfinished() == 0

    await until(all_acknowledged)
    await writer.stop()
    assert len(errors(caplog)) == 1
    assert "writing usage again after" in caplog.text
    assert writer.told_ready == [True, False, True]
    [target] = [text for text in caplog.messages if text.startswith("writing usage records to ")]
    assert target.endswith(database_url.partition(":")[2])


@ON_SQLITE
async def test_a_job_that_waited_too_long_while_another_wrote_is_no_outage(
    ledger: Ledger, database_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The search for abandoned requests waits for SQLite's lock, too. It once reported an outage that was over.
    await ledger.apply_topology(ack_wait_s=600)
    waits, is_over = asyncio.Event(), asyncio.Event()

    async def wait_too_long(_: AbandonedRequests) -> None:
        if waits.is_set():
            return
        waits.set()
        await is_over.wait()
        raise DatabaseUnavailable("database is locked")

    monkeypatch.setattr(AbandonedRequests, "check", wait_too_long)
    writer = RunningWriter(ledger, database_url, abandoned_period_s=0.05)
    await waits.wait()
    await ledger.publish([request_record("meanwhile")])

    async def is_acknowledged() -> bool:  # the row is in SQL a little earlier than the writer knows it
        return await ledger.has(1, 0) and await ledger.unfinished() == 0

    await until(is_acknowledged)
    is_over.set()
    await until(lambda: "cannot record requests of gateways" in caplog.text)
    await writer.stop()
    assert writer.told_ready == [True]


async def test_a_gateway_is_not_taken_for_dead_because_its_records_are_behind_others(
    ledger: Ledger, database_url: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    # After an outage an attempt was written in one batch and its request's record in a later one, and in between the
    # request counted as abandoned: it had a row of its gateway's death for a moment.
    abandoned_after_ms = 3000
    await ledger.apply_topology(ack_wait_s=600)
    async with sql_away(database_url, request):
        writer = RunningWriter(
            ledger,
            database_url,
            abandoned_after_ms=abandoned_after_ms,
            abandoned_period_s=0.05,
            hold_intents_s=0.0,
        )
        origin: dict[str, Any] = {"gateway_id": "g", "endpoint": "completions", "key_id": "k", "key_name": "n"}
        origin["stream"] = True
        await ledger.publish([attempt_record("r", **origin)])
        ends_unix_ms = unix_now_ms() + abandoned_after_ms
        await ledger.publish([request_record(f"other{number}") for number in range(200)])
        await ledger.publish([request_record("r")])
        await asyncio.sleep((ends_unix_ms - unix_now_ms()) / 1000)
    await until(lambda: ledger.has(201, 1))
    await writer.stop()
    assert not re.search(r"recorded \d+ requests of gateways", caplog.text)


async def test_an_intent_is_not_forgotten_by_a_writer_that_dies_with_it_in_mind(
    ledger: Ledger, database_url: str
) -> None:
    # An earlier writer kept what it awaited in memory, and its heir looked back by the time at which attempts began.
    await ledger.apply_topology(ack_wait_s=0.5)
    await ledger.publish([request_intent("r"), request_record("answered")])
    first = RunningWriter(ledger, database_url)

    async def only_the_intent_is_held() -> bool:
        return await ledger.has(1, 0) and await ledger.unfinished() == 1

    await until(only_the_intent_is_held)
    await first.die()
    second = RunningWriter(ledger, database_url, abandoned_after_ms=0, abandoned_period_s=0.05, hold_intents_s=0.0)

    async def all_are_settled() -> bool:
        return await ledger.has(2, 0) and await ledger.unfinished() == 0

    await until(all_are_settled)
    await second.stop()


async def test_a_writer_stopped_while_sql_is_away_hands_its_records_back(
    ledger: Ledger, database_url: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    await ledger.apply_topology(ack_wait_s=600)  # only a record handed back can come again in this test
    await ledger.publish([request_record(f"r{number}") for number in range(40)])
    async with sql_away(database_url, request):
        first = RunningWriter(ledger, database_url)

        async def complains() -> bool:
            return any("cannot write usage" in message for message in errors(caplog))

        await until(complains)
        await first.stop()
    second = RunningWriter(ledger, database_url)
    await until(lambda: ledger.has(40, 0))
    await second.stop()


POISON: list[UsageRecord | bytes] = [
    b"\xc1garbage",
    b"",
    request_record("refused", prompt_tokens=2**63),
    attempt_record("boast", completion_tokens=10**9),
    attempt_record("cache", cached_tokens=11),
    attempt_record("time", total_ms=float("nan")),
]


async def test_poison_records_are_parked_alone_and_their_sequences_are_logged(
    ledger: Ledger, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await ledger.apply_topology(ack_wait_s=600)
    among = [request_record(f"r{number}") for number in range(20)]
    await ledger.publish([part for pair in zip(among, POISON, strict=False) for part in pair])
    await ledger.publish([*among[len(POISON) :], attempt_record("r0")])
    writer = RunningWriter(ledger, database_url)
    await until(lambda: ledger.has(20, 1))

    async def all_settled() -> bool:
        return await ledger.unfinished() == 0

    await until(all_settled)
    await writer.stop()
    parked = [re.match(r"parked a usage record of message (\d+) ", message) for message in errors(caplog)]
    assert sorted(int(found[1]) for found in parked if found) == [2, 4, 6, 8, 10, 12]
    assert len(parked) == len(POISON)


async def test_a_refused_record_takes_none_of_its_message_with_it(
    ledger: Ledger, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await ledger.apply_topology(ack_wait_s=600)
    poison = request_record("poison", prompt_tokens=2**63)
    records = [request_record("a"), poison, request_record("b"), attempt_record("a")]
    await ledger.publish([request_record("before"), encode_usage([encode(record) for record in records])])
    writer = RunningWriter(ledger, database_url)
    await until(lambda: ledger.has(3, 1))

    async def all_settled() -> bool:
        return await ledger.unfinished() == 0

    await until(all_settled)
    await writer.stop()
    [message] = errors(caplog)
    assert message.startswith("parked a usage record of message 2 ")


async def test_no_more_than_two_batches_are_ever_taken(
    ledger: Ledger, database_url: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    await ledger.apply_topology(ack_wait_s=600)
    await ledger.publish([request_record(f"r{number}") for number in range(300)])
    async with sql_away(database_url, request):
        writer = RunningWriter(ledger, database_url)

        async def complains() -> bool:
            return any("cannot write usage" in message for message in errors(caplog))

        await until(complains)
        info = await ledger.bus.api("CONSUMER.INFO.USAGE.ledger")
        assert 0 < info["num_ack_pending"] <= 2 * 50
    await until(lambda: ledger.has(300, 0))
    await writer.stop()


@ON_SQLITE
async def test_a_consumer_made_anew_is_used_at_once(ledger: Ledger, database_url: str) -> None:
    await ledger.apply_topology()
    writer = RunningWriter(ledger, database_url)
    await ledger.publish([request_record("before")])
    await until(lambda: ledger.has(1, 0))
    await ledger.bus.api("CONSUMER.DELETE.USAGE.ledger")
    await ledger.publish([request_record("meanwhile")])
    await ledger.apply_topology()  # delivers the whole stream again
    await until(lambda: ledger.has(2, 0))
    await writer.stop()


@ON_SQLITE
async def test_what_is_written_leaves_the_stream_and_nothing_else_does(ledger: Ledger, database_url: str) -> None:
    await ledger.apply_topology()
    writer = RunningWriter(ledger, database_url, purge_period_s=0.0)
    await ledger.publish([request_record(f"r{number}") for number in range(100)])

    async def is_empty() -> bool:
        info = await ledger.bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}")
        return bool(info["state"]["messages"] == 0)

    await until(is_empty)
    assert await ledger.counts() == (100, 0)
    await writer.stop()
    await ledger.publish([request_record("later")])
    assert not await is_empty()
