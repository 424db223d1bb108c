"""An outbox of usage records: keeps each until the queue server has stored it in the USAGE stream.

    put ──> waiting ──MESSAGE_SPACING_S or MESSAGE_RECORDS──> in flight (at most WINDOW messages) ──> stored
               │                                                 ├──not stored: retried after a wait──┘
               └──awaited: at once ──────────────────────────────┴──for SPOOL_AFTER_S──> spooled ──> stored

Each stored message costs the server an fsync, so records share messages. An awaited record is sent at once while few
messages are in flight, together with all waiting records; later ones share the next message. The server drops a second
message with the same id, so a message without a reply is published again. Records that the server cannot store go to
the spool on this machine's disk, if any, and from there into the stream once it accepts messages again. The caller
stops taking new work while the outbox is ``full``; records of running work may still be put.
"""

import asyncio
import fcntl
import logging
import os
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from protocol.errors import BusError, PayloadTooLarge
from protocol.nats.bus import Bus
from protocol.process import backoff_s, wait_for
from protocol.usage import encode_usage

log = logging.getLogger(__name__)


MAX_SPOOL_BYTES: Final = 256 * 1024 * 1024  # some 500,000 records
SEGMENT_BYTES: Final = 4 * 1024 * 1024  # when it is reached, a new segment begins; a segment is read at once
SUFFIX: Final = ".spool"
_HEAD_BYTES: Final = 8


Record = tuple[str, bytes]  # id, encoded record

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Record)


class SpoolFull(OSError):
    """Raised when the spool has reached its limit, or its disk is full."""


class _Segment(Struct):
    path: Path
    descriptor: int  # holds the lock
    size_bytes: int


