"""Single requests: a filtered list page by page, and one with its attempts. Reads raw rows, by their indexes."""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import ColumnElement, and_, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import AttemptRow, RequestRow
from ledger.queries.window import NO_FILTERS, Filters

SLICE_ROWS: Final = 20_000  # searched by one statement
SEARCH_LIMIT_S: Final = 0.1  # then the requests found so far are the page, and the next one continues from there
MAX_ATTEMPTS: Final = 200  # of one request
MAX_COMPARED: Final = 200_000  # requests among which the slowest are looked for

Extreme = Literal["total_ms", "ttft_ms", "queue_ms", "charge_nano_usd", "attempts", "completion_tokens"]

Tag = tuple[str, str]  # name, value
Row = dict[str, Any]  # column → value, as in db.tables

_REQUESTS: Final = RequestRow.__table__.columns
_received: Final = RequestRow.received_unix_ms
_COLUMNS: Final = {"team": "team_id", "key": "key_id"}  # of dimensions whose columns have another name


@dataclass(frozen=True, slots=True)
class Cursor:
    """The end of a page of requests: the next one begins with older requests."""

    received_unix_ms: int
    request_id: str  # empty: all requests at this time belong to the page before


@dataclass(frozen=True, slots=True)
class Page:
    """Some requests, the newest first."""

    requests: list[Row]  # of RequestRow
    next: Cursor | None  # None: there are no more


@dataclass(frozen=True, slots=True)
class RequestHistory:
    """One request with its attempts."""

    request: Row | None  # RequestRow; None: not ended yet, or its gateway died a moment ago
    attempts: list[Row]  # AttemptRow, in the order in which they were tried


async def request_page(
    connection: AsyncConnection,
    since_unix_ms: int,
    until_unix_ms: int,
    *,
    where: Filters = NO_FILTERS,
    tags: Collection[Tag] = (),
    after: Cursor | None = None,
    limit: int = 100,
    slice_rows: int = SLICE_ROWS,
    search_limit_s: float = SEARCH_LIMIT_S,
) -> Page:
    """Return the newest ``limit`` requests received in [since, until) and older than ``after``, with any of ``tags``.

    Where few requests pass the filters, a page may hold fewer of them, or none, and still have a next one: the search
    stops after ``search_limit_s``.
    """
    condition = and_(*_conditions(where, tags), _received >= since_unix_ms, _received < until_unix_ms)
    found: list[Row] = []
    started_s = time.monotonic()
    while True:
        bottom = await _bottom(connection, since_unix_ms, until_unix_ms, after, slice_rows) if where or tags else None
        within = condition if bottom is None else and_(condition, _received >= bottom)
        newest_first = (
            select(*_REQUESTS)
            .where(within, _older_than(after))
            .order_by(_received.desc(), RequestRow.request_id.desc())
        )
        rows = await connection.execute(newest_first.limit(limit + 1 - len(found)))
        found += [dict(row) for row in rows.mappings()]
        if len(found) > limit:
            return Page(found[:limit], Cursor(found[limit - 1]["received_unix_ms"], found[limit - 1]["request_id"]))
        if bottom is None:
            return Page(found, None)
        after = Cursor(bottom, "")
        if time.monotonic() - started_s > search_limit_s:
            return Page(found, after)


async def extreme_requests(
    connection: AsyncConnection,
    since_unix_ms: int,
    until_unix_ms: int,
    *,
    where: Filters,
    tags: Collection[Tag] = (),
    by: Extreme,
    limit: int,
) -> list[Row]:
    """Return the ``limit`` requests received in [since, until) that have the most of something, the greatest first.

    Of a time with more requests that pass the filters, the newest MAX_COMPARED are compared.
    """
    within = and_(*_conditions(where, tags), _received >= since_unix_ms, _received < until_unix_ms)
    newest = select(*_REQUESTS).where(within).order_by(_received.desc()).limit(MAX_COMPARED).subquery()
    column = newest.c[by]
    most = select(newest).where(column.is_not(None)).order_by(column.desc(), newest.c.received_unix_ms.desc())
    return [dict(row) for row in (await connection.execute(most.limit(limit))).mappings()]


async def request_history(connection: AsyncConnection, request_id: str) -> RequestHistory | None:
    """Return a request with its attempts; None: there is no such request."""
    request = (
        (await connection.execute(select(*_REQUESTS).where(RequestRow.request_id == request_id)))
        .mappings()
        .one_or_none()
    )
    tried = (
        select(*AttemptRow.__table__.columns)
        .where(AttemptRow.request_id == request_id)
        .order_by(AttemptRow.attempt, AttemptRow.started_unix_ms)
        .limit(MAX_ATTEMPTS)
    )
    attempts = [dict(row) for row in (await connection.execute(tried)).mappings()]
    if request is None and not attempts:
        return None
    return RequestHistory(None if request is None else dict(request), attempts)


def _conditions(where: Filters, tags: Collection[Tag]) -> list[ColumnElement[bool]]:
    found = [_is_one_of(_REQUESTS[_COLUMNS.get(dimension, dimension)], values) for dimension, values in where.items()]
    return [*found, _has_any(tags)] if tags else found


def _has_any(tags: Iterable[Tag]) -> ColumnElement[bool]:
    # The text is JSON, in which a quote inside a name or value is escaped: `,"name":"value"` occurs as a pair alone.
    # LIKE would ignore case on SQLite.
    text = literal(",") + func.substr(RequestRow.tags, 2)
    pairs = [f",{msgspec.json.encode({name: value}).decode()[1:-1]}" for name, value in tags]
    return or_(*(func.replace(text, pair, "") != text for pair in pairs))


def _is_one_of(column: ColumnElement[Any], values: Collection[str]) -> ColumnElement[bool]:
    # Rollups store NULL as the empty string.
    named = column.in_([value for value in values if value])
    return or_(named, column.is_(None)) if "" in values else named


def _older_than(cursor: Cursor | None) -> ColumnElement[bool]:
    if cursor is None:
        return _received.is_not(None)
    same = and_(_received == cursor.received_unix_ms, RequestRow.request_id < cursor.request_id)
    # The first condition is implied, and lets the index scan begin there.
    return and_(_received <= cursor.received_unix_ms, or_(_received < cursor.received_unix_ms, same))


async def _bottom(
    connection: AsyncConnection, since: int, until: int, after: Cursor | None, slice_rows: int
) -> int | None:
    """Return when the last request of the next slice was received; None: the remaining requests fit into one."""
    top = until if after is None else min(until, after.received_unix_ms + bool(after.request_id))
    rows = select(_received).where(_received >= since, _received < top).order_by(_received.desc())
    found: int | None = await connection.scalar(rows.limit(1).offset(slice_rows))
    return found
