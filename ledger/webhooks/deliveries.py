"""Deliveries in SQL: event, endpoint, due time and outcome.

    event ──add──> waiting, due now ──claim──> waiting, due when the claim ends ──settle──> delivered
                          └──────────────────── due after a wait <──failed───────┤
                                                                                 └──> failed: given up, or disabled

A claim moves the due time past the longest attempt, and counts the attempt: the claiming process sends, others
do not, and the claim of a killed process expires. So each event is delivered at least once. The event's
id, which the receiver gets with every attempt, identifies repeats.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args

from sqlalchemy import ColumnElement, RowMapping, Select, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.accounts.audit import Change, record
from db.engine import changing
from db.tables import Base, WebhookDeliveryRow, WebhookEndpointRow, WebhookTotalRow
from ledger.webhooks.events import Event
from protocol.nats.clock import unix_now_ms

SYSTEM: Final = "system"  # actor of Spillway's own changes
WAITING: Final = "waiting"
DELIVERED: Final = "delivered"
FAILED: Final = "failed"
# Outcomes of the totals: attempts that delivered or failed, deliveries that were given up, and those that never waited.
Total = Literal["delivered", "failed", "given_up", "dropped"]
TOTALS: Final[tuple[Total, ...]] = get_args(Total)
JITTER_SHARE: Final = 0.1
DELETE_ROWS: Final = 1000  # at once
_GONE: Final = 410

_DELIVERIES: Final = WebhookDeliveryRow.__table__
_ENDPOINTS: Final = WebhookEndpointRow.__table__
_TOTALS: Final = WebhookTotalRow.__table__


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivery, for the CLI and the pages."""

    event_id: str
    endpoint_id: str
    event_type: str
    created_unix_ms: int
    due_unix_ms: int | None  # time of the next attempt; None: none
    outcome: str
    attempts: int
    attempted_unix_ms: int | None
    http_status: int | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """How an attempt ended."""

    http_status: int | None = None  # None: no answer
    error: str | None = None  # None: delivered
    retry_after_s: float = 0.0  # what the receiver asks for

    @property
    def is_gone(self) -> bool:
        """True if the receiver answered 410 Gone."""
        return self.http_status == _GONE


@dataclass(frozen=True, slots=True)
class Claim:
    """A delivery that this process has claimed, with everything needed to send it."""

    event_id: str
    endpoint_id: str
    url: str
    body: str
    attempts: int  # this one included
    due_unix_ms: int  # when the claim ends
    sealed_secrets: tuple[str, ...]  # the newest first


def new_row(event: Event, endpoint_id: str, now_unix_ms: int) -> dict[str, Any]:
    """Return the row of a new delivery of an event to an endpoint, due now."""
    return {
        "event_id": event.id,
        "endpoint_id": endpoint_id,
        "event_type": event.type,
        "body": event.body.decode(),
        "created_unix_ms": now_unix_ms,
        "due_unix_ms": now_unix_ms,
        "outcome": WAITING,
        "attempts": 0,
    }


async def end_waiting(connection: AsyncConnection, endpoint_id: str, why: str) -> None:
    """Give up the waiting deliveries of an endpoint."""
    waiting = (WebhookDeliveryRow.endpoint_id == endpoint_id, WebhookDeliveryRow.due_unix_ms.is_not(None))
    ended = {"due_unix_ms": None, "outcome": FAILED, "error": why}
    done = await connection.execute(update(WebhookDeliveryRow).where(*waiting).values(ended))
    if done.rowcount:
        await _count(connection, "given_up", done.rowcount)


async def list_deliveries(engine: AsyncEngine, endpoint_id: str, limit: int) -> Sequence[Delivery]:
    """Return the latest deliveries to an endpoint, newest first. Raises SQL errors."""
    columns = [_DELIVERIES.c[name] for name in Delivery.__dataclass_fields__]
    newest = (_DELIVERIES.c.created_unix_ms.desc(), _DELIVERIES.c.event_id.desc())
    wanted = select(*columns).where(_DELIVERIES.c.endpoint_id == endpoint_id).order_by(*newest).limit(limit)
    async with engine.connect() as connection:
        return [Delivery(**row) for row in (await connection.execute(wanted)).mappings()]


