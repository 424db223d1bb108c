"""Records on this machine's disk, while the queue server cannot store them.

One folder holds segments, files that are only appended to; each belongs to the process that holds its lock (flock), and
those of a process that has died belong to whoever takes their locks. A segment is a row of entries:

    length (4 bytes) · CRC-32 (4 bytes) · msgpack [record id, record]

Appended entries are on the disk (fsync) when ``append`` returns. What a power cut left half written at a segment's end
is passed over. All of this blocks: call it in a thread.
"""

import fcntl
import logging
import os
import threading
import uuid
import zlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

MAX_SPOOL_BYTES: Final = 256 * 1024 * 1024  # some 500,000 records
SEGMENT_BYTES: Final = 4 * 1024 * 1024  # from which on a new one is begun; one is read at once
SUFFIX: Final = ".spool"
_HEAD_BYTES: Final = 8

log = logging.getLogger(__name__)

Record = tuple[str, bytes]  # its id, and itself as it is encoded

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Record)


class SpoolFull(OSError):
    """The spool may not grow any more, or its disk has no room."""


class _Segment(Struct):
    path: Path
    descriptor: int  # holds the lock
    size_bytes: int


class Spool:
    """Segments of this process, oldest first. Several threads may call it."""

    def __init__(self, folder: Path, max_bytes: int = MAX_SPOOL_BYTES) -> None:
        """Take over what processes that have died left in ``folder``, which need not be there yet. Raises OSError."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self._segments: deque[_Segment] = deque(_left_behind(folder))
        self._is_growing = False  # whether the last segment takes more entries

    @property
    def size_bytes(self) -> int:
        """The amount spooled."""
        return sum(segment.size_bytes for segment in self._segments)

    def append(self, records: Sequence[Record]) -> None:
        """Add records: all of them, or none. Raises SpoolFull, or OSError for a disk that fails."""
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
        """Return the records of the oldest segment, which takes no more; empty if there is none."""
        with self._lock:
            if len(self._segments) == 1:
                self._is_growing = False
            return _read(self._segments[0]) if self._segments else []

    def drop_oldest(self) -> None:
        """Drop the records that ``oldest`` returned, once they are stored elsewhere. Raises OSError."""
        with self._lock:
            segment = self._segments.popleft()
            segment.path.unlink(missing_ok=True)
            os.close(segment.descriptor)

    def close(self) -> None:
        """Let others have what is still there."""
        with self._lock:
            for segment in self._segments:
                os.close(segment.descriptor)
            self._segments.clear()


def _entry(record: Record) -> bytes:
    body = _encode(record)
    return len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big") + body


def _begin(folder: Path) -> _Segment:
    # Locked before it has its name: others take over whatever has the name and no lock.
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
    """Take over segments that no process holds, oldest first."""
    taken = [segment for path in folder.glob(f"*{SUFFIX}") if (segment := _take_over(path)) is not None]
    return sorted(taken, key=lambda segment: os.fstat(segment.descriptor).st_mtime_ns)


def _take_over(path: Path) -> _Segment | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
    except FileNotFoundError:  # its owner has just done with it
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        facts = os.fstat(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if facts.st_nlink == 0:  # done with between the two calls above
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
        # A power cut may leave zeros, whose checksum is right.
        if not 0 < length == len(body) or zlib.crc32(body) != int.from_bytes(content[at + 4 : at + 8], "big"):
            log.error("%s: %d bytes at its end are no records and are lost", segment.path, len(content) - at)
            break
        records.append(_decoder.decode(body))
        at += _HEAD_BYTES + length
    return records
