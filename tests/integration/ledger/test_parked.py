"""Records that a writer cannot take: parked alone, put back by a build that understands them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from ledger import parked, writer
from ledger.parked import parked_records, replay
from protocol import subjects
from protocol.job import PROTOCOL_VERSION, encode
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.usage import ParkedUsage, UnreadUsage, UsageRecord, encode_usage, read_usage
from spillway.cli import app
from tests.integration.ledger.conftest import Ledger
from tests.integration.ledger.test_writer_outages import RunningWriter
from tests.usage_records import attempt_record, request_record
from tests.waiting import until


def newer_record(request_id: str) -> bytes:
    """Of the next release: fields that are not known here, of a meaning that is not."""
    fields = msgspec.to_builtins(request_record(request_id)) | {"v": PROTOCOL_VERSION + 1, "later": {"a": [1]}}
    return msgspec.msgpack.encode(fields | {"completion_tokens": {"text": 3, "audio": 4}})


def of_newer_kind(request_id: str) -> bytes:
    return msgspec.msgpack.encode({"type": "later", "v": PROTOCOL_VERSION, "request_id": request_id})


async def those_parked(ledger: Ledger) -> list[ParkedUsage]:
    return [record async for _, record in parked_records(ledger.bus)]


@pytest.mark.parametrize("newer", [newer_record, of_newer_kind])
async def test_what_a_newer_release_writes_is_parked_and_its_neighbours_are_written(
    ledger: Ledger, database_url: str, newer: Callable[[str], bytes]
) -> None:
    await ledger.apply_topology(ack_wait_s=600)
    neighbours: list[UsageRecord] = [request_record("a"), request_record("c"), attempt_record("c")]
    before, *after = map(encode, neighbours)
    await ledger.publish([encode_usage([before, newer("b"), *after])])
    running = RunningWriter(ledger, database_url)

    async def is_settled() -> bool:
        return await ledger.unfinished() == 0

    await until(lambda: ledger.has(2, 1))
    await until(is_settled)
    await running.stop()
    [record] = await those_parked(ledger)
    assert record.message == encode_usage([newer("b")])
    assert not record.is_refused


async def test_a_writer_that_understands_takes_what_an_older_one_has_parked(
    ledger: Ledger, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one is played by a decoder that knows less."""
    await ledger.apply_topology(ack_wait_s=600)
    records = [encode(request_record(f"r{number}")) for number in range(5)]
    real = read_usage

    def reads_less(payload: bytes) -> tuple[list[UsageRecord], list[UnreadUsage]]:
        known, unread = real(payload)
        newer = [record for record in known if getattr(record, "request_id", "") != "r0"]
        return (
            [record for record in known if record not in newer],
            [*unread, *(UnreadUsage(encode_usage([encode(record)]), "newer") for record in newer)],
        )

    with monkeypatch.context() as patched:
        for module in (writer, parked):  # the older one puts nothing back, either
            patched.setattr(module, "read_usage", reads_less)
        await ledger.publish([encode_usage(records[:1]), encode_usage(records[1:])])
        older = RunningWriter(ledger, database_url)
        await until(lambda: ledger.has(1, 0))

        async def has_parked() -> bool:
            return len(await those_parked(ledger)) == 4

        await until(has_parked)
        await older.stop()
    newer = RunningWriter(ledger, database_url)
    await until(lambda: ledger.has(5, 0))

    async def is_empty() -> bool:
        return await those_parked(ledger) == []

    await until(is_empty)
    await newer.stop()


async def test_what_the_database_refuses_waits_for_a_person(ledger: Ledger, database_url: str) -> None:
    await ledger.apply_topology(ack_wait_s=600)
    await ledger.publish([request_record("poison", prompt_tokens=2**40), request_record("good")])

    async def is_parked() -> bool:
        return [record.is_refused for record in await those_parked(ledger)] == [True]

    for _ in range(2):  # the second one leaves it where it is
        running = RunningWriter(ledger, database_url)
        await until(lambda: ledger.has(1, 0))
        await until(is_parked)
        await running.stop()
    [(sequence, record)] = [found async for found in parked_records(ledger.bus)]
    await replay(ledger.bus, sequence, record)
    assert await those_parked(ledger) == []
    running = RunningWriter(ledger, database_url)
    await until(is_parked)  # still refused
    await running.stop()


async def test_without_a_place_to_park_the_message_stays_and_its_neighbours_are_written(
    ledger: Ledger, database_url: str
) -> None:
    """Gateways make the stream, and may be older than the ledger writer."""
    await ledger.apply_topology(ack_wait_s=600)
    await ledger.bus.api(f"STREAM.DELETE.{subjects.PARKED_STREAM}")
    await ledger.publish([encode_usage([encode(request_record("a")), newer_record("b")])])
    running = RunningWriter(ledger, database_url, retry_parking_s=0.1)
    await until(lambda: ledger.has(1, 0))
    assert await ledger.unfinished() == 1
    await ledger.apply_topology(ack_wait_s=600)

    async def is_parked() -> bool:
        return len(await those_parked(ledger)) == 1 and await ledger.unfinished() == 0

    await until(is_parked)
    await running.stop()
    assert await ledger.counts() == (1, 0)


async def test_a_worker_records_its_own_attempts_and_nothing_else(ledger: Ledger, database_url: str) -> None:
    """Also by a detour: what it has parked comes back on its own subject."""
    await ledger.apply_topology(ack_wait_s=600)
    own: dict[str, Any] = {"pool": "demo", "worker_id": "demo.box.w1"}
    subject = subjects.attempt_usage_subject("demo", "demo.box.w1")
    forged: list[UsageRecord] = [
        request_record("a"),
        attempt_record("b", **{**own, "worker_id": "w1"}),
        attempt_record("c", **{**own, "pool": "other"}),
    ]
    await ledger.publish([*forged, attempt_record("d", **own), newer_record("e")], subject=subject)
    running = RunningWriter(ledger, database_url)
    await until(lambda: ledger.has(0, 1))

    async def is_settled() -> bool:
        return await ledger.unfinished() == 0

    await until(is_settled)
    await running.stop()
    assert await ledger.counts() == (0, 1)
    [record] = await those_parked(ledger)
    assert record.subject == subject


def test_the_command_lists_and_replays_them(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def park_two() -> None:
        bus = await Bus.connect(nats_url, name="test")
        await topology.apply(bus, [], topology.QueueBounds())
        for message in (encode_usage([newer_record("a")]), b"?"):
            record = ParkedUsage(PROTOCOL_VERSION, message, "[why]", 2000, False, subjects.REQUEST_USAGE_SUBJECT)
            await bus.publish_durable(subjects.PARKED_USAGE_SUBJECT, encode(record), message_id=message.hex())
        await bus.close()

    asyncio.run(park_two())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPILLWAY_NATS__URLS", f'["{nats_url}"]')
    listed = CliRunner().invoke(app, ["parked"])
    assert listed.exit_code == 0, listed.output
    for shown in ("1970-01-01 00:00:02", "request a of ", "1 bytes", "[why]", "2 records parked\n"):
        assert shown in listed.output
    facts = json.loads(CliRunner().invoke(app, ["parked", "--json"]).output)
    assert [(one["reason"], one["parked_unix_ms"], one["replayed"]) for one in facts] == [("[why]", 2000, False)] * 2
    again = CliRunner().invoke(app, ["parked", "--replay", "-n", "1"])
    assert "1 records parked, sent to the ledger writers again" in again.output
    assert "1 records parked\n" in CliRunner().invoke(app, ["parked"]).output
