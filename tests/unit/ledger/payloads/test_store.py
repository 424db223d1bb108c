"""Payloads in SQL: once each, gone when they expire or somebody asks; on both databases."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.audit import AuditFilter, list_changes
from db.engine import create_engine
from db.tables import PayloadRow
from ledger.payloads.end_user import MAX_CHARS, stored_end_user
from ledger.payloads.errors import UnknownPayload
from ledger.payloads.sealing import Sealer
from ledger.payloads.store import Erasure, delete_expired, erase, read_payload, store_payloads
from tests.payload_records import payload_record


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


async def kept(engine: AsyncEngine) -> list[str]:
    async with engine.connect() as connection:
        return list(await connection.scalars(select(PayloadRow.request_id).order_by(PayloadRow.request_id)))


async def test_a_payload_is_stored_once_and_read(engine: AsyncEngine) -> None:
    first = payload_record("a", request={"messages": []}, answer={"choices": [{"index": 0}]})
    await store_payloads(engine, [first, payload_record("b", dropped=True)])
    await store_payloads(engine, [payload_record("a", request={"messages": ["other"]})])
    payload = await read_payload(engine, "a", Sealer(), "cli:ann")
    assert (payload.request, payload.choices) == ({"messages": []}, [{"index": 0}])
    assert (await read_payload(engine, "b", Sealer(), "cli:ann")).request is None
    with pytest.raises(UnknownPayload):
        await read_payload(engine, "c", Sealer(), "cli:ann")
    told = [(entry.actor, entry.action, entry.subject_id) for entry in await list_changes(engine, AuditFilter(), 10)]
    assert sorted(told) == [("cli:ann", "payloads.read", "a"), ("cli:ann", "payloads.read", "b")]


async def test_what_has_expired_is_deleted_in_bounded_batches(engine: AsyncEngine) -> None:
    now_ms = time.time_ns() // 1_000_000
    old = [payload_record(f"old {n}", expires_unix_ms=now_ms - 1) for n in range(3)]
    await store_payloads(engine, [*old, payload_record("new", expires_unix_ms=now_ms + 60_000)])
    with pytest.raises(UnknownPayload):  # although it is still there
        await read_payload(engine, "old 1", Sealer(), "cli:ann")
    assert [await delete_expired(engine, batch_rows=2) for _ in range(3)] == [2, 1, 0]
    assert await kept(engine) == ["new"]


@pytest.mark.parametrize(
    ("erasure", "left", "subject"),
    [
        (Erasure(end_user="ann@example.com"), ["c", "d"], "end user"),
        (Erasure(key_id="key_a"), ["c"], "key_a"),
        (Erasure(request_id="b"), ["a", "c", "d"], "b"),
        (Erasure(end_user="nobody"), ["a", "b", "c", "d"], "end user"),
        (Erasure(end_user="x" * (MAX_CHARS + 1)), ["a", "b", "c"], "end user"),
    ],
)
async def test_erasure(engine: AsyncEngine, erasure: Erasure, left: list[str], subject: str) -> None:
    of_ann: dict[str, Any] = {"end_user": "ann@example.com"}
    await store_payloads(
        engine,
        [
            payload_record("a", **of_ann),
            payload_record("b", **of_ann),
            payload_record("c", key_id="key_b"),
            payload_record("d", end_user=stored_end_user("x" * (MAX_CHARS + 1))),
        ],
    )
    assert await erase(engine, erasure, "test", batch_rows=1) == 4 - len(left)
    assert await kept(engine) == left
    [change] = await list_changes(engine, AuditFilter(), 10)
    assert (change.action, change.subject_id, change.after) == ("payloads.delete", subject, {"deleted": 4 - len(left)})


def test_an_end_user_is_kept_as_given_unless_no_index_takes_it() -> None:
    assert stored_end_user(None) is None
    assert stored_end_user("Ann") == "Ann"
    for bad in ("x" * (MAX_CHARS + 1), "a\0b", "\ud800"):
        assert (stored_end_user(bad) or "").startswith("sha256:")
