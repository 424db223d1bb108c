"""Comparing rollups with the rows of the requests, and rebuilding them.

Works on one UTC day at a time, inside the writers' transaction, so that the data does not change meanwhile. Memory is
bounded by a day's slices, not by its requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from sqlalchemy import Select, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import SQL_ERRORS, DatabaseUnavailable, describe, writing
from db.tables import HistogramRow, RequestRow, RollupRow
from ledger import histogram
from ledger.histogram import MEASURES
from ledger.rollups import DIMENSIONS, SUMS, WIDTHS_S, RollupDelta, apply
from ledger.tags import TagDelta, replace_tags, wrong_tags

DAY_MS: Final = 86_400_000
BATCH_ROWS: Final = 5_000
MAX_DAYS: Final = 3_700
_READ: Final = (*DIMENSIONS, *("received_unix_ms", "attempts", "prompt_tokens", "cached_tokens", "completion_tokens"))
_MEASURED: Final = ("charge_nano_usd", "total_ms", "queue_ms", "ttft_ms", "tags")

_FIGURES: Final = (*SUMS, *MEASURES)

_Key = tuple[int, int, int]  # width_s, bucket_unix_ms, slice_id
_Bucket = tuple[Any, ...]  # _FIGURES


@dataclass(frozen=True, slots=True)
class DayCheck:
    """The result for one UTC day."""

    begin_unix_ms: int
    requests: int
    wrong: int  # rows of rollups and histograms that are missing, superfluous or different
    columns: tuple[str, ...] = ()  # the figures in which they differ, sorted; "tags" for the rollups of tags


async def check_rollups(engine: AsyncEngine, *, repair: bool = False, since_unix_ms: int = 0) -> list[DayCheck]:
    """Compare every UTC day from the oldest request on, and with ``repair`` rebuild those that differ.

    Rows of minutes, which are deleted after some hours, are rebuilt and not compared.

    Rollups before ``since_unix_ms``, which outlive their requests (``ledger.retention_days``), are not touched.
    Writers wait while a day is compared. Raises DatabaseUnavailable.
    """
    checks: list[DayCheck] = []
    try:
        async with engine.connect() as connection:
            days = await _days(connection)
        for begin_unix_ms in (day for day in days if day >= since_unix_ms):
            async with writing(engine) as connection:
                tally, tags, requests = await _recount(connection, begin_unix_ms)
                wrong, columns = _differences(_counted(tally), await _stored(connection, begin_unix_ms))
                if of_tags := await wrong_tags(connection, begin_unix_ms, begin_unix_ms + DAY_MS, tags):
                    wrong += of_tags
                    columns.add("tags")
                if wrong and repair:
                    await _replace(connection, begin_unix_ms, tally)
                    await replace_tags(connection, begin_unix_ms, begin_unix_ms + DAY_MS, tags)
            checks.append(DayCheck(begin_unix_ms, requests, wrong, tuple(sorted(columns))))
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(describe(error)) from error
    return checks


async def _days(connection: AsyncConnection) -> list[int]:
    oldest = await connection.scalar(select(func.min(RequestRow.received_unix_ms)))
    if oldest is None:
        return []
    newest = await connection.scalar(select(func.max(RequestRow.received_unix_ms)))
    newest_bucket = await connection.scalar(select(func.max(RollupRow.bucket_unix_ms)))
    until = max(newest or 0, newest_bucket or 0) + 1
    return list(range(oldest // DAY_MS * DAY_MS, until, DAY_MS))[-MAX_DAYS:]


async def _recount(connection: AsyncConnection, begin_unix_ms: int) -> tuple[RollupDelta, TagDelta, int]:
    columns = RequestRow.__table__.columns
    received = columns.received_unix_ms
    statement: Select[Any] = select(*(columns[name] for name in (*_READ, *_MEASURED)))
    statement = statement.where(received >= begin_unix_ms, received < begin_unix_ms + DAY_MS)
    tally, tags, requests = RollupDelta(), TagDelta(), 0
    streamed = await connection.stream(statement.execution_options(yield_per=BATCH_ROWS))
    async for rows in streamed.mappings().partitions():
        read = [dict(row) for row in rows]
        tally.add(read)
        tags.add(read)
        requests += len(read)
    return tally, tags, requests


def _counted(tally: RollupDelta) -> Iterator[tuple[_Key, _Bucket]]:
    for (width_s, start), found in tally.buckets().items():
        if width_s == WIDTHS_S[0]:
            continue
        for number, (sums, counts) in found.items():
            yield (width_s, start, number), (*sums, *counts)


async def _stored(connection: AsyncConnection, begin_unix_ms: int) -> dict[_Key, _Bucket]:
    parts: list[dict[_Key, _Bucket]] = []
    for table, names in ((RollupRow.__table__, SUMS), (HistogramRow.__table__, MEASURES)):
        columns = table.columns
        start = columns.bucket_unix_ms
        statement = select(columns.width_s, start, columns.slice_id, *(columns[name] for name in names))
        statement = statement.where(start >= begin_unix_ms, start < begin_unix_ms + DAY_MS)
        statement = statement.where(columns.width_s != WIDTHS_S[0])
        parts.append({(row[0], row[1], row[2]): tuple(row[3:]) for row in await connection.execute(statement)})
    sums, counts = parts
    keys = sums.keys() | counts.keys()
    return {key: (*sums.get(key, ()), *map(histogram.decode, counts.get(key, ()))) for key in keys}


def _differences(counted: Iterator[tuple[_Key, _Bucket]], stored: dict[_Key, _Bucket]) -> tuple[int, set[str]]:
    """Return how many rows differ, and in which figures."""
    wrong, columns = 0, set[str]()
    for key, bucket in counted:
        found = stored.pop(key, ())
        if found != bucket:
            wrong += 1
            columns |= {name for name, a, b in zip_longest(_FIGURES, bucket, found) if a != b}
    if stored:
        columns |= {*_FIGURES}
    return wrong + len(stored), columns


async def _replace(connection: AsyncConnection, begin_unix_ms: int, tally: RollupDelta) -> None:
    tables: Sequence[type[RollupRow | HistogramRow]] = (RollupRow, HistogramRow)
    for table in tables:
        start = table.bucket_unix_ms
        await connection.execute(delete(table).where(start >= begin_unix_ms, start < begin_unix_ms + DAY_MS))
    await apply(connection, tally)
