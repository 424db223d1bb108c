"""The ledger writer: usage records from the USAGE stream into SQL, in batches.

    stored ──delivered──> held ──committed──> acknowledged (intents: see ledger.intents)
                           │ └──SQL down──> held and retried indefinitely; on SIGTERM handed back
                           └──unreadable or refused by SQL──> parked alone (ledger.parked)

A record is acknowledged only after its commit, and inserting it twice does nothing, so a crash anywhere between
delivery and acknowledgment costs one redelivery and no row. An unexpected exception in a message or a periodic job
ends neither the writer nor another job: it would recur after a restart, and block all other records.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct
from nats.aio.msg import Msg
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import DatabaseUnavailable
from db.set_aside import SetAside
from ledger.abandoned import AbandonedRequests
from ledger.intents import Intents
from ledger.machine_time import MachineTime
from ledger.parked import Replays, park
from ledger.partitions import DAYS_AHEAD, create_partitions
from ledger.refusals import tidy_refusals
from ledger.retention import Retention, kept_since_unix_ms
from ledger.rollups import MINUTES_KEPT_MS, delete_minutes
from ledger.settings import LedgerSettings
from ledger.store import RecordRefused, store_records
from protocol import subjects
from protocol.errors import BusError
from protocol.job import encode
from protocol.nats import pull
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms
from protocol.nats.pull import Delivery, PullConsumer
from protocol.process import backoff_s, wait_for
from protocol.usage import AttemptRecord, RequestIntent, UnreadUsage, UsageRecord, encode_usage, read_usage

PULL_CHECK_S: Final = 0.5  # how often to check whether a pull is complete
MACHINE_TIME_PERIOD_S: Final = 15.0
RETENTION_PERIOD_S: Final = 600.0
PARTITIONS_PERIOD_S: Final = 600.0

log = logging.getLogger(__name__)


class _Entry(Struct):
    delivery: Delivery
    records: list[UsageRecord]


class LedgerWriter:
    """Writes until stopped. Holds at most two batches of records."""

    def __init__(self, bus: Bus, engine: AsyncEngine, settings: LedgerSettings, stopping: asyncio.Event) -> None:
        self._bus = bus
        self._engine = engine
        self._stopping = stopping
        self._settings = settings
        self._held: deque[Delivery] = deque()  # bounded by what _pull requests: two batches
        self._unwritten: list[
            _Entry
        ] = []  # to be handed back at the end: at most the messages held when stopping was set
        self._purged_s = 0.0  # monotonic clock
        self._set_aside = SetAside(engine)
        self._intents = Intents(engine, settings.hold_intents_s)
        self._abandoned = AbandonedRequests(bus, engine, settings.abandoned_after_ms)
        self._machine_time = MachineTime(bus, engine, self._set_aside)
        self._replays = Replays(bus)
        self._unparked: set[int] = set()  # sequences of held messages that must be redelivered
        self._retention = Retention(engine, settings.retention_days)
        self._deleted_s = 0.0  # when it last found no more old rows; monotonic clock
        self._timed_s = 0.0  # when machine time was last written; monotonic clock
        self._partitioned_s = -PARTITIONS_PERIOD_S  # when it last created missing partitions; monotonic clock
        self._written_until_unix_ms = (
            0  # by the stream's clock: records stored before are in SQL, or another writer has them
        )
        self._on_ready: Callable[[bool], None] | None = None
        self._sql_answers = False
        self._sql_answered_s = 0.0  # when SQL last did; monotonic clock
        self._arrived = asyncio.Event()  # set at a full batch, at the end of the stream, and when stopping
        self._consumer = PullConsumer(
            bus, subjects.USAGE_STREAM, subjects.LEDGER_CONSUMER, self._on_delivery, on_end=self._arrived.set
        )

    async def run(self, on_ready: Callable[[bool], None] | None = None) -> None:
        """Pull, write and acknowledge until ``stopping`` is set; then finish the records held.

        ``on_ready`` is called with True when SQL accepts rows, with False when it does not, and so on.
        """
        await self._consumer.start()
        await self._machine_time.start()
        self._bus.on_reconnect(self._on_reconnected)
        await self._bus.listen(subjects.LEDGER_WANTED, self._on_wanted)
        await self._measure_clock()
        self._on_ready = on_ready
        self._note_answer()
        log.info("writing usage records to %s", self._engine.url.render_as_string(hide_password=True))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._wake_when_stopping(), name="ledger wake")
                group.create_task(self._look_for_abandoned(), name="abandoned requests")
                group.create_task(self._write(), name="ledger batches")
        finally:
            await self._consumer.stop()
        while self._held:
            await self._write_batch()
        await self._write_intents(flush=True)
        # Only after our pulls have ended: otherwise the records would be redelivered to us.
        unwritten = [entry.delivery for entry in self._unwritten]
        await self._answer(unwritten + self._intents.release_all(), pull.nak)

    async def _write(self) -> None:
        while not self._stopping.is_set():
            began_s = time.monotonic()
            await self._receive_batch()
            await _guarded("creating partitions", self._create_partitions)
            await self._write_batch()
            await self._write_intents()
            await _guarded("purging written records", self._purge_written)
            await _guarded("replaying parked records", self._replays.replay_due)
            await _guarded("recording machine time", self._record_machine_time)
            await _guarded("deleting old rows", self._delete_old)
            await _guarded("telling what was set aside", self._set_aside.flush)
            if not self._held:
                await wait_for(self._stopping, began_s + self._settings.batch_wait_s - time.monotonic())

    # --- receiving ----------------------------------------------------------------------------------------------------

    async def _receive_batch(self) -> None:
        """Request the waiting messages, at most a batch, and wait until they have arrived."""
        requested_unix_ms = int(self._bus.clock.now_s() * 1000)
        is_requested = not self._held and await self._pull()
        while self._has_capacity and self._consumer.outstanding() and not self._stopping.is_set():
            self._arrived.clear()
            await wait_for(self._arrived, PULL_CHECK_S)
        if is_requested and not self._held and self._consumer.found_all:
            self._written_until_unix_ms = max(self._written_until_unix_ms, requested_unix_ms)
        if not self._has_capacity:
            await self._pull()  # the next batch arrives while this one is written

    async def _pull(self) -> bool:
        # Polled with expires_s=0: a server with a waiting pull sends each message alone and records every delivery,
        # which costs twice as much CPU on both sides.
        if self._consumer.outstanding() or not self._bus.connected:
            return False
        try:
            await self._consumer.pull(self._settings.batch_records, expires_s=0)
        except BusError as error:
            log.warning("cannot pull usage records, will retry: %s", error)
            return False
        return True

    @property
    def _has_capacity(self) -> bool:
        return len(self._held) < self._settings.batch_records

    async def _on_delivery(self, delivery: Delivery) -> None:
        self._held.append(delivery)
        if not self._has_capacity:
            self._arrived.set()

    async def _on_reconnected(self) -> None:
        self._consumer.forget_pulls()  # the stream and its durable are on disk, parked pulls are not

    def _on_wanted(self, message: Msg) -> None:
        try:
            self._intents.want(int(message.data))
        except ValueError:
            log.warning("ignored a request with an invalid stream sequence: %r", message.data[:40])

    async def _wake_when_stopping(self) -> None:
        await self._stopping.wait()
        self._arrived.set()

    # --- writing ------------------------------------------------------------------------------------------------------

    async def _write_batch(self) -> None:
        deliveries = [self._held.popleft() for _ in range(min(len(self._held), self._settings.batch_records))]
        entries = [await self._decoded(delivery) for delivery in deliveries]
        if entries:
            await self._store(entries)

    async def _purge_written(self) -> None:
        """Once a period, purge the records that are in SQL from the stream, so that its limit applies to the others."""
        if time.monotonic() - self._purged_s < self._settings.purge_period_s:
            return
        self._purged_s = time.monotonic()
        try:
            info = await self._bus.api(f"CONSUMER.INFO.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}")
            done_sequence = int(info["ack_floor"]["stream_seq"])
            if done_sequence > 0:
                await self._bus.api(f"STREAM.PURGE.{subjects.USAGE_STREAM}", {"seq": done_sequence + 1})
        except BusError as error:
            log.warning("cannot purge written usage from the stream, will retry: %s", error)

    async def _write_intents(self, *, flush: bool = False) -> None:
        """Write the intents whose records have not arrived for a while, or all of them."""
        try:
            while (done := await self._intents.write_due(flush=flush)) is not None:
                await self._answer(done, pull.ack)
        except DatabaseUnavailable as error:
            log.warning("cannot write intents, will retry: %s", error)

    async def _look_for_abandoned(self) -> None:
        """Once a period, write rows for requests that no gateway holds."""
        while not await wait_for(self._stopping, self._settings.abandoned_period_s):
            await self._measure_clock()
            await _guarded("recording requests of gateways that died", self._record_abandoned)

    async def _record_abandoned(self) -> None:
        began_s = time.monotonic()
        try:
            await self._abandoned.check()
            self._note_answer()
            await self._abandoned.record_overdue(self._written_until_unix_ms)
        except DatabaseUnavailable as error:
            self._note_failure(began_s)
            log.warning("cannot record requests of gateways that died, will retry: %s", error)

    def _note_answer(self) -> None:
        self._sql_answered_s = time.monotonic()
        self._report(answers=True)

    def _note_failure(self, began_s: float) -> None:
        """Report that SQL does not answer, unless it has answered another job since this one began.

        Both wait for the same lock: one job may wait too long for it while the other writes.
        """
        if self._sql_answered_s <= began_s:
            self._report(answers=False)

    def _report(self, *, answers: bool) -> None:
        """Report a change of readiness."""
        if answers != self._sql_answers and self._on_ready is not None:
            self._on_ready(answers)
        self._sql_answers = answers

    async def _measure_clock(self) -> None:
        """Measure the stream's clock. With a clock a minute behind, requests would immediately count as abandoned."""
        try:
            await self._bus.clock.measure()
        except BusError as error:
            log.warning("the queue server's time is unknown: %s", error)

    async def _record_machine_time(self) -> None:
        """Once a period, write the time that workers have been up."""
        if time.monotonic() - self._timed_s < MACHINE_TIME_PERIOD_S:
            return
        self._timed_s = time.monotonic()
        try:
            await self._machine_time.flush()
        except DatabaseUnavailable as error:
            log.warning("cannot write machine time, will retry: %s", error)

    async def _create_partitions(self) -> None:
        """Once a period, create the next days' partitions. A row that arrives before its partition is not lost."""
        if time.monotonic() - self._partitioned_s < PARTITIONS_PERIOD_S:
            return
        self._partitioned_s = time.monotonic()
        try:
            await create_partitions(self._engine, unix_now_ms(), 1 + DAYS_AHEAD)
        except DatabaseUnavailable as error:
            log.warning("cannot create the next days' partitions, will retry: %s", error)

    async def _delete_old(self) -> None:
        """Once a period, delete rows past their retention, a few between two batches, until none are left."""
        if time.monotonic() - self._deleted_s < RETENTION_PERIOD_S:
            return
        before_s, self._deleted_s = self._deleted_s, time.monotonic()
        try:
            if await self._retention.delete_some():
                self._deleted_s = before_s
            else:
                days = self._settings.retention_days
                await tidy_refusals(self._engine, None if days is None else kept_since_unix_ms(days))
                await delete_minutes(self._engine, unix_now_ms() - MINUTES_KEPT_MS)
        except DatabaseUnavailable as error:
            log.warning("cannot delete old rows, will retry: %s", error)

    async def _decoded(self, delivery: Delivery) -> _Entry:
        records, unread = read_usage(delivery.payload)
        if unread:
            await self._park(delivery, unread)
        return _Entry(delivery, _by_their_sender(delivery, records))

    async def _park(self, delivery: Delivery, unread: list[UnreadUsage], *, is_refused: bool = False) -> None:
        """Park undecodable records, or have the message redelivered later. Its other records are written now."""
        try:
            await park(self._bus, delivery, unread, is_refused=is_refused)
        except BusError as error:
            log.warning("cannot park records of message %d: %s", delivery.stream_sequence, error)
            self._unparked.add(delivery.stream_sequence)
            return
        sender = subjects.worker_of_usage(delivery.subject)
        for number, record in enumerate(unread, 1):
            item = f"record {number} of {len(unread)} in message {delivery.stream_sequence}"
            self._set_aside.note("usage record", item, sender, record.reason)

    async def _store(self, entries: list[_Entry]) -> None:
        """Commit, then acknowledge; or hand back, once stopping."""
        try:
            records = [record for entry in entries for record in entry.records]
            is_stored = await self._commit(records, entries[-1].delivery.stored_unix_ms)
        except RecordRefused:
            await self._store_apart(entries)
            return
        if is_stored:
            await self._acknowledge_written(entries)
        else:
            self._unwritten += entries

    async def _commit(self, records: list[UsageRecord], stored_unix_ms: int) -> bool:
        """Insert in one transaction, retrying while SQL is down; False once stopping. Raises RecordRefused.

        ``stored_unix_ms``: when the stream stored the last of them.
        """
        failures = 0
        for wait_s in backoff_s():
            began_s = time.monotonic()
            try:
                await store_records(self._engine, records)
                self._written_until_unix_ms = max(self._written_until_unix_ms, stored_unix_ms)
                self._note_answer()
                break
            except DatabaseUnavailable as error:
                failures += 1
                self._note_failure(began_s)
                if failures == 1:
                    log.error("cannot write usage, %d records are waiting: %s", len(records), error)  # noqa: TRY400
                if await wait_for(self._stopping, wait_s):
                    return False
        if failures:
            log.warning("writing usage again after %d failed attempts", failures + 1)
        return True

    async def _store_apart(self, entries: list[_Entry]) -> None:
        """Write each half separately, down to single records, so that only the record that SQL rejects is parked."""
        if len(entries) > 1:
            middle = len(entries) // 2
            for half in (entries[:middle], entries[middle:]):
                await self._store(half)
            return
        entry = entries[0]
        refused: list[UnreadUsage] = []
        for record in entry.records:
            try:
                if not await self._commit([record], entry.delivery.stored_unix_ms):
                    self._unwritten.append(entry)
                    return
            except RecordRefused as error:
                refused.append(UnreadUsage(encode_usage([encode(record)]), str(error)))
        if refused:
            await self._park(entry.delivery, refused, is_refused=True)
        await self._acknowledge_written([entry])

    async def _acknowledge_written(self, entries: list[_Entry]) -> None:
        """Acknowledge the messages that are in SQL; intents are only held."""
        written: list[Delivery] = []
        for entry in entries:
            has_intents = any(isinstance(record, RequestIntent) for record in entry.records)
            self._intents.hold(entry.records, entry.delivery if has_intents else None)
            if not has_intents:
                written.append(entry.delivery)
        await self._answer(written, pull.ack)

    async def _answer(self, deliveries: list[Delivery], answer: Callable[[Bus, Delivery], Awaitable[None]]) -> None:
        # Acknowledgments are not confirmed: a lost one costs a redelivery, which inserts nothing.
        try:
            for delivery in deliveries:
                if delivery.stream_sequence in self._unparked:
                    self._unparked.discard(delivery.stream_sequence)
                    await pull.nak(self._bus, delivery, self._settings.retry_parking_s)
                else:
                    await answer(self._bus, delivery)
        except BusError as error:
            log.warning("some of %d messages will be redelivered: %s", len(deliveries), error)


async def _guarded(what: str, job: Callable[[], Awaitable[None]]) -> None:
    """Run a periodic job. An unexpected exception is logged and does not affect other jobs."""
    try:
        await job()
    except Exception:
        log.exception("%s failed, will retry", what)


def _by_their_sender(delivery: Delivery, records: list[UsageRecord]) -> list[UsageRecord]:
    """Return the records that their sender may send: on a worker's subject, only those of its attempts."""
    if not delivery.subject.startswith(f"{subjects.ATTEMPT_USAGE_SUBJECT}."):
        return records
    own: list[UsageRecord] = [
        record
        for record in records
        if isinstance(record, AttemptRecord)
        and subjects.attempt_usage_subject(record.pool, record.worker_id) == delivery.subject
    ]
    if len(own) < len(records):
        log.error("dropped %d usage records: %s is not their worker", len(records) - len(own), delivery.subject)
    return own
