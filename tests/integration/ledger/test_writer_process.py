"""The writer as a process: killed, ended, started too early; NATS restarted under it."""

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text

from db.tables import AttemptRow, RequestRow
from ledger.settings import LedgerSettings
from protocol.usage import UsageRecord
from tests.forks import Process
from tests.integration.ledger.conftest import Ledger
from tests.integration.ledger.writer_process import start_writer_process
from tests.nats_server import NatsServer
from tests.postgres import TEMPLATE, PostgresServer
from tests.usage_records import attempt_record, request_record
from tests.waiting import until

REQUESTS = 1000


def mixed_records(source: random.Random) -> list[UsageRecord]:
    """1 000 requests and 1 000 attempts in any order, every tenth record twice."""
    records: list[UsageRecord] = []
    for number in range(REQUESTS):
        outcome = source.choice(["ok", "cancelled", "failed"])
        tokens = {"prompt_tokens": source.randrange(1, 9999), "completion_tokens": source.randrange(999)}
        records.append(request_record(f"r{number}", outcome=outcome, **tokens))
        records.append(attempt_record(f"r{number // 2}", 1 + number % 2, outcome=outcome, **tokens))
    records += records[::10]
    source.shuffle(records)
    return records


async def test_a_killed_writer_and_a_restarted_nats_lose_and_double_nothing(
    ledger: Ledger, start_writer: Callable[[], Process], nats_server: NatsServer
) -> None:
    records = mixed_records(random.Random(1))
    await ledger.apply_topology()
    first = start_writer()
    publishing = asyncio.create_task(ledger.publish(records))
    await until(lambda: ledger.has_at_least(300))
    first.kill()  # SIGKILL, with records held, since they keep coming
    start_writer()
    await until(lambda: ledger.has_at_least(1000))
    nats_server.kill()
    nats_server.start()
    await publishing
    await until(lambda: ledger.has(REQUESTS, REQUESTS))

    for table, kind in ((RequestRow, "RequestRecord"), (AttemptRow, "AttemptRecord")):
        unique: set[Any] = {encoded for encoded in records if type(encoded).__name__ == kind}
        async with ledger.engine.connect() as connection:
            sums = (
                await connection.execute(
                    select(func.count(), func.sum(table.prompt_tokens), func.sum(table.completion_tokens))
                )
            ).one()
        expected = (len(unique), sum(r.prompt_tokens for r in unique), sum(r.completion_tokens for r in unique))
        assert tuple(int(value) for value in sums) == expected

    async def all_acknowledged() -> bool:
        return await ledger.unfinished() == 0

    await until(all_acknowledged)


async def test_sigterm_finishes_what_is_held_and_the_next_writer_goes_on(
    ledger: Ledger, start_writer: Callable[[], Process]
) -> None:
    await ledger.apply_topology()
    await ledger.publish([request_record(f"r{number}") for number in range(300)])
    writer = start_writer()

    async def ready() -> bool:
        return writer.said("ready") == 1

    await until(ready)
    writer.terminate()
    assert writer.wait() == 0
    start_writer()
    await until(lambda: ledger.has(300, 0))


async def test_two_writers_share_the_stream(ledger: Ledger, start_writer: Callable[[], Process]) -> None:
    await ledger.apply_topology()
    start_writer()
    start_writer()
    await ledger.publish([attempt_record(f"r{number // 2}") for number in range(600)])
    await until(lambda: ledger.has(0, 300))


async def test_a_writer_started_before_everything_waits_and_says_so_once(
    ledger: Ledger, start_writer: Callable[[], Process]
) -> None:
    writer = start_writer()

    async def waits() -> bool:
        return writer.said("waiting for the consumer") > 0

    await until(waits)
    assert writer.said("ready") == 0
    await ledger.apply_topology()
    await ledger.publish([request_record("r")])
    await until(lambda: ledger.has(1, 0))
    assert writer.said("ready") == 1
    assert writer.said("waiting for the consumer") == 1


async def test_a_missing_database_is_waited_for(
    ledger: Ledger, settings: LedgerSettings, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    await ledger.apply_topology()
    if settings.database_url.startswith("sqlite"):
        file = Path(settings.database_url.removeprefix("sqlite:///"))
        later_url = f"sqlite:///{tmp_path}/later/spillway.db"
    else:
        server: PostgresServer = request.getfixturevalue("postgres_server")
        later_url = server.url("later")
    writer = start_writer_process(settings.model_copy(update={"database_url": later_url}), tmp_path / "writer.log")

    async def waits() -> bool:
        return writer.said("waiting for the database") == 1

    async def ready() -> bool:
        return writer.said("ready") == 1

    try:
        await until(waits)
        if settings.database_url.startswith("sqlite"):
            (tmp_path / "made").mkdir()
            shutil.copy(file, tmp_path / "made")
            (tmp_path / "made").rename(tmp_path / "later")
        else:
            await asyncio.to_thread(server.execute, f"CREATE DATABASE later TEMPLATE {TEMPLATE}")
        await until(ready)
    finally:
        writer.kill()
        if not settings.database_url.startswith("sqlite"):
            await asyncio.to_thread(server.execute, "DROP DATABASE IF EXISTS later WITH (FORCE)")


async def test_a_foreign_schema_ends_the_writer_with_a_clear_error(
    ledger: Ledger, start_writer: Callable[[], Process]
) -> None:
    async with ledger.engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    writer = start_writer()
    assert writer.wait() != 0
    assert writer.said("database schema is 0001") == 1
    assert writer.said("spillway db upgrade") == 1
