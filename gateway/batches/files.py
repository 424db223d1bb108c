"""Files: rows in SQL, bytes in the storage."""

import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

from msgspec import Struct, structs
from sqlalchemy import and_, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import changing
from db.tables import BatchRow, FilePartRow, FileRow
from gateway.batches.storage.base import Storage, StorageError
from gateway.errors import RETRY_SOON_S, BodyTooLarge, Overloaded, RateLimitExceeded, RequestTooSlow
from protocol.nats.clock import unix_now_ms

log = logging.getLogger(__name__)


RANDOM_BYTES: Final = 12  # of an id
SWEPT_AT_A_TIME: Final = 100
# After its expiry: a batch may have just been created from it, and the clocks of gateways differ.
SWEEP_GRACE_MS: Final = 60_000
UPLOADING: Final = "uploading"  # purpose of a file during its upload: not visible to clients


Order = Literal["asc", "desc"]


class FileGone(StorageError):
    """A file was deleted while it was being read."""


class File(Struct, frozen=True):
    """A file; see db.tables.FileRow."""

    id: str
    tenant: str
    key_id: str
    created_unix_ms: int
    expires_unix_ms: int
    purpose: str
    filename: str
    size_bytes: int


class Part(Struct, frozen=True):
    """A part of a file; see db.tables.FilePartRow."""

    file_id: str
    number: int
    object_name: str
    size_bytes: int
    lines: bytes | None = None


def new_id(prefix: str) -> str:
    """Return an unguessable id."""
    return f"{prefix}{secrets.token_hex(RANDOM_BYTES)}"


def page_of(row: Any, tenant: str, after: Any, order: Order) -> list[Any]:  # noqa: ANN401  # SQLAlchemy's classes
    """Return the conditions for a tenant's rows after the row (created, id) ``after`` of a list."""
    conditions = [row.tenant == tenant]
    if after is not None:
        created, identity = after
        if order == "desc":
            later = or_(row.created_unix_ms < created, and_(row.created_unix_ms == created, row.id < identity))
        else:
            later = or_(row.created_unix_ms > created, and_(row.created_unix_ms == created, row.id > identity))
        conditions.append(later)
    return conditions


def in_order(row: Any, order: Order) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the sort order of a list."""
    return (row.created_unix_ms.desc(), row.id.desc()) if order == "desc" else (row.created_unix_ms, row.id)


async def add_file(connection: AsyncConnection, file: File) -> None:
    """Add a file to a transaction, without its parts."""
    await connection.execute(insert(FileRow).values(structs.asdict(file)))


def _seen() -> tuple[Any, Any]:
    """Return the conditions for files visible to clients."""
    return FileRow.expires_unix_ms > unix_now_ms(), FileRow.purpose != UPLOADING


class Files:
    """All files. Methods raise SQL errors and StorageError."""

    def __init__(self, database: AsyncEngine, storage: Storage) -> None:
        self.database = database
        self.storage = storage

    async def begin(self, file: File, until_unix_ms: int) -> None:
        """Record a file before its upload. If it is not completed in time, ``sweep`` deletes it."""
        expected = structs.replace(file, purpose=UPLOADING, expires_unix_ms=until_unix_ms, size_bytes=0)
        async with changing(self.database) as connection:
            await add_file(connection, expected)

    async def complete(self, file: File, parts: Sequence[Part]) -> bool:
        """Make an uploaded file visible; False: it was not completed in time."""
        values = structs.asdict(file)
        expected = update(FileRow).where(FileRow.id == file.id, FileRow.expires_unix_ms > unix_now_ms())
        async with changing(self.database) as connection:
            result = await connection.execute(expected.values(values))
            if result.rowcount != 1:
                return False
            await connection.execute(insert(FilePartRow).values([structs.asdict(part) for part in parts]))
        return True

    async def find(self, file_id: str, tenant: str) -> File | None:
        """Return a tenant's file; None: not found or expired."""
        mine = (FileRow.id == file_id, FileRow.tenant == tenant, *_seen())
        async with self.database.connect() as connection:
            row = (await connection.execute(select(FileRow.__table__).where(*mine))).mappings().first()
        return None if row is None else File(**row)

    async def page(
        self, tenant: str, after: File | None, limit: int, order: Order, purpose: str | None
    ) -> Sequence[File]:
        """Return a tenant's files after a given one."""
        mark = None if after is None else (after.created_unix_ms, after.id)
        conditions = [*page_of(FileRow, tenant, mark, order), *_seen()]
        if purpose is not None:
            conditions.append(FileRow.purpose == purpose)
        found = select(FileRow.__table__).where(*conditions).order_by(*in_order(FileRow, order)).limit(limit)
        async with self.database.connect() as connection:
            return [File(**row) for row in (await connection.execute(found)).mappings()]

    async def usage(self, tenant: str) -> tuple[int, int]:
        """Return the number and total bytes of a tenant's files."""
        mine = (FileRow.tenant == tenant, FileRow.purpose != UPLOADING)
        of_tenant = select(func.count(), func.coalesce(func.sum(FileRow.size_bytes), 0)).where(*mine)
        async with self.database.connect() as connection:
            count, size = (await connection.execute(of_tenant)).one()
        return int(count), int(size)

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        """Iterate over all bytes of a file. Raises FileGone if it was deleted, also while it is read."""
        whole = select(func.sum(FilePartRow.size_bytes)).where(FilePartRow.file_id == file_id)
        async with self.database.connect() as connection:
            left_bytes = (await connection.execute(whole)).scalar()
        number = -1
        while left_bytes:
            later = select(FilePartRow.number, FilePartRow.object_name).where(
                FilePartRow.file_id == file_id, FilePartRow.number > number
            )
            async with self.database.connect() as connection:
                page = (await connection.execute(later.order_by(FilePartRow.number).limit(SWEPT_AT_A_TIME))).all()
            if not page:
                break
            for number, object_name in page:  # noqa: B007  # the last one is where the next page begins
                async for chunk in self.storage.read(object_name):
                    left_bytes -= len(chunk)
                    yield chunk
        if left_bytes != 0:
            raise FileGone(f"the file {file_id} has been deleted")

    async def is_in_use(self, file_id: str, over: Sequence[str]) -> bool:
        """Return whether a batch in progress uses the file. ``over``: final statuses of batches."""
        running = select(BatchRow.id).where(BatchRow.input_file_id == file_id, BatchRow.status.not_in(over)).limit(1)
        async with self.database.connect() as connection:
            return (await connection.execute(running)).first() is not None

    async def delete(self, file_id: str) -> None:
        """Delete a file: hide it, then delete its bytes. After a crash in between, ``sweep`` finishes this."""
        async with changing(self.database) as connection:
            await connection.execute(update(FileRow).where(FileRow.id == file_id).values(expires_unix_ms=0))
        await self._remove(file_id)

    async def _remove(self, file_id: str) -> None:
        """Delete the bytes first, then the rows that locate and account for them."""
        for name in await self.storage.names(f"{file_id}/"):
            await self.storage.delete(name)
        async with changing(self.database) as connection:
            await connection.execute(delete(FilePartRow).where(FilePartRow.file_id == file_id))
            await connection.execute(delete(FileRow).where(FileRow.id == file_id))

    async def sweep(self, over: Sequence[str]) -> None:
        """Delete expired files that no batch in progress uses."""
        while await self._sweep_some(over) == SWEPT_AT_A_TIME:
            pass

    async def _sweep_some(self, over: Sequence[str]) -> int:
        """Delete one page of expired files; return their number."""
        is_old = FileRow.expires_unix_ms <= unix_now_ms() - SWEEP_GRACE_MS
        read = select(BatchRow.input_file_id).where(BatchRow.status.not_in(over))
        old = select(FileRow.id).where(is_old, FileRow.id.not_in(read)).limit(SWEPT_AT_A_TIME)
        async with self.database.connect() as connection:
            expired = (await connection.execute(old)).scalars().all()
        deleted = 0
        for file_id in expired:
            try:
                await self._remove(file_id)
            except StorageError as error:  # its row stays, so deletion is retried
                log.warning("the expired file %s cannot be deleted: %s", file_id, error)
                continue
            deleted += 1
        return deleted


