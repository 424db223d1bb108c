"""Requests that have been admitted and whose records have not arrived: the table ``open_requests``.

    intent ──> held for a while ──its request has a row─────────────> acknowledged
                   └──it has none──> open_requests, acknowledged ──its request has a row──> deleted
                                          └──no gateway has it──> a row (ledger.abandoned)

Most requests end before their intent is written, and then cost SQL one lookup. An intent is acknowledged only once one
of the two tables holds its request: if this writer dies, the stream redelivers the intent. Until then it holds the
consumer's ack floor back. If a gateway waits for that floor (``gateway.limits.seeds``), it is written immediately.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct
from sqlalchemy import and_, delete, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.apart import write_apart
from db.engine import SQL_ERRORS, DatabaseUnavailable, describe, writing
from db.set_aside import SetAside
from db.tables import OpenRequestRow, RequestRow
from ledger.store import insert_rows, is_one_of, known_requests
from protocol.errors import ErrorCode
from protocol.nats.pull import Delivery
from protocol.usage import AttemptRecord, RequestIntent, UsageRecord, tags_text

MAX_HELD: Final = 100_000  # intents; beyond it the oldest are looked up immediately
CHUNK_REQUESTS: Final = 1000

_FIELDS: Final = tuple(column.name for column in OpenRequestRow.__table__.columns)
_NEEDED: Final = tuple(column.name for column in OpenRequestRow.__table__.columns if not column.nullable)

log = logging.getLogger(__name__)


class _Held(Struct):
    rows: list[dict[str, Any]]
    due_s: float  # monotonic clock
    delivery: Delivery | None  # the message they arrived in; None: already acknowledged


class Intents:
    """Holds intents until they must be written, or their requests have rows."""

    def __init__(self, engine: AsyncEngine, hold_s: float) -> None:
        self._engine = engine
        self._set_aside = SetAside(engine)
        self._hold_s = hold_s
        self._held: deque[_Held] = deque()  # oldest first
        self._held_rows = 0
        self._wanted_sequence = 0  # intents of messages up to this one are not held
        self._wanted = 0  # number of the oldest intents in ``_held`` to write immediately

    def want(self, sequence: int) -> None:
        """Write all intents of messages up to this one immediately, both held ones and those that still arrive."""
        self._wanted_sequence = max(self._wanted_sequence, sequence)
        self._wanted = len(self._held)

    def hold(self, records: Iterable[UsageRecord], delivery: Delivery | None) -> None:
        """Hold the intents among the records; ``write_due`` returns ``delivery`` once they are stored.

        An attempt that ended its request also counts as an intent: its gateway's release may not publish intents yet.
        """
        rows = [row for record in records if (row := _row(record)) is not None]
        if rows:
            self._held.append(_Held(rows, time.monotonic() + self._hold_s, delivery))
            self._held_rows += len(rows)
            if delivery is not None and delivery.stream_sequence <= self._wanted_sequence:
                self._wanted = len(self._held)

    async def write_due(self, *, flush: bool = False) -> list[Delivery] | None:
        """Write intents that are due or requested, or all with ``flush``; return the deliveries to acknowledge.

        Writes at most one chunk: call again until it is None. Raises DatabaseUnavailable; then call again.
        """
        due: list[_Held] = []
        rows: dict[str, dict[str, Any]] = {}
        is_flushed = flush or self._held_rows > MAX_HELD
        for number, held in enumerate(self._held):
            is_due = is_flushed or number < self._wanted or held.due_s <= time.monotonic()
            if not is_due or len(rows) >= CHUNK_REQUESTS:
                break
            due.append(held)
            rows |= {row["request_id"]: row for row in held.rows}
        await write_apart(list(rows.values()), self._write, self._lose)
        await self._set_aside.flush()
        for held in due:
            self._held.popleft()
            self._held_rows -= len(held.rows)
        self._wanted = max(0, self._wanted - len(due))
        return [held.delivery for held in due if held.delivery is not None] if due else None

    def _lose(self, row: dict[str, Any], reason: str) -> None:
        log.error("cannot store the intent of request %s: %s", row["request_id"], reason)
        self._set_aside.note("intent", row["request_id"], row["key_id"], reason)

    def release_all(self) -> list[Delivery]:
        """Drop all held intents and return their deliveries: the writer is stopping."""
        deliveries = [held.delivery for held in self._held if held.delivery is not None]
        self._held.clear()
        self._held_rows = self._wanted = 0
        return deliveries

    async def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        async with writing(self._engine) as connection:
            await _insert_missing(connection, {row["request_id"]: row for row in rows})


async def _insert_missing(connection: AsyncConnection, rows: dict[str, dict[str, Any]]) -> None:
    stored = select(OpenRequestRow.request_id).where(is_one_of(connection, OpenRequestRow.request_id, rows))
    known = {*(await connection.scalars(stored)), *await known_requests(connection, rows)}
    await insert_rows(connection, OpenRequestRow, [row for name, row in rows.items() if name not in known])


async def delete_recorded(engine: AsyncEngine) -> None:
    """Delete the intents of requests that have a row by now. Raises DatabaseUnavailable."""
    has_row = (
        select(RequestRow.request_id)
        .where(
            and_(
                RequestRow.request_id == OpenRequestRow.request_id,
                RequestRow.received_unix_ms == OpenRequestRow.received_unix_ms,
            )
        )
        .exists()
    )
    try:
        async with writing(engine) as connection:
            await connection.execute(delete(OpenRequestRow).where(has_row))
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(describe(error)) from error


async def delete_open(connection: AsyncConnection, request_ids: Sequence[str]) -> None:
    """Delete these intents. Call inside ``writing``. Raises SQL errors."""
    await connection.execute(
        delete(OpenRequestRow).where(is_one_of(connection, OpenRequestRow.request_id, request_ids))
    )


def ends_its_request(outcome: str, error_code: str | None) -> bool:
    """Return whether an attempt with this outcome is the last. Most failures are followed by another attempt."""
    return outcome != "failed" or error_code == ErrorCode.GATEWAY_LOST


def _row(record: UsageRecord) -> dict[str, Any] | None:
    if isinstance(record, RequestIntent):
        return {**_fields(record), "completion_tokens": 0, "tags": tags_text(record.tags)}
    if not isinstance(record, AttemptRecord) or not ends_its_request(record.outcome, record.error_code):
        return None
    row = {**_fields(record), "tags": None}  # known only to its gateway
    return (
        row if all(row[name] is not None for name in _NEEDED) else None
    )  # otherwise its version lacks some of these fields


def _fields(record: UsageRecord) -> dict[str, Any]:
    values = msgspec.structs.asdict(record)
    return {name: values[name] for name in _FIELDS if name in values}
