"""Writing usage records to SQL with their rollups, exactly once even if they are redelivered.

One transaction at a time writes the ledger: SQLite has one writer anyway, and on PostgreSQL an advisory lock makes
other ledger writers wait for the few milliseconds of a batch. Therefore a row that a lookup does not find is new, and
for a row that replaces another, the values to subtract from the rollups are known.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import asyncpg
import msgspec
from sqlalchemy import ColumnElement, Text, and_, any_, delete, func, insert, literal, select
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.orm import InstrumentedAttribute

from db.engine import SQL_ERRORS, DatabaseUnavailable, describe, is_refusal, writing
from db.prices import PriceBook, load_prices
from db.tables import AttemptRow, Base, RequestRow
from ledger.refusals import write_refusals
from ledger.rollups import RollupDelta, apply
from ledger.tags import TagDelta, apply_tags
from protocol.errors import ErrorCode
from protocol.refusals import RefusalCount, RefusalRecord
from protocol.usage import AttemptRecord, RequestRecord, UsageRecord, tags_text

MAX_TOKENS: Final = 100_000_000  # per record: ten times the longest context, for several choices
MAX_MS: Final = 30 * 24 * 3_600_000  # likewise
MAX_USD_PER_HOUR: Final = 1_000_000.0

Row = dict[str, Any]  # column → value


class RecordRefused(Exception):
    """One of the records can never be stored: a number out of range, or a character that the database cannot store."""


async def store_records(engine: AsyncEngine, records: Sequence[UsageRecord]) -> None:
    """Insert the records in one transaction, skip those already stored, and count the new ones.

    Intents are skipped: they are for ``ledger.intents``.

    Raises RecordRefused (nothing was stored) or DatabaseUnavailable (unknown whether anything was: call again).
    """
    requests = [_request_row(record) for record in records if isinstance(record, RequestRecord)]
    attempts = [_attempt_row(record) for record in records if isinstance(record, AttemptRecord)]
    refusals = [record for record in records if isinstance(record, RefusalCount | RefusalRecord)]
    try:
        async with writing(engine) as connection:
            if requests:
                await write_requests(connection, requests, replace_lost=True)
            if attempts:
                await _write_attempts(connection, attempts)
            if refusals:
                await write_refusals(connection, refusals)
    except OverflowError as error:  # sqlite3's own, for integers beyond 64 bits
        raise RecordRefused(describe(error)) from error
    except SQL_ERRORS as error:
        if is_refusal(error):
            raise RecordRefused(describe(error)) from error
        raise DatabaseUnavailable(describe(error)) from error
    except Exception as error:  # a bug that one of the records triggers; the others must not wait
        raise RecordRefused(f"{type(error).__name__}: {error}") from error


async def write_requests(connection: AsyncConnection, rows: Iterable[Mapping[str, Any]], *, replace_lost: bool) -> int:
    """Write the requests not stored yet, with their charge, and count them; return how many. Call inside ``writing``.

    With ``replace_lost``, the rows come from the gateways themselves, and replace rows that were written for a gateway
    that died (ledger.abandoned).
    """
    given: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        given.setdefault(row["request_id"], row)
    lost = await known_requests(connection, given)
    replaced = {request_id for request_id, is_lost in lost.items() if is_lost and replace_lost}
    tally, tags = RollupDelta(), TagDelta()
    if replaced:
        is_replaced = and_(
            is_one_of(connection, RequestRow.request_id, replaced), received_with(RequestRow, given.values())
        )
        before = [dict(row) for row in (await connection.execute(select(RequestRow).where(is_replaced))).mappings()]
        tally.add(before, sign=-1)
        tags.add(before, sign=-1)
        await connection.execute(delete(RequestRow).where(is_replaced))
    prices = await load_prices(connection)
    new = [_priced(row, prices) for row in given.values() if row["request_id"] not in lost.keys() - replaced]
    tally.add(new)
    tags.add(new)
    await insert_rows(connection, RequestRow, new)
    await apply(connection, tally)
    await apply_tags(connection, tags)
    return len(new)


async def known_requests(connection: AsyncConnection, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Return the requests that have a row → whether it was written for a gateway that died."""
    statement = select(RequestRow.request_id, RequestRow.error_code).where(
        is_one_of(connection, RequestRow.request_id, rows), received_with(RequestRow, rows.values())
    )
    return {row.request_id: row.error_code == ErrorCode.GATEWAY_LOST for row in await connection.execute(statement)}


