"""Rows for requests whose gateway died, built from their intents and their workers' records.

Every accepted request has a row, and its gateway publishes the record at the end. A gateway that is killed loses the
records of its open requests. Still known are the intent that it published before its first answer (``intents``), and
the attempts: workers still run or reject every job that it had queued. The ledger writer therefore asks gateways which
requests without a row they still hold. It writes a row for a request that no gateway has held for
``abandoned_after_ms`` and that has no record among those the stream had stored by then. Times are the stream's, in ms
since 1970: after an outage of SQL all records exist but are not written yet. A gateway that is connected but
does not answer may be frozen, so the writer waits for it. A record that arrives later (its gateway was merely cut off
from the queue) replaces the row.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import RowMapping, bindparam, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.apart import write_apart
from db.engine import SQL_ERRORS, DatabaseUnavailable, describe, writing
from db.set_aside import SetAside
from db.tables import AttemptRow, OpenRequestRow
from ledger.intents import delete_open, delete_recorded
from ledger.store import is_one_of, received_with, write_requests
from protocol import subjects
from protocol.errors import BusError, ErrorCode, NoResponders, ProtocolError
from protocol.job import encode
from protocol.nats.bus import Bus
from protocol.usage import MAX_ASKED, OpenRequestsQuery, decode_still_open

ANSWER_LIMIT_S: Final = 2.0
MAX_CHECKED: Final = 100_000  # requests, the oldest first
CHUNK_REQUESTS: Final = 500
STATUS_UNKNOWN: Final = 0

_Open = dict[str, int]  # request id → its completion tokens so far

log = logging.getLogger(__name__)


class AbandonedRequests:
    """Finds requests that no gateway holds."""

    def __init__(
        self, bus: Bus, engine: AsyncEngine, abandoned_after_ms: int, *, answer_limit_s: float = ANSWER_LIMIT_S
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._set_aside = SetAside(engine)
        self._abandoned_after_ms = abandoned_after_ms
        self._answer_limit_s = answer_limit_s
        self._missed: dict[str, int] = {}  # request id → since when no gateway has held it, in ms since 1970

    async def check(self) -> None:
        """Ask the gateways which requests they still hold. Raises DatabaseUnavailable; then call again."""
        await delete_recorded(self._engine)
        of_gateway = await self._open_by_gateway()
        missed: dict[str, int] = {}
        for gateway_id, known in of_gateway.items():
            still_open = await self._ask(gateway_id, sorted(known))
            if still_open is None:
                continue  # unknown: their time starts again
            await self._store_progress({name: n for name, n in still_open.items() if n > known.get(name, n)})
            now_unix_ms = int(self._bus.clock.now_s() * 1000)  # the stream's clock, like the times it is compared with
            missed |= {name: self._missed.get(name, now_unix_ms) for name in known if name not in still_open}
        self._missed = missed

    async def record_overdue(self, written_until_unix_ms: int) -> None:
        """Write rows for the requests missed for long enough, once all records the stream stored by then are in SQL.

        Raises DatabaseUnavailable; then call again.
        """
        since_unix_ms = written_until_unix_ms - self._abandoned_after_ms
        overdue = [name for name, ms in self._missed.items() if ms <= since_unix_ms]
        lost: dict[str, str] = {}
        for start in range(0, len(overdue), CHUNK_REQUESTS):
            await write_apart(overdue[start : start + CHUNK_REQUESTS], self._record, lost.__setitem__)
        for request_id, reason in lost.items():
            log.error("cannot record request %s of a gateway that died: %s", request_id, reason)
            self._set_aside.note("request", request_id, "", reason)
        await self._set_aside.flush()
        await write_apart(list(lost), self._forget, lost.__setitem__)

    async def _record(self, request_ids: Sequence[str]) -> None:
        async with writing(self._engine) as connection:
            rows = await _abandoned_rows(connection, request_ids)
            recorded = await write_requests(connection, rows, replace_lost=False)
            await delete_open(connection, request_ids)
        if recorded:  # the record of a request may have come since its gateway was asked
            log.warning("recorded %d requests of gateways that died", recorded)
        for request_id in request_ids:
            del self._missed[request_id]

    async def _forget(self, request_ids: Sequence[str]) -> None:
        async with writing(self._engine) as connection:
            await delete_open(connection, request_ids)
        for request_id in request_ids:
            del self._missed[request_id]

    async def _open_by_gateway(self) -> dict[str, _Open]:
        columns = (OpenRequestRow.gateway_id, OpenRequestRow.request_id, OpenRequestRow.completion_tokens)
        statement = select(*columns).order_by(OpenRequestRow.received_unix_ms).limit(MAX_CHECKED)
        of_gateway: dict[str, _Open] = defaultdict(dict)
        try:
            async with self._engine.connect() as connection:
                for gateway_id, request_id, completion_tokens in await connection.execute(statement):
                    of_gateway[gateway_id][request_id] = completion_tokens
        except SQL_ERRORS as error:
            raise DatabaseUnavailable(describe(error)) from error
        return of_gateway

    async def _ask(self, gateway_id: str, request_ids: Sequence[str]) -> _Open | None:
        """Return the requests that the gateway still holds; None if it does not answer."""
        subject = subjects.open_requests_subject(gateway_id)
        still_open: _Open = {}
        try:
            for start in range(0, len(request_ids), MAX_ASKED):
                question = OpenRequestsQuery(tuple(request_ids[start : start + MAX_ASKED]))
                reply = await self._bus.request(subject, encode(question), timeout_s=self._answer_limit_s)
                still_open |= decode_still_open(reply.data).completion_tokens
        except NoResponders:
            return {}
        except (BusError, ProtocolError) as error:
            log.warning("gateway %s did not report its open requests: %s", gateway_id, error)
            return None
        return still_open

    async def _store_progress(self, completion_tokens: _Open) -> None:
        if not completion_tokens:
            return
        statement = (
            update(OpenRequestRow)
            .where(OpenRequestRow.request_id == bindparam("of_request"))
            .values(completion_tokens=bindparam("tokens"))
        )
        try:
            async with writing(self._engine) as connection:
                given = [{"of_request": name, "tokens": tokens} for name, tokens in completion_tokens.items()]
                await connection.execute(statement, given)
        except SQL_ERRORS as error:
            raise DatabaseUnavailable(describe(error)) from error


async def _abandoned_rows(connection: AsyncConnection, request_ids: Sequence[str]) -> list[dict[str, Any]]:
    is_open = is_one_of(connection, OpenRequestRow.request_id, request_ids)
    intents = [dict(row) for row in (await connection.execute(select(OpenRequestRow).where(is_open))).mappings()]
    if not intents:
        return []
    is_theirs = is_one_of(connection, AttemptRow.request_id, request_ids)
    statement = (
        select(AttemptRow)
        .where(is_theirs, received_with(AttemptRow, intents))
        .order_by(AttemptRow.attempt, AttemptRow.started_unix_ms)
    )
    last = {attempt["request_id"]: attempt for attempt in (await connection.execute(statement)).mappings()}
    return [_row(intent, last.get(intent["request_id"])) for intent in intents]


def _row(intent: Mapping[str, Any], attempt: RowMapping | None) -> dict[str, Any]:
    """Build a request's row from its intent and its last attempt, as far as these are known."""
    from_attempt = _NO_ATTEMPT if attempt is None else _of_attempt(attempt, intent["received_unix_ms"])
    tokens = max(intent["completion_tokens"], from_attempt["completion_tokens"])
    return {
        **intent,
        **from_attempt,
        "completion_tokens": tokens,
        "http_status": STATUS_UNKNOWN,
        "error_code": ErrorCode.GATEWAY_LOST,
        "finish_reason": None,
        "ttft_ms": None,
    }


