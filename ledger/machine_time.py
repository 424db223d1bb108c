"""Time that each worker was up and busy, from its heartbeats into ``instance_seconds``.

A heartbeat reports the worker's start and its busy time since then, so any two heartbeats cover the time
in between: the next heartbeat makes up for those that a writer missed. Rows keep the minimum and the maximum that
any writer has seen, so duplicate heartbeats change nothing. Times are by the worker's clock.
A worker's last half second is not counted, nor time that no writer received before its end. If a heartbeat
cannot be written, only its worker's time until the next heartbeat is lost.

A price applies to the whole quarter of an hour in which it was entered, as for hosted APIs: the first start
enters prices in the middle of a quarter, and machines have that price from the start of the quarter.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Struct
from nats.aio.msg import Msg
from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.apart import write_apart
from db.engine import writing
from db.money import MACHINE, nano_usd
from db.prices import PriceBook, load_prices
from db.set_aside import SetAside
from db.tables import InstanceRow
from ledger.store import MAX_USD_PER_HOUR
from protocol import subjects
from protocol.errors import ProtocolError
from protocol.job import Heartbeat, decode_heartbeat
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms

QUARTER_MS: Final = 900_000
MAX_CATCH_UP_MS: Final = 35 * 86_400_000  # time that no writer has received for longer than this is not counted
MAX_CLOCK_SKEW_MS: Final = 86_400_000  # of a worker's clock; a wrong clock could add years of machine time
FORGET_AFTER_FLUSHES: Final = 20  # without a heartbeat
NOTED_AGAIN_S: Final = 60.0  # heartbeats that are dropped, of one worker
MAX_NOTED: Final = 1000  # workers; a stolen one may use many names
MIN_COLUMNS: Final = ("up_from_unix_ms", "busy_from_ms")
MAX_COLUMNS: Final = ("up_until_unix_ms", "busy_until_ms")
PRICE_COLUMNS: Final = ("nano_usd_per_hour", "on_demand_nano_usd_per_hour")

log = logging.getLogger(__name__)


class Moment(Struct, frozen=True):
    """A moment in a worker's lifetime."""

    unix_ms: int
    busy_ms: int  # since its start


class _LastHeartbeat(Struct):
    beat: Heartbeat
    written: Moment | None = None  # the moment up to which it is in SQL; None: not looked up yet
    flushes: int = 0  # since its last heartbeat


class MachineTime:
    """Keeps each worker's last heartbeat, and writes them when flushed."""

    def __init__(self, bus: Bus, engine: AsyncEngine, set_aside: SetAside) -> None:
        self._bus = bus
        self._engine = engine
        self._set_aside = set_aside
        self._noted: dict[str, float] = {}  # by sender: when its last heartbeat was dropped (monotonic clock)
        self._last: dict[str, _LastHeartbeat] = {}  # by worker; those long silent are dropped

    async def start(self) -> None:
        """Subscribe to heartbeats. Raises BusError."""
        await self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)

    async def _on_heartbeat(self, message: Msg) -> None:
        if not message.data:  # the worker has signed off
            return
        sender = subjects.worker_of_heartbeat(message.subject)
        try:
            beat = decode_heartbeat(message.data, sender)
            _check_plausible(beat)
            self.receive(beat)
        except ProtocolError as error:
            self._drop(sender, str(error))

    def _drop(self, sender: str, reason: str) -> None:
        """Report a dropped heartbeat; rate-limited per worker."""
        now_s = time.monotonic()
        if now_s - self._noted.get(sender, float("-inf")) < NOTED_AGAIN_S:
            return
        if len(self._noted) >= MAX_NOTED:
            del self._noted[next(iter(self._noted))]
        self._noted[sender] = now_s
        log.warning("dropped a heartbeat of %s: %s", sender, reason)
        self._set_aside.note("machine time", sender, sender, reason)

    def receive(self, beat: Heartbeat) -> None:
        """Keep a heartbeat until it is written."""
        last = self._last.get(beat.worker_id)
        if last is None:
            self._last[beat.worker_id] = _LastHeartbeat(beat)
        elif beat.sent_unix_ms > last.beat.sent_unix_ms:
            last.beat, last.flushes = beat, 0

    async def flush(self) -> None:
        """Write the heartbeats received since the last flush. Raises DatabaseUnavailable; then call again."""
        await write_apart([last for last in self._last.values() if not last.flushes], self._write, self._lose)
        for worker_id, last in list(self._last.items()):
            if not last.flushes:
                last.written = Moment(last.beat.sent_unix_ms, last.beat.busy_ms)
            last.flushes += 1
            if last.flushes > FORGET_AFTER_FLUSHES:
                del self._last[worker_id]

    def _lose(self, last: _LastHeartbeat, reason: str) -> None:
        worker_id = last.beat.worker_id
        log.error("cannot store the machine time of %s: %s", worker_id, reason)
        self._set_aside.note("machine time", worker_id, worker_id, reason)

    async def _write(self, fresh: Sequence[_LastHeartbeat]) -> None:
        async with writing(self._engine) as connection:
            await self._look_up(connection, [last for last in fresh if last.written is None])
            prices = await load_prices(connection)
            rows = [row for last in fresh for row in _rows(last.beat, last.written, prices)]
            if rows:
                await connection.execute(_upsert(connection.dialect.name), rows)

    async def _look_up(self, connection: AsyncConnection, unknown: Sequence[_LastHeartbeat]) -> None:
        """Set ``written`` of these workers from the rows of an earlier writer."""
        worker_ids = [last.beat.worker_id for last in unknown]
        oldest = min((last.beat.sent_unix_ms for last in unknown), default=0) - MAX_CATCH_UP_MS
        statement = select(
            InstanceRow.worker_id, func.max(InstanceRow.up_until_unix_ms), func.max(InstanceRow.busy_until_ms)
        ).where(InstanceRow.bucket_unix_ms >= oldest, InstanceRow.worker_id.in_(worker_ids))
        found = {
            row[0]: Moment(row[1], row[2])
            for row in await connection.execute(statement.group_by(InstanceRow.worker_id))
        }
        for last in unknown:
            last.written = found.get(last.beat.worker_id, Moment(last.beat.started_unix_ms, 0))