# --- upload slots -----------------------------------------------------------------------------------------------------
#
# Upload slots of a gateway, shared between tenants, and the minimum upload speed.
#
# Pure: no I/O, no clock.

TOO_MANY_UPLOADS: Final = "too_many_uploads"


class UploadSlots:
    """The upload slots of a gateway. Use only from the event loop.

    A tenant can always hold one slot, and at most as many as it leaves free, so that other tenants find a slot.
    """

    def __init__(self, max_uploads: int) -> None:
        self._free = max_uploads
        self._held: Counter[str] = Counter()  # by tenant
        self._bytes: Counter[str] = Counter()  # by tenant: bytes of unfinished uploads

    @contextmanager
    def hold(self, tenant: str) -> Iterator["Slot"]:
        """Hold a slot. Raises Overloaded, and RateLimitExceeded above the tenant's share."""
        if not self._free:
            raise Overloaded("The gateway cannot receive more uploads at the moment. Try again later.")
        held = self._held[tenant]
        if held and held + 1 >= self._free:
            message = (
                f"{held} uploads of this API key or its team are in progress on this gateway. Wait for one to end."
            )
            raise RateLimitExceeded(message, code=TOO_MANY_UPLOADS, retry_after_s=RETRY_SOON_S)
        self._free -= 1
        self._held[tenant] += 1
        slot = Slot(self._bytes, tenant)
        try:
            yield slot
        finally:
            self._free += 1
            self._held -= Counter({tenant: 1})  # this drops zero counts
            self._bytes -= Counter({tenant: slot.written_bytes})


class Slot:
    """The slot of an upload, which counts written bytes."""

    def __init__(self, by_tenant: Counter[str], tenant: str) -> None:
        self.written_bytes = 0
        self._by_tenant = by_tenant
        self._tenant = tenant

    def count(self, size_bytes: int, room_bytes: int) -> None:
        """Count bytes before they are written. Raises BodyTooLarge if the tenant's uploads exceed its storage."""
        self.written_bytes += size_bytes
        self._by_tenant[self._tenant] += size_bytes
        if self._by_tenant[self._tenant] > room_bytes:
            raise BodyTooLarge(
                f"The uploads in progress of this API key or its team may have {room_bytes} more bytes in total."
            )


class Pace:
    """The speed of an upload. Only time spent waiting for the client counts."""

    def __init__(self, min_bytes_per_s: int, window_s: float) -> None:
        self._min_bytes_per_s = min_bytes_per_s
        self._window_s = window_s
        self._bytes = 0
        self._waited_s = 0.0

    def note(self, size_bytes: int, waited_s: float) -> None:
        """Record the bytes received after a wait. Raises RequestTooSlow if too few arrived within a window."""
        self._bytes += size_bytes
        self._waited_s += waited_s
        if self._waited_s < self._window_s:
            return
        if self._bytes < self._min_bytes_per_s * self._waited_s:
            raise RequestTooSlow(
                f"{self._bytes} bytes of the upload have come in {self._waited_s:.1f} s:"
                f" at least {self._min_bytes_per_s} bytes a second must."
            )
        self._bytes, self._waited_s = 0, 0.0