async def _write_attempts(connection: AsyncConnection, rows: Iterable[Row]) -> None:
    given: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        given.setdefault((row["request_id"], row["attempt"], row["worker_id"]), row)
    request_ids = {request_id for request_id, _, _ in given}
    key = (AttemptRow.request_id, AttemptRow.attempt, AttemptRow.worker_id)
    statement = select(*key).where(
        is_one_of(connection, AttemptRow.request_id, request_ids), received_with(AttemptRow, given.values())
    )
    for stored in await connection.execute(statement):
        given.pop(tuple(stored), None)
    await insert_rows(connection, AttemptRow, list(given.values()))


async def insert_rows(connection: AsyncConnection, table: type[Base], rows: Sequence[Row]) -> None:
    """Insert rows that are known to be new; on PostgreSQL by one COPY."""
    if not rows:
        return
    if connection.dialect.name != "postgresql":
        await connection.execute(insert(table), rows)
        return
    columns = [column.name for column in table.__table__.columns]
    driver: asyncpg.Connection = (await connection.get_raw_connection()).driver_connection
    await driver.copy_records_to_table(
        table.__tablename__, columns=columns, records=[tuple([row[name] for name in columns]) for row in rows]
    )


def is_one_of(
    connection: AsyncConnection, column: InstrumentedAttribute[str], values: Collection[str]
) -> ColumnElement[bool]:
    """Build the condition that a column has one of these values, with a single parameter."""
    if connection.dialect.name == "postgresql":
        return column == any_(literal(list(values), ARRAY(Text)))
    listed = func.json_each(msgspec.json.encode(list(values)).decode()).table_valued("value")
    return column.in_(select(listed.c.value))


def received_with(table: type[RequestRow | AttemptRow], rows: Collection[Mapping[str, Any]]) -> ColumnElement[bool]:
    """Build the condition that rows were received in the same time span as ``rows``.

    A redelivered record has the same time, so other partitions need not be searched.
    """
    times = [row["received_unix_ms"] for row in rows]
    return table.received_unix_ms.between(min(times), max(times))


def _row(record: UsageRecord) -> Row:
    row = msgspec.structs.asdict(record)
    del row["v"]
    return row


def _request_row(record: RequestRecord) -> Row:
    """Build the row of a gateway's record. Its counts come from workers. Raises RecordRefused."""
    _check_plausible(record, f"request {record.request_id}", record.attempts)
    return {**_row(record), "tags": tags_text(record.tags)}


def _attempt_row(record: AttemptRecord) -> Row:
    """Build the row of a worker's record. Raises RecordRefused."""
    what = f"attempt {record.request_id}.{record.attempt}"
    _check_plausible(record, what, record.attempt, record.resumed_tokens)
    if record.cached_tokens > record.prompt_tokens:
        raise RecordRefused(f"{what} has more cached tokens than prompt tokens")
    if not 0 <= record.usd_per_hour <= MAX_USD_PER_HOUR:
        raise RecordRefused(f"the machine price of {what} is implausible")
    return _row(record)


def _check_plausible(record: RequestRecord | AttemptRecord, what: str, *further_counts: int) -> None:
    """Raise RecordRefused for implausible numbers: sums over them could exceed SQL's range."""
    counts = (record.prompt_tokens, record.cached_tokens, record.completion_tokens, record.preemptions or 0)
    if not all(0 <= count <= MAX_TOKENS for count in (*counts, *further_counts)):
        raise RecordRefused(f"counts of {what} are implausible")
    phases = (record.queue_ms, record.ttft_ms, record.engine_queue_ms, record.prefill_ms, record.decode_ms)
    times_ms = (record.total_ms, *[phase for phase in phases if phase is not None])
    if not all(0 <= time_ms <= MAX_MS for time_ms in times_ms):
        raise RecordRefused(f"times of {what} are implausible")


def _priced(row: Mapping[str, Any], prices: PriceBook) -> Row:
    # Without a pool, no worker accepted the request: nothing was computed and nothing is charged.
    ran = row["pool"] is not None
    tokens = (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]) if ran else (0, 0, 0)
    return {**row, "charge_nano_usd": prices.charge_nano_usd(row["model"], row["received_unix_ms"], *tokens)}