def _check_plausible(beat: Heartbeat) -> None:
    """Raise ProtocolError for an implausible heartbeat."""
    if abs(beat.sent_unix_ms - unix_now_ms()) > MAX_CLOCK_SKEW_MS:
        raise ProtocolError(f"the clock of {beat.worker_id} is off by more than a day: {beat.sent_unix_ms}")
    if not (0 <= beat.usd_per_hour <= MAX_USD_PER_HOUR and min(beat.busy_ms, beat.started_unix_ms) >= 0):
        raise ProtocolError(f"{beat.worker_id} reported an implausible price or time")


def _rows(beat: Heartbeat, since: Moment | None, prices: PriceBook) -> Iterator[dict[str, Any]]:
    """Yield a row for each quarter of an hour from ``since`` to the heartbeat."""
    until = Moment(beat.sent_unix_ms, beat.busy_ms)
    if since is None or since.unix_ms >= until.unix_ms:
        return
    at = max(since.unix_ms, until.unix_ms - MAX_CATCH_UP_MS)
    while at < until.unix_ms:
        bucket = at // QUARTER_MS * QUARTER_MS
        end = min(bucket + QUARTER_MS, until.unix_ms)
        price = prices.at(MACHINE, beat.pool, bucket + QUARTER_MS - 1)
        configured = None if price is None else price.machine_nano_usd
        yield {
            "bucket_unix_ms": bucket,
            "worker_id": beat.worker_id,
            "pool": beat.pool,
            "provider": beat.provider,
            "region": beat.region,
            "tier": beat.tier,
            "up_from_unix_ms": at,
            "up_until_unix_ms": end,
            "busy_from_ms": _busy_ms(since, until, at),
            "busy_until_ms": _busy_ms(since, until, end),
            "nano_usd_per_hour": nano_usd(beat.usd_per_hour) if configured is None else configured,
            "on_demand_nano_usd_per_hour": None if price is None else price.on_demand_nano_usd,
        }
        at = end


def _busy_ms(since: Moment, until: Moment, unix_ms: int) -> int:
    """Interpolate the busy time linearly between two moments."""
    share = (unix_ms - since.unix_ms) / (until.unix_ms - since.unix_ms)
    return since.busy_ms + round((until.busy_ms - since.busy_ms) * share)


def _upsert(dialect: str) -> postgresql.Insert | sqlite.Insert:
    is_postgresql = dialect == "postgresql"
    insert = postgresql.insert(InstanceRow) if is_postgresql else sqlite.insert(InstanceRow)
    least, greatest = (func.least, func.greatest) if is_postgresql else (func.min, func.max)
    columns = InstanceRow.__table__.columns
    merged = {
        **{name: least(columns[name], insert.excluded[name]) for name in MIN_COLUMNS},
        **{name: greatest(columns[name], insert.excluded[name]) for name in MAX_COLUMNS},
        **{name: insert.excluded[name] for name in PRICE_COLUMNS},
    }
    return insert.on_conflict_do_update(index_elements=["bucket_unix_ms", "worker_id"], set_=merged)
