"""Usage summaries: requests, tokens, cost and latencies by team, key, model, tag, day and month.

Counts and charges come from the rollups, as on the pages and in the API. Percentiles are exact, over requests that
are still stored: the nearest rank, that is the smallest observed value that at least p % of the values do not exceed.
The database computes everything and returns one row per group: the memory of this process is bounded by the number of
groups, not of requests.

Definitions follow vLLM's and NVIDIA's benchmarks: TTFT from receipt to the first token; TPOT, of
answered requests with at least two tokens, ``(total - TTFT) / (completion tokens - 1)``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import tzinfo
from typing import Any, Final

from sqlalchemy import ColumnElement, Float, Select, and_, case, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import SQL_ERRORS, DatabaseUnavailable, describe
from db.tables import RequestRow, RollupRow
from ledger.queries.names import load_names
from ledger.queries.usage import Usage, UsageBy, UsageRefused, usage
from ledger.queries.window import TooManySteps, Window
from ledger.rollups import WIDTHS_S

MAX_DAYS: Final = 3_700  # ten years

_Column = ColumnElement[Any]
_Group = tuple[Any, ...]
_ByGroup = Mapping[_Group, tuple[Any, ...]]


class ReportTooLarge(ValueError):
    """The report would have too many rows or days, or its groups cannot be combined; the message says which."""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One group. Dimensions not grouped by are None, as are percentiles of no values. Times in milliseconds."""

    month: str | None  # "2026-11"
    day: str | None  # "2026-11-28"
    team_id: str | None
    team_name: str | None
    model: str | None
    key_id: str | None
    key_name: str | None  # as it was last used
    tag: str | None  # "name=value"
    requests: int
    ok: int | None  # this and the next three: None by tag
    failed: int | None
    cancelled: int | None
    retried: int | None  # requests that took more than one attempt
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    charge_nano_usd: int  # of the tokens that have a price
    unpriced_tokens: int  # tokens without a price
    preemptions: int  # this and the following: only of requests that are still stored, and not by tag
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
    """A duration of a request, and the percentiles of it in a UsageRow."""

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


_GROUPS: Final[Mapping[UsageBy, _Column]] = {
    "team": func.coalesce(RequestRow.team_id, ""),
    "key": RequestRow.key_id.expression,
    "model": RequestRow.model.expression,
}
_NOTHING: Final = (None, 0, 0)  # for a group whose requests are no longer stored


async def usage_report(
    engine: AsyncEngine,
    *,
    group_by: Sequence[UsageBy] = (),
    since_unix_ms: int | None = None,
    until_unix_ms: int | None = None,
    zone: tzinfo | None = None,
) -> list[UsageRow]:
    """Summarize the requests received in [since, until), None: unbounded; order by time, model and names.

    Times are widened to full quarters of an hour. Days and months are those of ``zone`` (None: the
    machine's). Without ``group_by`` there is one row, or none if there were no requests. Raises ReportTooLarge and
    DatabaseUnavailable.
    """
    try:
        async with engine.connect() as connection:
            window = await window_of(connection, since_unix_ms, until_unix_ms, zone)
            if window is None:
                return []
            found = await usage(connection, window, group_by)
            steps = {(row.since_unix_ms, row.until_unix_ms) for row in found}
            if len(steps) > MAX_DAYS:
                raise ReportTooLarge(f"more than {MAX_DAYS} days. Choose a shorter period")
            columns = [_GROUPS[name] for name in group_by if name in _GROUPS]
            stored = (
                {span: await _summarise(connection, span, columns) for span in steps} if "tag" not in group_by else {}
            )
            names = await load_names(connection)
    except (UsageRefused, TooManySteps) as error:
        raise ReportTooLarge(str(error)) from error
    except SQL_ERRORS as error:
        where = engine.url.render_as_string(hide_password=True)
        raise DatabaseUnavailable(f"cannot report usage from {where}: {describe(error)}") from error
    rows = [_usage_row(row, names, stored.get((row.since_unix_ms, row.until_unix_ms))) for row in found]
    rows = [row for row in rows if row.requests]
    return sorted(rows, key=_order)


def _order(row: UsageRow) -> tuple[str, ...]:
    parts = (row.day or row.month, row.team_name, row.model, row.key_name, row.key_id, row.tag)
    return tuple(part or "" for part in parts)


async def window_of(
    connection: AsyncConnection, since: int | None, until: int | None, zone: tzinfo | None
) -> Window | None:
    """Return the time from the first to the last quarter of an hour with requests, within bounds; None: there is none.

    Raises SQL errors.
    """
    bucket = RollupRow.bucket_unix_ms
    statement = select(func.min(bucket), func.max(bucket)).where(RollupRow.width_s == WIDTHS_S[0])
    first, last = (await connection.execute(statement)).one_or_none() or (None, None)
    if first is None or last is None:
        return None
    since = first if since is None else max(first, since)
    end = last + WIDTHS_S[0] * 1000
    until = end if until is None else min(end, until)
    return Window(since, until, zone) if since < until else None


async def _summarise(connection: AsyncConnection, span: tuple[int, int], groups: list[_Column]) -> list[_ByGroup]:
    """Return the figures of one time span's stored requests: one query for counts, and one per measure."""
    asked = [_counts(span, groups), *(_percentiles(measure, span, groups) for measure in _MEASURES)]
    answers = [await connection.execute(statement) for statement in asked]
    return [{tuple(row[: len(groups)]): tuple(row[len(groups) :]) for row in answer} for answer in answers]


def _counts(span: tuple[int, int], groups: list[_Column]) -> Select[Any]:
    counts = [func.sum(func.coalesce(RequestRow.preemptions, 0)), _count_where(RequestRow.counted_by == "estimate")]
    # A key's name never changes, so max() returns its only name.
    return select(*groups, func.max(RequestRow.key_name), *counts).where(_within(span)).group_by(*groups)


def _count_where(condition: _Column) -> _Column:
    return func.sum(case((condition, 1), else_=0))


def _percentiles(measure: _Measure, span: tuple[int, int], groups: list[_Column]) -> Select[Any]:
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


def _within(span: tuple[int, int]) -> _Column:
    received = RequestRow.received_unix_ms
    return and_(received >= span[0], received < span[1])


def _usage_row(row: Usage, names: Mapping[str, str], stored: Sequence[_ByGroup] | None) -> UsageRow:
    sums, is_tagged = row.sums, row.tag is not None
    counts, *percentiles = stored or [{}, *({} for _ in _MEASURES)]
    key_name, preemptions, estimated = counts.get(sums.group, _NOTHING)
    values = [
        value
        for found, measure in zip(percentiles, _MEASURES, strict=True)
        for value in found.get(sums.group, (None,) * len(measure.percents))
    ]
    ok, failed, cancelled, retried = (None,) * 4 if is_tagged else (sums.ok, sums.failed, sums.cancelled, sums.retried)
    return UsageRow(
        row.month,
        row.day,
        row.team_id,
        None if row.team_id is None else names.get(row.team_id, row.team_id),
        row.model,
        row.key_id,
        None if row.key_id is None else (key_name or names.get(row.key_id, row.key_id)),
        row.tag,
        sums.requests,
        ok,
        failed,
        cancelled,
        retried,
        sums.prompt_tokens,
        sums.cached_tokens,
        sums.completion_tokens,
        sums.charge_nano_usd,
        sums.unpriced_tokens,
        int(preemptions or 0),  # PostgreSQL sums bigints into decimals
        int(estimated or 0),
        *values,
    )