class Spool:
    """Segments of this process, oldest first. Thread-safe."""

    def __init__(self, folder: Path, max_bytes: int = MAX_SPOOL_BYTES) -> None:
        """Take over segments of dead processes in ``folder``, which need not exist yet. Raises OSError."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self._segments: deque[_Segment] = deque(_left_behind(folder))
        self._is_growing = False  # whether the last segment accepts more entries

    @property
    def size_bytes(self) -> int:
        """Size of all segments."""
        return sum(segment.size_bytes for segment in self._segments)

    def append(self, records: Sequence[Record]) -> None:
        """Add all records, or none. Raises SpoolFull, or OSError for a failing disk."""
        entries = b"".join(map(_entry, records))
        with self._lock:
            if self.size_bytes + len(entries) > self._max_bytes:
                raise SpoolFull(f"{self._folder} holds {self.size_bytes} bytes of at most {self._max_bytes}")
            if not self._is_growing or self._segments[-1].size_bytes >= SEGMENT_BYTES:
                self._segments.append(_begin(self._folder))
                self._is_growing = True
            segment = self._segments[-1]
            try:
                _write(segment, entries)
            except OSError:
                os.ftruncate(segment.descriptor, segment.size_bytes)
                raise

    def oldest(self) -> list[Record]:
        """Close the oldest segment for new entries; return its records, empty if there is none."""
        with self._lock:
            if len(self._segments) == 1:
                self._is_growing = False
            return _read(self._segments[0]) if self._segments else []

    def drop_oldest(self) -> None:
        """Drop the records that ``oldest`` returned, after they are stored elsewhere. Raises OSError."""
        with self._lock:
            segment = self._segments.popleft()
            segment.path.unlink(missing_ok=True)
            os.close(segment.descriptor)

    def close(self) -> None:
        """Unlock the remaining segments for other processes."""
        with self._lock:
            for segment in self._segments:
                os.close(segment.descriptor)
            self._segments.clear()


def _entry(record: Record) -> bytes:
    body = _encode(record)
    return len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body


def _begin(folder: Path) -> _Segment:
    # Locked before it is named: other processes take over named segments without a lock.
    path = folder / f"{uuid.uuid4().hex}{SUFFIX}"
    nameless = path.with_suffix(".new")
    descriptor = os.open(nameless, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    nameless.rename(path)
    _sync_folder(folder)
    return _Segment(path, descriptor, 0)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(segment: _Segment, entries: bytes) -> None:
    rest = memoryview(entries)
    while rest:
        rest = rest[os.write(segment.descriptor, rest) :]
    os.fsync(segment.descriptor)
    segment.size_bytes += len(entries)


def _left_behind(folder: Path) -> list[_Segment]:
    """Take over unlocked segments, oldest first."""
    taken = [segment for path in folder.glob(f"*{SUFFIX}") if (segment := _take_over(path)) is not None]
    return sorted(taken, key=lambda segment: os.fstat(segment.descriptor).st_mtime_ns)


def _take_over(path: Path) -> _Segment | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    except FileNotFoundError:  # its owner has just deleted it
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        facts = os.fstat(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if facts.st_nlink == 0:  # deleted between the two calls above
        os.close(descriptor)
        return None
    return _Segment(path, descriptor, facts.st_size)


def _read(segment: _Segment) -> list[Record]:
    content = segment.path.read_bytes()
    records: list[Record] = []
    at = 0
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        body = content[at + _HEAD_BYTES : at + _HEAD_BYTES + length]
        # A power failure may leave zeros, whose checksum is valid.
        if not 0 < length == len(body) or zlib.crc32(body) != int.from_bytes(content[at + 4 : at + 8], "big"):
            log.error("%s: dropped %d unreadable bytes at its end", segment.path, len(content) - at)
            break
        records.append(_decoder.decode(body))
        at += _HEAD_BYTES + length
    return records


# --- outbox -----------------------------------------------------------------------------------------------------------

WINDOW: Final = 16  # messages in flight
AWAITED_WINDOW: Final = 2  # messages in flight from which on awaited records share one
MESSAGE_SPACING_S: Final = 0.02  # between two messages, unless full; a crash loses records of at most this age
MESSAGE_RECORDS: Final = 64
MESSAGE_BYTES: Final = 256 * 1024
CAPACITY_BYTES: Final = 64 * 1024 * 1024  # in memory
SPOOL_AFTER_S: Final = 1.0  # without a stored message; longer than an fsync on a busy disk
SPOOL_LIMIT_S: Final = 8.0  # at shutdown: longer than the detection of an unstored message and an fsync


class _Entry(Struct):
    record: Record
    kept: asyncio.Future[None]
    is_awaited: bool


class Outbox:
    """Publishes records to one subject, each until it is stored. Records are sent only while ``run`` runs."""

    def __init__(
        self,
        bus: Bus,
        subject: str,
        capacity: int,
        *,
        spool: Spool | None = None,
        capacity_bytes: int = CAPACITY_BYTES,
        spacing_s: float = MESSAGE_SPACING_S,
    ) -> None:
        """Make an outbox that is full from ``capacity`` records or ``capacity_bytes`` on.

        ``spacing_s``: between two messages that are not full.
        """
        self._capacity_bytes = capacity_bytes
        self._spacing_s = spacing_s
        self._bus = bus
        self._subject = subject
        self._capacity = capacity
        self._spool = spool
        self._waiting: deque[_Entry] = deque()
        self._awaited = 0  # of the waiting records
        self._in_flight = 0  # records
        self._messages = 0  # in flight
        self._bytes = 0  # waiting and in flight
        self._left_s = float("-inf")  # when the last message was sent; monotonic clock
        self._has_room = asyncio.Event()  # for another message in flight
        self._has_room.set()
        self._group: asyncio.TaskGroup | None = None  # of the messages; None: not running
        self._has_waiting = asyncio.Event()
        self._send_now = asyncio.Event()  # a full message waits, or a flush
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._has_spooled = asyncio.Event()
        if spool is not None and spool.size_bytes:
            self._has_spooled.set()
        self._failing_since_s: float | None = None  # monotonic clock; None: the last publish was stored
        self._why_not_spooled: str | None = None  # error of the last try to spool
        self._is_ending = False

    def __len__(self) -> int:
        """Return the number of records that are neither spooled nor known to be stored."""
        return len(self._waiting) + self._in_flight

    @property
    def full(self) -> bool:
        """True while the caller should take no new work, because its records might be lost."""
        is_stuck = self._failing_since_s is not None and self._why_not_spooled is not None
        return is_stuck or len(self) >= self._capacity or self._bytes >= self._capacity_bytes

    @property
    def is_behind(self) -> bool:
        """True while the queue server stores no records, or has not received the whole spool."""
        return self._failing_since_s is not None or self._has_spooled.is_set()

    @property
    def spooled_bytes(self) -> int:
        """Size of the records on this machine's disk."""
        return self._spool.size_bytes if self._spool is not None else 0

    def put(self, record_id: str, payload: bytes, *, is_awaited: bool = False) -> asyncio.Future[None]:
        """Add an encoded record. Never refuses, even while full, because ended work must be recorded.

        The returned future is done once the record is stored or spooled. Await it with ``asyncio.wait``.
        ``is_awaited``: send the record at once.
        """
        entry = _Entry((record_id, payload), asyncio.get_running_loop().create_future(), is_awaited)
        self._waiting.append(entry)
        self._awaited += is_awaited
        self._bytes += len(payload)
        self._is_empty.clear()
        self._send_awaited()
        if self._waiting:
            self._has_waiting.set()
        if len(self._waiting) >= MESSAGE_RECORDS:
            self._send_now.set()
        return entry.kept

    async def run(self) -> None:
        """Publish records; cancel it to stop."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            if self._spool is not None:
                group.create_task(self._replay(self._spool), name=f"spool-{self._subject}")
            try:
                while True:
                    await self._send_spaced(group)
            finally:
                self._group = None

    async def _send_spaced(self, group: asyncio.TaskGroup) -> None:
        """Send the waiting records once they fill a message, or its time has come."""
        await self._has_waiting.wait()
        pause_s = self._left_s + self._spacing_s - time.monotonic()
        if pause_s > 0:
            await wait_for(self._send_now, pause_s)
        await self._has_room.wait()
        if self._waiting:  # an awaited record may have been sent with them
            self._send(group)

    async def flush(self, timeout_s: float) -> int:
        """Wait at most ``timeout_s`` until all records are stored, then spool the rest; return how many are lost."""
        self._send_now.set()
        await wait_for(self._is_empty, timeout_s)
        if len(self) and self._spool is not None:
            self._is_ending = True
            await wait_for(self._is_empty, SPOOL_LIMIT_S)
        if len(self):
            log.error("%d records for %s were not stored within %g s", len(self), self._subject, timeout_s)
        return len(self)

    def _send_awaited(self) -> None:
        """Send awaited records at once, unless so many messages are in flight that they should share one."""
        while self._awaited and self._messages < AWAITED_WINDOW and self._group is not None:
            self._send(self._group)

    def _send(self, group: asyncio.TaskGroup) -> None:
        """Send one message."""
        self._left_s = time.monotonic()
        self._messages += 1
        if self._messages >= WINDOW:
            self._has_room.clear()
        group.create_task(self._keep(self._take()), name=f"outbox-{self._subject}")

    def _take(self) -> list[_Entry]:
        """Return the records of the next message: at least one, of any size."""
        entries = [self._waiting.popleft()]
        room_bytes = MESSAGE_BYTES - len(entries[0].record[1])
        while self._waiting and len(entries) < MESSAGE_RECORDS and len(self._waiting[0].record[1]) <= room_bytes:
            entries.append(self._waiting.popleft())
            room_bytes -= len(entries[-1].record[1])
        self._in_flight += len(entries)
        self._awaited -= sum(entry.is_awaited for entry in entries)
        if not self._waiting:
            self._has_waiting.clear()
        if len(self._waiting) < MESSAGE_RECORDS:
            self._send_now.clear()
        return entries

    async def _keep(self, entries: list[_Entry]) -> None:
        """Publish one message repeatedly until it is stored or spooled."""
        records = [entry.record for entry in entries]
        try:
            for wait_s in backoff_s():
                # While the spool has records, its replay probes the queue server.
                if (self._must_spool() and await self._is_spooled(records)) or await self._is_done(records):
                    break
                await asyncio.sleep(wait_s)
            for entry in entries:
                if not entry.kept.done():
                    entry.kept.set_result(None)
        finally:
            self._messages -= 1
            self._has_room.set()
            self._in_flight -= len(entries)
            self._bytes -= sum(len(payload) for _, payload in records)
            if not len(self):
                self._is_empty.set()
        self._send_awaited()

    async def _is_done(self, records: Sequence[Record]) -> bool:
        """Publish one message once; return whether it is stored, or never can be."""
        began_s = time.monotonic()
        # Every try has the same records, so the first id and the number of records identify the message.
        message_id = f"{records[0][0]}+{len(records) - 1}"
        try:
            payload = encode_usage([payload for _, payload in records])
            await self._bus.publish_durable(self._subject, payload, message_id=message_id)
        except PayloadTooLarge as error:
            log.error("usage %s for %s is lost: %s", message_id, self._subject, error)  # noqa: TRY400
            return True
        except BusError as error:
            self._note_failure(error, began_s)
            return False
        self._note_success()
        return True

    # --- the spool ----------------------------------------------------------------------------------------------------

    def _must_spool(self) -> bool:
        if self._spool is None:
            return False
        is_failing = self._failing_since_s is not None
        return self._is_ending or (is_failing and time.monotonic() - (self._failing_since_s or 0.0) >= SPOOL_AFTER_S)

    async def _is_spooled(self, records: Sequence[Record]) -> bool:
        """Spool one message's records; return whether that succeeded."""
        assert self._spool is not None  # noqa: S101  # asked before
        try:
            await asyncio.to_thread(self._spool.append, records)
        except OSError as error:
            if self._why_not_spooled is None:
                log.error("cannot spool records for %s: %s", self._subject, error)  # noqa: TRY400
            self._why_not_spooled = str(error)
            return False
        self._why_not_spooled = None
        self._has_spooled.set()
        return True

    async def _replay(self, spool: Spool) -> None:
        """Publish spooled records, oldest first, once the queue server stores messages."""
        while True:
            await self._has_spooled.wait()
            await self._replay_oldest(spool)
            if not spool.size_bytes:
                self._has_spooled.clear()

    async def _replay_oldest(self, spool: Spool) -> None:
        records = await asyncio.to_thread(spool.oldest)
        for message in _messages(records):
            for wait_s in backoff_s():
                if await self._is_done(message):
                    break
                await asyncio.sleep(wait_s)
        await asyncio.to_thread(spool.drop_oldest)
        log.warning("stored %d spooled records for %s", len(records), self._subject)

    def _note_failure(self, error: BusError, began_s: float) -> None:
        if self._failing_since_s is None:
            self._failing_since_s = began_s
            log.warning("cannot store records for %s; trying again: %s", self._subject, error)

    def _note_success(self) -> None:
        if self._failing_since_s is not None:
            failing_s = time.monotonic() - self._failing_since_s
            log.warning("records for %s are stored again, after %.1f s", self._subject, failing_s)
            self._failing_since_s = None
            self._why_not_spooled = None


def _messages(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """Split records into messages."""
    message: list[Record] = []
    room_bytes = MESSAGE_BYTES
    for record in records:
        if message and (len(message) == MESSAGE_RECORDS or len(record[1]) > room_bytes):
            yield message
            message, room_bytes = [], MESSAGE_BYTES
        message.append(record)
        room_bytes -= len(record[1])
    if message:
        yield message
