"""Retention of requests and attempts, in whole UTC days. Rollups are kept, and with them the dashboards' figures.

On PostgreSQL whole partitions are dropped. Rows outside a partition of a single day, and all rows on SQLite, are
deleted one by one.
"""

from collections.abc import Callable
from typing import Final

from sqlalchemy import CursorResult, and_, delete, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import SQL_ERRORS, DatabaseUnavailable, describe, writing
from db.tables import AttemptRow, RequestRow
from ledger.partitions import drop_partitions
from protocol.nats.clock import unix_now_ms

DAY_MS: Final = 86_400_000
BATCH_ROWS: Final = 2_000  # per transaction, so that usage is written in between


def kept_since_unix_ms(days: int, now_unix_ms: int | None = None) -> int:
    """Return the start of the oldest of ``days`` whole UTC days, not counting today."""
    now_unix_ms = unix_now_ms() if now_unix_ms is None else now_unix_ms
    return (now_unix_ms // DAY_MS - days) * DAY_MS


class Retention:
    """Deletes rows older than the last ``days`` whole days, a few at a time."""

    def __init__(
        self,
        engine: AsyncEngine,
        days: int | None,
        *,
        batch_rows: int = BATCH_ROWS,
        clock: Callable[[], int] = unix_now_ms,
    ) -> None:
        """Keep ``days`` whole days; None: delete nothing."""
        self._engine = engine
        self._days = days
        self._batch_rows = batch_rows
        self._clock = clock

    async def delete_some(self) -> bool:
        """Delete at most ``batch_rows`` requests, and as many attempts. Return whether there are more.

        Raises DatabaseUnavailable.
        """
        if self._days is None:
            return False
        before_unix_ms = kept_since_unix_ms(self._days, self._clock())
        try:
            async with writing(self._engine) as connection:
                await drop_partitions(connection, before_unix_ms)
                attempts = await _delete_attempts(connection, before_unix_ms, self._batch_rows)
                requests = await _delete_requests(connection, before_unix_ms, self._batch_rows)
        except SQL_ERRORS as error:
            raise DatabaseUnavailable(describe(error)) from error
        return self._batch_rows in {attempts, requests}


async def _delete_requests(connection: AsyncConnection, before_unix_ms: int, rows: int) -> int:
    old = select(RequestRow.request_id).where(RequestRow.received_unix_ms < before_unix_ms).limit(rows)
    result: CursorResult[object] = await connection.execute(delete(RequestRow).where(RequestRow.request_id.in_(old)))
    return result.rowcount


async def _delete_attempts(connection: AsyncConnection, before_unix_ms: int, rows: int) -> int:
    """Delete attempts of requests past the retention."""
    key = (AttemptRow.request_id, AttemptRow.attempt, AttemptRow.worker_id)
    # The index is on the start of an attempt, which is at most hours after its request was received.
    is_old = and_(AttemptRow.started_unix_ms < before_unix_ms + DAY_MS, AttemptRow.received_unix_ms < before_unix_ms)
    old = select(*key).where(is_old).limit(rows)
    result: CursorResult[object] = await connection.execute(delete(AttemptRow).where(tuple_(*key).in_(old)))
    return result.rowcount