class DeliverySlots:
    """Limits of concurrent attempts: in total, per endpoint, and per failing endpoint."""

    def __init__(self, in_all: int, each: int) -> None:
        self.each = each
        self._in_all = in_all
        self._running: dict[str, int] = {}
        self._may_run: dict[str, int] = {}  # of those that run

    @property
    def left(self) -> int:
        """The number of free slots."""
        return self._in_all - sum(self._running.values())

    def full(self) -> list[str]:
        """Return the endpoints without a free slot."""
        return [endpoint_id for endpoint_id, count in self._running.items() if count >= self._may_run[endpoint_id]]

    def has_room(self, endpoint_id: str, *, is_failing: bool) -> bool:
        """Return whether an endpoint may start another attempt."""
        return self.left > 0 and self._running.get(endpoint_id, 0) < (1 if is_failing else self.each)

    def enter(self, endpoint_id: str, *, is_failing: bool) -> None:
        """Count one more."""
        self._running[endpoint_id] = self._running.get(endpoint_id, 0) + 1
        self._may_run[endpoint_id] = 1 if is_failing else self.each

    def leave(self, endpoint_id: str) -> None:
        """Count one less."""
        self._running[endpoint_id] -= 1
        if not self._running[endpoint_id]:
            del self._running[endpoint_id], self._may_run[endpoint_id]


