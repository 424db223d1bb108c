"""Items that broke the writer again after each restart: each is set aside, and all others are written."""

from typing import Any

import msgspec
import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.set_aside import SetAside
from db.tables import InstanceRow, SetAsideRow
from ledger import machine_time as machine_time_module
from ledger import store, writer
from ledger.machine_time import MachineTime
from protocol import subjects
from protocol.job import Heartbeat, encode
from protocol.nats.bus import HEADER_ROOM_BYTES
from protocol.nats.clock import unix_now_ms
from protocol.usage import MAX_MESSAGE_BYTES, MAX_RECORDS, encode_usage
from tests.integration.ledger.conftest import Ledger
from tests.integration.ledger.test_parked import those_parked
from tests.integration.ledger.test_writer_outages import RunningWriter
from tests.unit.protocol.test_poison import NESTED, NOT_UTF8, with_field
from tests.usage_records import attempt_record, request_record
from tests.waiting import until

STOLEN = subjects.attempt_usage_subject("local", "stolen.w.1")


async def noted_in(engine: AsyncEngine) -> list[tuple[str, str, str]]:
    """What was set aside: its kind, whose it was, and why."""
    columns = (SetAsideRow.kind, SetAsideRow.owner, SetAsideRow.reason)
    async with engine.connect() as connection:
        return [(row.kind, row.owner, row.reason) for row in await connection.execute(select(*columns))]


def implausible(**change: Any) -> bytes:
    return encode_usage([encode(attempt_record("x", pool="local", worker_id="stolen.w.1", **change))])


async def test_poisonous_records_are_parked_and_their_neighbours_written(ledger: Ledger, database_url: str) -> None:
    await ledger.apply_topology(ack_wait_s=600)
    poison = [
        NESTED,
        b"\x91" + with_field(NESTED),
        b"\x91" + with_field(NOT_UTF8),
        implausible(usd_per_hour=float("nan")),
        implausible(completion_tokens=2**40),
        encode_usage([encode(request_record("y", queue_ms=float("nan")))]),
        encode_usage([b"\xc0"] * (MAX_RECORDS + 1)),  # each would be a message in PARKED
        encode_usage([encode(attempt_record("x", completion_tokens=2**40))] * (MAX_RECORDS + 1)),
    ]
    await ledger.publish(poison, subject=STOLEN)
    await ledger.publish(request_record(f"good-{number}") for number in range(10))

    async def is_settled() -> bool:
        return await ledger.has(10, 0) and await ledger.unfinished() == 0

    for _ in range(2):  # after a restart, too
        running = RunningWriter(ledger, database_url)
        await until(is_settled)
        await running.stop()
    assert len(await those_parked(ledger)) == len(poison)
    noted = await noted_in(ledger.engine)
    assert [(kind, owner) for kind, owner, _ in noted] == [("usage record", "stolen.w.1")] * len(poison)
    assert all(reason for *_, reason in noted)


