"""Writes the results of a batch to storage in parts, at most ``commit_s`` late and within a memory limit.

A part is stored first; then one SQL transaction records the part and its lines. A part unknown to SQL was left by
a crash in between; its lines run again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec
from msgspec import Raw, Struct

from db.engine import SQL_ERRORS, describe
from gateway.batches.files import Files, Part
from gateway.batches.lines import CANCELLED, EXPIRED, LineFailure, pack_numbers
from gateway.batches.storage.base import Storage, StorageError
from gateway.batches.store import Batch, Batches, Counts
from protocol.process import backoff_s, wait_for

log = logging.getLogger(__name__)


PART_BYTES: Final = 4 * 1024 * 1024  # a part of this size is committed immediately
MAX_BYTES: Final = 16 * 1024 * 1024  # uncommitted bytes at which no more lines are opened

_AWAY: Final[tuple[type[Exception], ...]] = (StorageError, *SQL_ERRORS)


class _Part:
    """A part in memory."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.texts: list[bytes] = []
        self.size = 0


class Results:
    """Run ``run`` concurrently with ``add``, until ``end``. Use only from the event loop."""

    def __init__(
        self,
        batches: Batches,
        storage: Storage,
        batch: Batch,
        *,
        next_number: int,
        commit_s: float,
        committed: Callable[[Counts], None],
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """``committed``: called with the counts of each commit. ``give_up``: whether to stop retrying a commit."""
        self._batches = batches
        self._storage = storage
        self._batch = batch
        self._number = next_number
        self._commit_s = commit_s
        self._committed = committed
        self._give_up = give_up
        self._ended = False
        self._parts = (_Part(), _Part())  # of the output file and the error file
        self._counts = Counts()
        self._full = asyncio.Event()
        self._committing = asyncio.Lock()
        self._bytes = 0  # uncommitted bytes

    @property
    def has_room(self) -> bool:
        """False if results must be committed first."""
        return self._bytes < MAX_BYTES

    @property
    def is_full(self) -> bool:
        """True if a part has reached its size."""
        return self._full.is_set()

    def add(self, number: int, text: bytes, counts: Counts) -> None:
        """Add a line's result."""
        part = self._parts[1 if counts.failed else 0]
        part.numbers.append(number)
        part.texts.append(text)
        part.size += len(text)
        self._bytes += len(text)
        for name in Counts.__struct_fields__:
            setattr(self._counts, name, getattr(self._counts, name) + getattr(counts, name))
        if part.size >= PART_BYTES:
            self._full.set()

    async def run(self) -> None:
        """Commit periodically until the end. Raises Lost."""
        is_last = False
        while not is_last:
            await wait_for(self._full, self._commit_s)
            is_last = self._ended
            await self.commit()

    def end(self) -> None:
        """Mark the end: ``run`` commits the rest and returns."""
        self._ended = True
        self._full.set()

    async def commit(self) -> None:
        """Commit the results. Retry until success or ``give_up``. Raises Lost."""
        async with self._committing:
            parts, self._parts = self._parts, (_Part(), _Part())
            counts, self._counts = self._counts, Counts()
            self._full.clear()
            if not any(part.numbers for part in parts):
                return
            number, self._number = self._number, self._number + 1
            for wait_s in backoff_s():
                try:
                    await self._put(parts, counts, number)
                    self._committed(counts)
                    break
                except _AWAY as error:
                    why = str(error) if isinstance(error, StorageError) else describe(error)
                    log.warning("the results of batch %s cannot be stored yet: %s", self._batch.id, why)
                if self._give_up():
                    return
                await asyncio.sleep(wait_s)
            self._bytes -= sum(part.size for part in parts)

    async def _put(self, parts: tuple[_Part, _Part], counts: Counts, number: int) -> None:
        rows = []
        for file_id, part in zip(self._batch.result_ids, parts, strict=True):
            if part.numbers:
                name = f"{file_id}/{number:06d}-{self._batch.epoch}"
                async with self._storage.writing(name) as writer:
                    await writer.write(b"".join(part.texts))
                rows.append(Part(file_id, number, name, part.size, pack_numbers(part.numbers)))
        await self._batches.commit(self._batch, rows, counts)


# --- message results --------------------------------------------------------------------------------------------------
#
# Results of message batches: result files converted to Anthropic's format.

PIECE_BYTES: Final = 64 * 1024  # sent at a time


class _Response(Struct, frozen=True):
    status_code: int
    body: Raw


class _Stored(Struct, frozen=True):
    """A line of a result file."""

    custom_id: str
    response: _Response | None
    error: LineFailure | None


class _Succeeded(Struct, frozen=True, tag="succeeded"):
    message: Raw


class _Errored(Struct, frozen=True, tag="errored"):
    error: Raw


class _Canceled(Struct, frozen=True, tag="canceled"):
    """The batch was canceled first."""


class _Expired(Struct, frozen=True, tag="expired"):
    """The batch expired first."""


class _Result(Struct, frozen=True):
    custom_id: str
    result: _Succeeded | _Errored | _Canceled | _Expired


_decode: Final = msgspec.json.Decoder(_Stored).decode
_encode: Final = msgspec.json.Encoder().encode


async def results_of(files: Files, batch: Batch) -> AsyncIterator[bytes]:
    """Iterate over chunks of complete result lines. Raises StorageError and SQL errors."""
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is None:
            continue
        rest = bytearray()
        async for chunk in files.content(file_id):
            rest += chunk
            if len(rest) >= PIECE_BYTES and b"\n" in chunk:
                whole, _, left = bytes(rest).rpartition(b"\n")
                rest = bytearray(left)
                yield _translated(whole)
        if rest:
            yield _translated(bytes(rest))


def _translated(lines: bytes) -> bytes:
    return b"".join(
        _encode(_Result(stored.custom_id, _result(stored))) + b"\n" for stored in map(_decode, lines.splitlines())
    )


def _result(stored: _Stored) -> _Succeeded | _Errored | _Canceled | _Expired:
    if stored.response is not None:
        body = stored.response.body
        return _Succeeded(body) if stored.response.status_code == 200 else _Errored(body)
    failure = stored.error
    code, message = ("", "") if failure is None else (failure.code, failure.message)
    if code == CANCELLED:
        return _Canceled()
    if code == EXPIRED:
        return _Expired()
    error = {"type": "error", "error": {"type": "authentication_error", "message": message}, "request_id": None}
    return _Errored(Raw(_encode(error)))
