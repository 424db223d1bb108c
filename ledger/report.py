"""Usage summaries: requests, tokens and latencies by model, key and day.

The database computes everything, one day at a time, and returns one row per group; the memory of this process is
bounded by the number of groups (``MAX_ROWS``), not of requests. Percentiles are exact: the nearest rank, that is the
smallest observed value that at least p % of the values do not exceed.

Definitions are those of the field (vLLM's and NVIDIA's benchmarks): TTFT from receipt to the first token; TPOT, of
answered requests with at least two tokens, ``(total - TTFT) / (completion tokens - 1)``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, tzinfo
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, Float, Select, and_, case, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import SQL_ERRORS, DatabaseUnavailable, describe
from db.tables import RequestRow
from ledger.days import Span, split_into_days

MAX_ROWS: Final = 100_000
MAX_DAYS: Final = 3_700  # ten years

GroupBy = Literal["model", "key", "day"]
_Column = ColumnElement[Any]
_ByGroup = dict[tuple[Any, ...], tuple[float | None, ...]]


class ReportTooLarge(ValueError):
    """The report would have too many rows or days; ask for less time or fewer groups."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One group. Dimensions not grouped by are None, as are percentiles of no values. Times in milliseconds."""

    day: date | None
    model: str | None
    key_id: str | None
    key_name: str | None  # as it was last used
    requests: int
    ok: int
    failed: int
    cancelled: int
    retried: int  # requests that took more than one attempt
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    estimated: int  # requests whose token counts are estimates: their provider reports none
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    tpot_p50_ms: float | None
    queue_p50_ms: float | None
    queue_p95_ms: float | None
    prefill_p50_ms: float | None  # of the requests whose engine reports it
    prefill_p95_ms: float | None


@dataclass(frozen=True, slots=True)
class _Measure:
    """A duration of a request, and the percentiles of it that a UsageRow has."""

    value_ms: _Column
    percents: tuple[int, ...]


_TPOT_MS: Final = case(
    (
        and_(RequestRow.outcome == "ok", RequestRow.ttft_ms.is_not(None), RequestRow.completion_tokens > 1),
        (RequestRow.total_ms - RequestRow.ttft_ms) / cast(RequestRow.completion_tokens - 1, Float(53)),
    )
)
_MEASURES: Final = (  # TTFT, TPOT, queue wait, prefill
    _Measure(RequestRow.ttft_ms.expression, (50, 95)),
    _Measure(_TPOT_MS, (50,)),
    _Measure(RequestRow.queue_ms.expression, (50, 95)),
    _Measure(RequestRow.prefill_ms.expression, (50, 95)),
)


async def usage_report(
    engine: AsyncEngine,
    *,
    group_by: Sequence[GroupBy] = (),
    since_unix_ms: int | None = None,
    until_unix_ms: int | None = None,
    zone: tzinfo | None = None,
) -> list[UsageRow]:
    """Summarise the requests received in [since, until), both open where None; order by day, model and key name.

    Days are those of ``zone`` (None: the machine's). Without ``group_by`` there is one row, or none if there were no
    requests. Raises ReportTooLarge and DatabaseUnavailable.
    """
    try:
        async with engine.connect() as connection:
            received = await _received_between(connection, since_unix_ms, until_unix_ms)
            if received is None:
                return []
            rows: list[UsageRow] = []
            for number, span in enumerate(_spans(received, zone, by_day="day" in group_by)):
                rows += await _summarise(connection, span, _group_columns(group_by))
                if len(rows) > MAX_ROWS or number >= MAX_DAYS:
                    raise ReportTooLarge(f"more than {MAX_ROWS} rows or {MAX_DAYS} days: narrow the time or the groups")
            return rows
    except SQL_ERRORS as error:
        where = engine.url.render_as_string(hide_password=True)
        raise DatabaseUnavailable(f"cannot report usage from {where}: {describe(error)}") from error


def _group_columns(group_by: Sequence[GroupBy]) -> list[_Column]:
    by_name = {"model": RequestRow.model.expression, "key": RequestRow.key_id.expression}
    return [column for name, column in by_name.items() if name in group_by]