def _of_attempt(attempt: RowMapping, received_unix_ms: int) -> Mapping[str, Any]:
    counts, phases = "prompt_tokens cached_tokens counted_by", "engine_queue_ms prefill_ms decode_ms preemptions"
    copied = f"{counts} pool provider region tier {phases}"
    started_ms = max(0.0, attempt["started_unix_ms"] - received_unix_ms)
    return {name: attempt[name] for name in copied.split()} | {
        # A worker can finish an answer after its gateway has died. The client was disconnected.
        "outcome": "cancelled" if attempt["outcome"] == "cancelled" else "failed",
        "completion_tokens": (attempt["resumed_tokens"] or 0) + attempt["completion_tokens"],
        "attempts": attempt["attempt"],
        "queue_ms": started_ms,
        "total_ms": started_ms + attempt["total_ms"],
    }


_NO_ATTEMPT: Final[Mapping[str, Any]] = {
    "outcome": "failed",
    "cached_tokens": 0,
    "completion_tokens": 0,
    "attempts": 0,
    "queue_ms": None,
    "total_ms": 0.0,
    "pool": None,
    "provider": None,
    "region": None,
    "tier": None,
    "engine_queue_ms": None,
    "prefill_ms": None,
    "decode_ms": None,
    "preemptions": None,
    "counted_by": "engine",
}
