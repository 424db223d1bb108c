"""Adding requests' rows to rollups and histograms.

Rows are summed in memory first, by slice and minute, and from there into the wider buckets, so a batch costs SQL a few
statements regardless of its size. Only rows that are actually written may be counted, in the transaction that
writes them (ledger.store).
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import and_, delete, func, literal, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import SQL_ERRORS, DatabaseUnavailable, describe, writing
from db.tables import Base, HistogramRow, RollupRow, SliceRow
from ledger import histogram
from ledger.histogram import MEASURES, Counts

WIDTHS_S: Final = (60, 900, 3600, 86_400)  # each a multiple of the one before
MINUTES_KEPT_MS: Final = 3 * 3_600_000  # rows of a minute are for charts of the last hour
DIMENSIONS: Final = ("model", "pool", "provider", "region", "tier", "team_id", "key_id", "endpoint", "outcome")
SUMS: Final = (
    "requests",
    "attempts",
    "failovers",
    "retried",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "charge_nano_usd",
    "total_ms",
    "unpriced_tokens",
)
LOOKUP_CHUNK: Final = 500

Slice = tuple[str, ...]  # one value for each of DIMENSIONS
Row = Mapping[str, Any]  # column → value, of RequestRow
_Bucket = tuple[int, int]  # width_s, bucket_unix_ms
_Id = TypeVar("_Id", int, str)
_Insert = TypeVar("_Insert", postgresql.Insert, sqlite.Insert)


def slice_id(values: Slice) -> int:
    """Return the id of a slice: 63 bits of a hash of its values, which needs no coordination between writers."""
    digest = hashlib.blake2b("\0".join(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class RollupDelta:
    """The change of the rollups by added or removed requests."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, Slice], list[int]] = defaultdict(lambda: [0] * len(SUMS))  # by minute and slice
        self._counts: dict[tuple[int, Slice], list[Counts]] = defaultdict(lambda: [{} for _ in MEASURES])
        self.takes_away = False

    def add(self, rows: Iterable[Row], sign: int = 1) -> None:
        """Add rows (1) or remove them (-1)."""
        self.takes_away = self.takes_away or sign < 0
        width_ms = WIDTHS_S[0] * 1000
        for row in rows:
            bucket = row["received_unix_ms"] // width_ms * width_ms
            key = (bucket, tuple([row[name] or "" for name in DIMENSIONS]))
            sums, counts = self._sums[key], self._counts[key]
            for number, value in enumerate(_values(row)):
                sums[number] += sign * value
            for into, measured in zip(counts, _measured(row), strict=True):
                if measured is not None:
                    number = histogram.bin_of(measured)
                    into[number] = into.get(number, 0) + sign

    def slices(self) -> dict[int, Slice]:
        """Return all changed slices by id."""
        return {slice_id(values): values for values in {values for _, values in self._sums}}

    def buckets(self) -> dict[_Bucket, dict[int, tuple[list[int], list[Counts]]]]:
        """Return each slice's sums and histograms, by width and bucket."""
        ids = {values: number for number, values in self.slices().items()}
        widths: dict[_Bucket, dict[int, tuple[list[int], list[Counts]]]] = defaultdict(dict)
        for (minute, values), sums in self._sums.items():
            counts = self._counts[minute, values]
            for width_s in WIDTHS_S:
                bucket = widths[width_s, minute // (width_s * 1000) * (width_s * 1000)]
                into = bucket.setdefault(ids[values], ([0] * len(SUMS), [{} for _ in MEASURES]))
                into[0][:] = map(int.__add__, into[0], sums)
                for merged, more in zip(into[1], counts, strict=True):
                    histogram.add(merged, more)
        return widths


def _values(row: Row) -> tuple[int, ...]:
    """Return a row's figures in the order of SUMS."""
    attempts = row["attempts"]
    return (
        1,
        attempts,
        max(0, attempts - 1),
        attempts > 1,
        row["prompt_tokens"],
        row["cached_tokens"],
        row["completion_tokens"],
        row["charge_nano_usd"] or 0,
        round(row["total_ms"]),
        unpriced_tokens(row),
    )


def unpriced_tokens(row: Row) -> int:
    """Return the tokens of a request without a price; 0 if no worker accepted the request."""
    is_free = row["charge_nano_usd"] is not None or not row["pool"]
    return 0 if is_free else row["prompt_tokens"] + row["completion_tokens"]


def _measured(row: Row) -> tuple[float | None, ...]:
    """Return a row's measures in the order of MEASURES."""
    ttft_ms, completion_tokens = row["ttft_ms"], row["completion_tokens"]
    has_tpot = row["outcome"] == "ok" and ttft_ms is not None and completion_tokens > 1
    return (
        row["queue_ms"],
        ttft_ms,
        (row["total_ms"] - ttft_ms) / (completion_tokens - 1) if has_tpot else None,
        row["total_ms"],
        row["prompt_tokens"],
        completion_tokens,
    )


async def apply(connection: AsyncConnection, tally: RollupDelta) -> None:
    """Write a change in the caller's transaction, which must keep other writers out (db.engine.writing)."""
    slices, buckets = tally.slices(), tally.buckets()
    if not slices:
        return
    rows = [{"id": number, **dict(zip(DIMENSIONS, values, strict=True))} for number, values in slices.items()]
    await upsert(connection, SliceRow, rows)
    await _add_sums(connection, buckets)
    await _merge_histograms(connection, buckets)
    if tally.takes_away:
        await _drop_empty(connection, buckets)


async def _add_sums(connection: AsyncConnection, buckets: Mapping[_Bucket, Mapping[int, Any]]) -> None:
    rows = [
        {"width_s": width_s, "bucket_unix_ms": start, "slice_id": number, **dict(zip(SUMS, sums, strict=True))}
        for (width_s, start), found in sorted(buckets.items())
        for number, (sums, _) in found.items()
    ]
    columns = RollupRow.__table__.columns
    await upsert(connection, RollupRow, rows, lambda new: {name: columns[name] + new[name] for name in SUMS})


async def _merge_histograms(connection: AsyncConnection, buckets: Mapping[_Bucket, Mapping[int, Any]]) -> None:
    rows: list[dict[str, Any]] = []
    for (width_s, start), found in buckets.items():
        stored = await _stored_histograms(connection, width_s, start, list(found))
        for number, (_, counts) in found.items():
            row: dict[str, Any] = {"width_s": width_s, "bucket_unix_ms": start, "slice_id": number}
            for name, more, before in zip(MEASURES, counts, stored.get(number, (None,) * 6), strict=True):
                row[name] = histogram.extended(before, more)
            rows.append(row)
    await upsert(connection, HistogramRow, rows, lambda new: {name: new[name] for name in MEASURES})


async def upsert(
    connection: AsyncConnection,
    table: type[Base],
    rows: Sequence[dict[str, Any]],
    update: Callable[[Any], dict[str, Any]] | None = None,
) -> None:
    """Insert rows, or update those whose key exists with the values that ``update`` returns; None: keep them.

    PostgreSQL gets a whole batch as one array per column: one statement per row would be slower.
    """
    columns = table.__table__.columns
    if connection.dialect.name == "postgresql":
        arrays = [literal([row[column.name] for row in rows], ARRAY(column.type, dimensions=1)) for column in columns]
        given = func.unnest(*arrays).table_valued(*columns.keys()).render_derived()
        into = postgresql.insert(table).from_select(columns.keys(), select(*given.c))
        await connection.execute(_or_update(into, table, update))
    else:
        await connection.execute(_or_update(sqlite.insert(table), table, update), rows)


def _or_update(into: _Insert, table: type[Base], update: Callable[[Any], dict[str, Any]] | None) -> _Insert:
    if update is None:
        return into.on_conflict_do_nothing()
    key = [column.name for column in table.__table__.primary_key]
    return into.on_conflict_do_update(index_elements=key, set_=update(into.excluded))


async def _stored_histograms(
    connection: AsyncConnection, width_s: int, start_unix_ms: int, slice_ids: Sequence[int]
) -> dict[int, tuple[bytes | None, ...]]:
    columns = HistogramRow.__table__.columns
    found: dict[int, tuple[bytes | None, ...]] = {}
    for chunk in chunks(slice_ids):
        statement = select(columns.slice_id, *(columns[name] for name in MEASURES)).where(
            columns.width_s == width_s, columns.bucket_unix_ms == start_unix_ms, columns.slice_id.in_(chunk)
        )
        for number, *stored in await connection.execute(statement):
            found[number] = tuple(stored)
    return found


async def delete_minutes(engine: AsyncEngine, before_unix_ms: int) -> None:
    """Delete the rows of minutes before a time. Raises DatabaseUnavailable."""
    try:
        async with writing(engine) as connection:
            for table in (RollupRow, HistogramRow):
                is_old = and_(table.width_s == WIDTHS_S[0], table.bucket_unix_ms < before_unix_ms)
                await connection.execute(delete(table).where(is_old))
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(describe(error)) from error


async def _drop_empty(connection: AsyncConnection, buckets: Mapping[_Bucket, Mapping[int, Any]]) -> None:
    """Delete the buckets of slices without requests."""
    for (width_s, start), found in buckets.items():
        for chunk in chunks(list(found)):
            here = and_(RollupRow.width_s == width_s, RollupRow.bucket_unix_ms == start, RollupRow.slice_id.in_(chunk))
            empty = list(await connection.scalars(select(RollupRow.slice_id).where(here, RollupRow.requests == 0)))
            for table in (RollupRow, HistogramRow) if empty else ():
                gone = and_(table.width_s == width_s, table.bucket_unix_ms == start, table.slice_id.in_(empty))
                await connection.execute(delete(table).where(gone))


def chunks(ids: Sequence[_Id]) -> Iterator[Sequence[_Id]]:
    """Split ids into lists that fit into one statement."""
    for start in range(0, len(ids), LOOKUP_CHUNK):
        yield ids[start : start + LOOKUP_CHUNK]
