"""Requests whose gateway died: their rows, made of what their workers have recorded.

Every admitted request has a row, and its gateway publishes it at the end. A gateway that is killed takes along the
records of what it held and of its last milliseconds; the attempts remain, for workers run, or give up, whatever it had
queued. So an attempt that nobody will follow up, and whose request has no record in the ``ABANDONED_AFTER_MS`` of the
stream that come after it, leaves one. It is the stream's time that counts, in ms since 1970: after an outage of SQL all
the records are there, and merely not written yet. One that comes all the same (its gateway was only cut off from the
queue) takes that row's place.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, RowMapping, and_, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.db.engine import writing
from gateway.db.errors import SQL_ERRORS, DatabaseUnavailable, describe
from gateway.db.models import AttemptRow, RequestRow
from gateway.ledger.store import write_requests
from protocol.clock import unix_now_ms
from protocol.errors import ErrorCode
from protocol.usage import RequestRecord, UsageRecord

ABANDONED_AFTER_MS: Final = 30_000
LOOK_BACK_MS: Final = 900_000  # of a writer that starts: the last one may have died with attempts in mind
MAX_AWAITED: Final = 100_000  # requests; beyond it the oldest are looked for in SQL at once
CHUNK_REQUESTS: Final = 500
STATUS_UNKNOWN: Final = 0

log = logging.getLogger(__name__)


class AbandonedRequests:
    """Awaits the record of each request whose last attempt, by its outcome, was the last."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._awaited: dict[str, int] = {}  # request id → when the stream took its attempt; oldest first

    def note(self, records: Iterable[UsageRecord], stored_unix_ms: int) -> None:
        """Take notice of records that are in SQL now, which the stream had taken by then."""
        for record in records:
            if isinstance(record, RequestRecord):
                self._awaited.pop(record.request_id, None)
            elif _ends_its_request(record.outcome, record.error_code):
                self._awaited[record.request_id] = stored_unix_ms

    async def look_back(self) -> None:
        """Await the records that an earlier writer may have awaited. Raises DatabaseUnavailable."""
        now_unix_ms = unix_now_ms()
        since_unix_ms = now_unix_ms - LOOK_BACK_MS
        statement = select(AttemptRow.request_id).where(AttemptRow.started_unix_ms >= since_unix_ms, ~_has_row())
        try:
            async with self._engine.connect() as connection:
                for request_id in await connection.scalars(statement.limit(MAX_AWAITED)):
                    self._awaited[request_id] = now_unix_ms
        except SQL_ERRORS as error:
            raise DatabaseUnavailable(describe(error)) from error

    async def record_overdue(self, written_until_unix_ms: int) -> None:
        """Write the rows of those that have waited long enough, once all that the stream took by then is in SQL.

        Raises DatabaseUnavailable; then call again.
        """
        overdue = self._overdue(written_until_unix_ms - ABANDONED_AFTER_MS)
        try:
            for start in range(0, len(overdue), CHUNK_REQUESTS):
                request_ids = overdue[start : start + CHUNK_REQUESTS]
                async with writing(self._engine) as connection:
                    rows = await _abandoned_rows(connection, request_ids)
                    if rows:
                        await write_requests(connection, rows, replace_lost=False)
                        log.warning("%d requests of gateways that died are recorded by their attempts", len(rows))
                for request_id in request_ids:
                    del self._awaited[request_id]
        except SQL_ERRORS as error:
            raise DatabaseUnavailable(describe(error)) from error

    def _overdue(self, before_unix_ms: int) -> list[str]:
        surplus = len(self._awaited) - MAX_AWAITED
        overdue: list[str] = []
        for number, (request_id, since_unix_ms) in enumerate(self._awaited.items()):
            if since_unix_ms > before_unix_ms and number >= surplus:
                break
            overdue.append(request_id)
        return overdue


def _ends_its_request(outcome: str, error_code: str | None) -> bool:
    """Whether no attempt follows one that ended so. After most failures one does, and leaves a record in its turn."""
    return outcome != "failed" or error_code == ErrorCode.GATEWAY_LOST


def _has_row() -> ColumnElement[bool]:
    same = and_(
        RequestRow.request_id == AttemptRow.request_id, RequestRow.received_unix_ms == AttemptRow.received_unix_ms
    )
    return select(RequestRow.request_id).where(same).exists()


async def _abandoned_rows(connection: AsyncConnection, request_ids: Sequence[str]) -> list[dict[str, Any]]:
    statement = (
        select(AttemptRow)
        .where(AttemptRow.request_id.in_(request_ids), AttemptRow.gateway_id.is_not(None), ~_has_row())
        .order_by(AttemptRow.attempt, AttemptRow.started_unix_ms)
    )
    last = {attempt["request_id"]: attempt for attempt in (await connection.execute(statement)).mappings()}
    return [_row(a) for a in last.values() if _ends_its_request(a["outcome"], a["error_code"])]


def _row(attempt: RowMapping) -> dict[str, Any]:
    """A request's row, as far as its last attempt tells."""
    started_ms = max(0.0, attempt["started_unix_ms"] - attempt["received_unix_ms"])
    copied = (
        "request_id gateway_id received_unix_ms endpoint model key_id key_name stream outcome prompt_tokens"
        " cached_tokens pool provider region engine_queue_ms prefill_ms decode_ms preemptions"
        " team_id organisation_id tier"
    )
    return {name: attempt[name] for name in copied.split()} | {
        "http_status": STATUS_UNKNOWN,
        "error_code": ErrorCode.GATEWAY_LOST,
        "completion_tokens": attempt["resumed_tokens"] + attempt["completion_tokens"],
        "finish_reason": None,
        "attempts": attempt["attempt"],
        "queue_ms": started_ms,
        "ttft_ms": None,
        "total_ms": started_ms + attempt["total_ms"],
    }