async def test_a_message_as_large_as_may_be_is_parked_in_part(
    ledger: Ledger, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    # With what stands beside it in PARKED it was too large for the queue server, and came again every 10 s for ever.
    await ledger.apply_topology(ack_wait_s=600)
    most_bytes = ledger.bus.client.max_payload
    await ledger.bus.publish(STOLEN, b"\xc1" * (most_bytes - HEADER_ROOM_BYTES))
    await ledger.publish([request_record("good")])
    running = RunningWriter(ledger, database_url)

    async def is_settled() -> bool:
        return await ledger.has(1, 0) and await ledger.unfinished() == 0

    await until(is_settled)
    await running.stop()
    [record] = await those_parked(ledger)
    assert len(record.message) == MAX_MESSAGE_BYTES
    assert record.reason.endswith(f"truncated to {MAX_MESSAGE_BYTES} of {most_bytes - HEADER_ROOM_BYTES} bytes")


async def test_a_record_that_brings_out_a_defect_of_ours_is_parked_alone(
    ledger: Ledger, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.apply_topology(ack_wait_s=600)
    write_requests = store.write_requests

    async def broken(connection: Any, rows: Any, **rest: Any) -> None:
        if any(row["request_id"] == "strange" for row in rows):
            raise KeyError("nobody expected this")
        await write_requests(connection, rows, **rest)

    monkeypatch.setattr(store, "write_requests", broken)
    await ledger.publish(request_record(name) for name in ("a", "strange", "b", "c"))
    running = RunningWriter(ledger, database_url)

    async def is_settled() -> bool:
        return await ledger.has(3, 0) and await ledger.unfinished() == 0

    await until(is_settled)
    await running.stop()
    [record] = await those_parked(ledger)
    assert "nobody expected this" in record.reason
    assert await noted_in(ledger.engine) == [("usage record", "", record.reason)]


async def test_no_periodic_job_stops_the_others(
    ledger: Ledger, database_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await ledger.apply_topology(ack_wait_s=600)

    async def broken(*_: Any) -> None:
        raise ZeroDivisionError

    for name in ("_create_partitions", "_purge_written", "_record_machine_time", "_delete_old"):
        monkeypatch.setattr(writer.LedgerWriter, name, broken)
    monkeypatch.setattr("ledger.abandoned.AbandonedRequests.check", broken)
    monkeypatch.setattr("ledger.parked.Replays.replay_due", broken)
    running = RunningWriter(ledger, database_url, abandoned_period_s=0.05)
    await until(lambda: "recording requests of gateways that died failed" in caplog.text)
    await ledger.publish([request_record("a")])
    await until(lambda: ledger.has(1, 0))
    await running.stop()


@pytest.mark.parametrize(
    "change",
    [{"usd_per_hour": float("nan")}, {"usd_per_hour": 1e12}, {"sent_unix_ms": 2**52}, {"busy_ms": -(2**62)}, None],
)
async def test_a_poisonous_heartbeat_costs_no_other_worker_its_time(
    ledger: Ledger, change: dict[str, Any] | None
) -> None:
    await ledger.apply_topology()
    notes = SetAside(ledger.engine)
    machine_time = MachineTime(ledger.bus, ledger.engine, notes)
    await machine_time.start()
    now_ms = unix_now_ms()
    fields: dict[str, Any] = {"v": 1, "worker_id": "good", "pool": "spot", "provider": "p", "region": "r"}
    fields |= {"tier": "spot", "engine": "e", "models": ["m"], "usd_per_hour": 0.5, "running": 0}
    fields |= {"max_sequences": 1, "max_kv_tokens": 1, "free_sequences": 1, "free_kv_tokens": 1}
    fields |= {"started_unix_ms": now_ms - 1000, "sent_unix_ms": now_ms, "busy_ms": 10}
    bad = {**fields, "worker_id": "bad", **(change or {})}
    heartbeat = subjects.HEARTBEATS.removesuffix(">")
    payload = with_field(NESTED) if change is None else msgspec.msgpack.encode(bad)
    await ledger.bus.publish(f"{heartbeat}bad", payload)
    await ledger.bus.publish(f"{heartbeat}good", msgspec.msgpack.encode(fields))

    async def has_rows() -> bool:
        await machine_time.flush()
        async with ledger.engine.connect() as connection:
            found = set(await connection.scalars(select(InstanceRow.worker_id)))
        assert found <= {"good"}
        return found == {"good"}

    await until(has_rows)
    await notes.flush()
    assert [noted[:2] for noted in await noted_in(ledger.engine)] == [("machine time", "bad")]


async def test_a_heartbeat_that_cannot_be_written_is_lost_alone(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def rows(beat: Heartbeat, *rest: Any) -> Any:
        if beat.worker_id == "bad":
            raise ArithmeticError("nobody expected this")
        return real(beat, *rest)

    real = machine_time_module._rows
    monkeypatch.setattr("ledger.machine_time._rows", rows)
    notes = SetAside(ledger.engine)
    machine_time = MachineTime(ledger.bus, ledger.engine, notes)
    now_ms = unix_now_ms()
    for name in ("a", "bad", "b"):
        values = (1, name, "p", "x", "eu", "spot", "e", ("m",), 0.5, 4, 400, 4, 400, 0, now_ms - 1000, now_ms)
        machine_time.receive(Heartbeat(*values))
    await machine_time.flush()
    async with ledger.engine.connect() as connection:
        assert set(await connection.scalars(select(InstanceRow.worker_id))) == {"a", "b"}
    assert "cannot store the machine time of bad: ArithmeticError: nobody expected this" in caplog.text
    await notes.flush()
    assert await noted_in(ledger.engine) == [("machine time", "bad", "ArithmeticError: nobody expected this")]