async def _received_between(connection: AsyncConnection, since: int | None, until: int | None) -> Span | None:
    """Return the span from the first to the last request in range; None if there is none."""
    received = RequestRow.received_unix_ms
    statement = select(func.min(received), func.max(received))
    if since is not None:
        statement = statement.where(received >= since)
    if until is not None:
        statement = statement.where(received < until)
    first, last = (await connection.execute(statement)).one()
    return None if first is None else Span(None, first, last + 1)


def _spans(received: Span, zone: tzinfo | None, *, by_day: bool) -> Iterator[Span]:
    return split_into_days(received.since_unix_ms, received.until_unix_ms, zone) if by_day else iter([received])


async def _summarise(connection: AsyncConnection, span: Span, groups: list[_Column]) -> list[UsageRow]:
    """Return all groups of one span, by one query for the sums and one for each measure's percentiles."""
    sums = list(await connection.execute(_sums(span, groups)))
    if not sums:
        return []
    percentiles: list[_ByGroup] = []
    for measure in _MEASURES:
        found = await connection.execute(_percentiles(measure, span, groups))
        percentiles.append({tuple(row[: len(groups)]): tuple(row[len(groups) :]) for row in found})
    rows = [_usage_row(span, groups, tuple(row), percentiles) for row in sums]
    return sorted(rows, key=lambda row: (row.model or "", row.key_name or "", row.key_id or ""))


def _sums(span: Span, groups: list[_Column]) -> Select[Any]:
    requests = func.count()
    counts = [
        requests,
        *(_count_where(RequestRow.outcome == outcome) for outcome in ("ok", "failed", "cancelled")),
        _count_where(RequestRow.attempts > 1),
        func.sum(RequestRow.prompt_tokens),
        func.sum(RequestRow.cached_tokens),
        func.sum(RequestRow.completion_tokens),
        func.sum(func.coalesce(RequestRow.preemptions, 0)),
        _count_where(RequestRow.counted_by == "estimate"),
    ]
    # A key's name never changes, so its greatest is its only one.
    statement = select(*groups, func.max(RequestRow.key_name), *counts)
    return statement.where(_within(span)).group_by(*groups).having(requests > 0)


def _count_where(condition: _Column) -> _Column:
    return func.sum(case((condition, 1), else_=0))


def _percentiles(measure: _Measure, span: Span, groups: list[_Column]) -> Select[Any]:
    """Select, per group, the values at rank ceil(n * percent / 100) of those that are not NULL."""
    names = [f"group_{number}" for number in range(len(groups))]
    partition = groups or None
    ranked = (
        select(
            *(column.label(name) for column, name in zip(groups, names, strict=True)),
            measure.value_ms.label("value_ms"),
            func.row_number().over(partition_by=partition, order_by=measure.value_ms).label("rank"),
            func.count().over(partition_by=partition).label("n"),
        )
        .where(_within(span), measure.value_ms.is_not(None))
        .subquery()
    )
    at_rank = [
        func.max(case((ranked.c.rank == (ranked.c.n * percent + 99) // 100, ranked.c.value_ms)))
        for percent in measure.percents
    ]
    columns = [ranked.c[name] for name in names]
    return select(*columns, *at_rank).group_by(*columns)


def _within(span: Span) -> _Column:
    received = RequestRow.received_unix_ms
    return and_(received >= span.since_unix_ms, received < span.until_unix_ms)


def _usage_row(span: Span, groups: list[_Column], row: tuple[Any, ...], percentiles: list[_ByGroup]) -> UsageRow:
    group, key_name, counts = row[: len(groups)], row[len(groups)], row[len(groups) + 1 :]
    named = {column.key: value for column, value in zip(groups, group, strict=True)}
    ttft, tpot, queue, prefill = (
        found.get(group, (None,) * len(measure.percents)) for found, measure in zip(percentiles, _MEASURES, strict=True)
    )
    return UsageRow(
        span.day,
        named.get("model"),
        named.get("key_id"),
        key_name if "key_id" in named else None,
        *(int(count) for count in counts),  # PostgreSQL sums bigints into decimals
        *ttft,
        *tpot,
        *queue,
        *prefill,
    )