class Deliveries:
    """The deliverer's SQL. All methods raise SQL errors."""

    def __init__(self, engine: AsyncEngine, *, max_waiting: int, retries_s: Sequence[float]) -> None:
        """``max_waiting``: per endpoint."""
        self._engine = engine
        self._max_waiting = max_waiting
        self._retries_s = retries_s

    async def add(self, events: Sequence[Event]) -> int:
        """Add a delivery of each event to every endpoint subscribed to its type; return how many are new."""
        teams = {event.team_id for event in events}
        now_unix_ms = unix_now_ms()
        async with changing(self._engine) as connection:
            wanted = select(_ENDPOINTS.c.id, _ENDPOINTS.c.team_id, _ENDPOINTS.c.event_types).where(
                _ENDPOINTS.c.team_id.in_(teams), _ENDPOINTS.c.disabled_reason.is_(None)
            )
            endpoints = (await connection.execute(wanted)).all()
            rows = [
                new_row(event, endpoint_id, now_unix_ms)
                for event in {event.id: event for event in events}.values()
                for endpoint_id, team_id, event_types in endpoints
                if team_id == event.team_id and event.type in event_types
            ]
            return await self._insert_within_limits(connection, rows) if rows else 0

    async def _insert_within_limits(self, connection: AsyncConnection, rows: Sequence[dict[str, Any]]) -> int:
        """Insert rows. Rows above an endpoint's limit are stored as failed."""
        ids = {row["endpoint_id"] for row in rows}
        counted = (
            select(_DELIVERIES.c.endpoint_id, func.count())
            .where(_DELIVERIES.c.endpoint_id.in_(ids), _DELIVERIES.c.due_unix_ms.is_not(None))
            .group_by(_DELIVERIES.c.endpoint_id)
        )
        waiting = {endpoint_id: int(count) for endpoint_id, count in await connection.execute(counted)}
        added = 0
        for row in rows:
            endpoint_id = row["endpoint_id"]
            is_full = waiting.get(endpoint_id, 0) >= self._max_waiting
            full = {
                "due_unix_ms": None,
                "outcome": FAILED,
                "error": f"not queued: {self._max_waiting} deliveries were already waiting",
            }
            statement = inserting(connection, WebhookDeliveryRow).values({**row, **(full if is_full else {})})
            if not (await connection.execute(statement.on_conflict_do_nothing())).rowcount:
                continue  # already stored
            if is_full:
                await _count(connection, "dropped", 1)
            else:
                waiting[endpoint_id] = waiting.get(endpoint_id, 0) + 1
                added += 1
        return added

    async def claim(self, slots: DeliverySlots, lease_s: float) -> list[Claim]:
        """Claim due deliveries, oldest first, up to the free slots."""
        now_unix_ms = unix_now_ms()
        until_unix_ms = now_unix_ms + int(lease_s * 1000)
        async with self._engine.connect() as connection:
            found = (await connection.execute(_due(slots, now_unix_ms))).mappings().all()
        claims: list[Claim] = []
        if not found:
            return claims
        try:
            async with changing(self._engine) as connection:
                for row in found:
                    endpoint_id, is_failing = row["endpoint_id"], row["failing_since_unix_ms"] is not None
                    has_room = slots.has_room(endpoint_id, is_failing=is_failing)
                    if has_room and await _is_ours(connection, row, until_unix_ms):
                        slots.enter(endpoint_id, is_failing=is_failing)
                        claims.append(_claim(row, until_unix_ms, now_unix_ms))
        except BaseException:
            for claim in claims:
                slots.leave(claim.endpoint_id)
            raise
        return claims

    async def settle(self, claim: Claim, attempt: Attempt) -> str | None:
        """Store the outcome of an attempt; if it disables the endpoint, return the reason.

        Does nothing if the claim has ended meanwhile: another process retries the delivery, or it was given up.
        """
        now_unix_ms = unix_now_ms()
        wait_s = self._wait_s(claim, attempt)
        row: dict[str, Any] = {"http_status": attempt.http_status, "error": attempt.error, "due_unix_ms": None}
        if attempt.error is None:
            row["outcome"] = DELIVERED
        elif wait_s is None:
            row["outcome"] = FAILED
        else:
            row["due_unix_ms"] = now_unix_ms + int(wait_s * 1000)
        async with changing(self._engine) as connection:
            done = await connection.execute(
                update(WebhookDeliveryRow)
                .where(*_is_row(claim.event_id, claim.endpoint_id), _DELIVERIES.c.due_unix_ms == claim.due_unix_ms)
                .values(row)
            )
            if not done.rowcount:
                return None
            await _count(connection, "delivered" if attempt.error is None else "failed", 1)
            if attempt.error is None:
                await _set_failing(connection, claim.endpoint_id, None)
                return None
            if wait_s is None:
                await _count(connection, "given_up", 1)
            await _set_failing(connection, claim.endpoint_id, now_unix_ms)
            return await self._disabled(connection, claim, attempt, is_over=wait_s is None, now_unix_ms=now_unix_ms)

    def _wait_s(self, claim: Claim, attempt: Attempt) -> float | None:
        """Return the wait before the next attempt; None: there is none."""
        if attempt.is_gone or claim.attempts > len(self._retries_s):
            return None
        wait_s = self._retries_s[claim.attempts - 1]
        return max(wait_s * random.uniform(1.0, 1.0 + JITTER_SHARE), attempt.retry_after_s)  # noqa: S311

    async def _disabled(
        self, connection: AsyncConnection, claim: Claim, attempt: Attempt, *, is_over: bool, now_unix_ms: int
    ) -> str | None:
        """Disable an endpoint that is gone, or that has accepted nothing for the whole retry schedule."""
        since = select(_ENDPOINTS.c.failing_since_unix_ms).where(_ENDPOINTS.c.id == claim.endpoint_id)
        failing_since_unix_ms = (await connection.execute(since)).scalar_one_or_none() or now_unix_ms
        # Each wait was truncated to whole milliseconds.
        schedule_ms = int(sum(self._retries_s) * 1000) - len(self._retries_s)
        if attempt.is_gone:
            reason = "the receiver answered 410 Gone"
        elif is_over and now_unix_ms - failing_since_unix_ms >= schedule_ms:
            since_text = datetime.fromtimestamp(failing_since_unix_ms // 1000, UTC).isoformat()
            reason = f"no delivery succeeded since {since_text}. Last error: {attempt.error}"
        else:
            return None
        enabled = (WebhookEndpointRow.id == claim.endpoint_id, WebhookEndpointRow.disabled_reason.is_(None))
        done = await connection.execute(update(WebhookEndpointRow).where(*enabled).values(disabled_reason=reason))
        if not done.rowcount:
            return None
        change = ({"disabled_reason": None}, {"disabled_reason": reason})
        await record(connection, Change(SYSTEM, "webhook.disable", claim.endpoint_id, *change))
        await end_waiting(connection, claim.endpoint_id, "the endpoint was disabled")
        return reason

    async def delete_old(self, before_unix_ms: int) -> int:
        """Delete a batch of ended deliveries created before a time; return how many."""
        old = (
            select(_DELIVERIES.c.event_id, _DELIVERIES.c.endpoint_id)
            .where(_DELIVERIES.c.created_unix_ms < before_unix_ms, _DELIVERIES.c.due_unix_ms.is_(None))
            .limit(DELETE_ROWS)
        )
        async with changing(self._engine) as connection:
            found = (await connection.execute(old)).all()
            for event_id, endpoint_id in found:
                await connection.execute(delete(WebhookDeliveryRow).where(*_is_row(event_id, endpoint_id)))
        return len(found)

    async def summary(self) -> tuple[dict[str, int], int, int | None]:
        """Return the totals by outcome, how many deliveries wait, and when the oldest of them was created."""
        waiting = select(func.count(), func.min(_DELIVERIES.c.created_unix_ms)).where(
            _DELIVERIES.c.due_unix_ms.is_not(None)
        )
        async with self._engine.connect() as connection:
            totals = await connection.execute(select(_TOTALS.c.outcome, _TOTALS.c.attempts))
            counts = {outcome: int(count) for outcome, count in totals}
            count, oldest_unix_ms = (await connection.execute(waiting)).one()
        return {outcome: counts.get(outcome, 0) for outcome in TOTALS}, int(count), oldest_unix_ms


def _due(slots: DeliverySlots, now_unix_ms: int) -> Select[Any]:
    """Select due deliveries, limited per endpoint."""
    order = (_DELIVERIES.c.due_unix_ms, _DELIVERIES.c.event_id)
    place = func.row_number().over(partition_by=_DELIVERIES.c.endpoint_id, order_by=order).label("place")
    is_due = (_DELIVERIES.c.due_unix_ms <= now_unix_ms, _DELIVERIES.c.endpoint_id.not_in(slots.full()))
    due = select(_DELIVERIES, place).where(*is_due).subquery()
    names = ("url", "secret", "previous_secret", "previous_until_unix_ms", "failing_since_unix_ms")
    return (
        select(due, *(_ENDPOINTS.c[name] for name in names))
        .join(_ENDPOINTS, _ENDPOINTS.c.id == due.c.endpoint_id)
        .where(due.c.place <= slots.each)
        .order_by(due.c.due_unix_ms)
        .limit(slots.left)
    )


async def _is_ours(connection: AsyncConnection, row: RowMapping, until_unix_ms: int) -> bool:
    """Claim a row, unless another process has claimed it."""
    taken = {
        "due_unix_ms": until_unix_ms,
        "attempts": row["attempts"] + 1,
        "attempted_unix_ms": unix_now_ms(),
    }
    same = _is_row(row["event_id"], row["endpoint_id"])
    statement = update(WebhookDeliveryRow).where(*same, _DELIVERIES.c.due_unix_ms == row["due_unix_ms"])
    return bool((await connection.execute(statement.values(taken))).rowcount == 1)


def _is_row(event_id: str, endpoint_id: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return _DELIVERIES.c.event_id == event_id, _DELIVERIES.c.endpoint_id == endpoint_id


def _claim(row: RowMapping, until_unix_ms: int, now_unix_ms: int) -> Claim:
    secrets = [row["secret"]]
    if row["previous_secret"] is not None and (row["previous_until_unix_ms"] or 0) > now_unix_ms:
        secrets.append(row["previous_secret"])
    return Claim(
        row["event_id"], row["endpoint_id"], row["url"], row["body"], row["attempts"] + 1, until_unix_ms, tuple(secrets)
    )


async def _set_failing(connection: AsyncConnection, endpoint_id: str, since_unix_ms: int | None) -> None:
    """Store since when an endpoint fails, unless it is failing already; None: it succeeds."""
    column = _ENDPOINTS.c.failing_since_unix_ms
    is_other = column.is_not(None) if since_unix_ms is None else column.is_(None)
    statement = update(WebhookEndpointRow).where(_ENDPOINTS.c.id == endpoint_id, is_other)
    await connection.execute(statement.values(failing_since_unix_ms=since_unix_ms))


async def _count(connection: AsyncConnection, outcome: Total, more: int) -> None:
    statement = inserting(connection, WebhookTotalRow).values(outcome=outcome, attempts=more)
    added = {"attempts": _TOTALS.c.attempts + more}
    await connection.execute(statement.on_conflict_do_update(index_elements=["outcome"], set_=added))


def inserting(connection: AsyncConnection, table: type[Base]) -> postgresql.Insert | sqlite.Insert:
    """Return an insert of the connection's dialect, which supports ON CONFLICT."""
    return (postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert)(table)
