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
# After its end: a batch may have been made of it in the last moment, and clocks of gateways differ.
SWEEP_GRACE_MS: Final = 60_000
UPLOADING: Final = "uploading"  # the purpose of a file whose bytes are still coming: nobody sees it


Order = Literal["asc", "desc"]


class FileGone(StorageError):
    """A file was deleted before it had been read."""


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
    """Return an id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(RANDOM_BYTES)}"


def page_of(row: Any, tenant: str, after: Any, order: Order) -> list[Any]:  # noqa: ANN401  # SQLAlchemy's classes
    """Return the conditions for the rows of a tenant that come after the row (created, id) ``after`` in a list."""
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
    """Return what a list is sorted by."""
    return (row.created_unix_ms.desc(), row.id.desc()) if order == "desc" else (row.created_unix_ms, row.id)


async def add_file(connection: AsyncConnection, file: File) -> None:
    """Write a file into a transaction; its parts are others' business."""
    await connection.execute(insert(FileRow).values(structs.asdict(file)))


def _seen() -> tuple[Any, Any]:
    """Return the conditions for a file that clients see."""
    return FileRow.expires_unix_ms > unix_now_ms(), FileRow.purpose != UPLOADING


class Files:
    """All files. Methods raise SQL's own errors, and StorageError."""

    def __init__(self, database: AsyncEngine, storage: Storage) -> None:
        self.database = database
        self.storage = storage

    async def begin(self, file: File, until_unix_ms: int) -> None:
        """Write a file down before its bytes come: where nobody completes it until then, ``sweep`` deletes them."""
        expected = structs.replace(file, purpose=UPLOADING, expires_unix_ms=until_unix_ms, size_bytes=0)
        async with changing(self.database) as connection:
            await add_file(connection, expected)

    async def complete(self, file: File, parts: Sequence[Part]) -> bool:
        """Let a file be there, whose bytes are in the storage; False: it was not completed in time."""
        values = structs.asdict(file)
        expected = update(FileRow).where(FileRow.id == file.id, FileRow.expires_unix_ms > unix_now_ms())
        async with changing(self.database) as connection:
            result = await connection.execute(expected.values(values))
            if result.rowcount != 1:
                return False
            await connection.execute(insert(FilePartRow).values([structs.asdict(part) for part in parts]))
        return True

    async def find(self, file_id: str, tenant: str) -> File | None:
        """Return a tenant's file; None: there is none of this id that has not expired."""
        mine = (FileRow.id == file_id, FileRow.tenant == tenant, *_seen())
        async with self.database.connect() as connection:
            row = (await connection.execute(select(FileRow.__table__).where(*mine))).mappings().first()
        return None if row is None else File(**row)

    async def page(
        self, tenant: str, after: File | None, limit: int, order: Order, purpose: str | None
    ) -> Sequence[File]:
        """Return a tenant's files after one."""
        mark = None if after is None else (after.created_unix_ms, after.id)
        conditions = [*page_of(FileRow, tenant, mark, order), *_seen()]
        if purpose is not None:
            conditions.append(FileRow.purpose == purpose)
        found = select(FileRow.__table__).where(*conditions).order_by(*in_order(FileRow, order)).limit(limit)
        async with self.database.connect() as connection:
            return [File(**row) for row in (await connection.execute(found)).mappings()]

    async def usage(self, tenant: str) -> tuple[int, int]:
        """Return how many files a tenant has, and their bytes."""
        mine = (FileRow.tenant == tenant, FileRow.purpose != UPLOADING)
        of_tenant = select(func.count(), func.coalesce(func.sum(FileRow.size_bytes), 0)).where(*mine)
        async with self.database.connect() as connection:
            count, size = (await connection.execute(of_tenant)).one()
        return int(count), int(size)

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        """Iterate over a file's bytes, all of them: raises FileGone where it is deleted meanwhile, or has been."""
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
        """Return whether a batch that is not ``over`` reads it."""
        running = select(BatchRow.id).where(BatchRow.input_file_id == file_id, BatchRow.status.not_in(over)).limit(1)
        async with self.database.connect() as connection:
            return (await connection.execute(running)).first() is not None

    async def delete(self, file_id: str) -> None:
        """Delete a file: from then on nobody sees it, and its bytes go. Where we die in between, ``sweep`` goes on."""
        async with changing(self.database) as connection:
            await connection.execute(update(FileRow).where(FileRow.id == file_id).values(expires_unix_ms=0))
        await self._remove(file_id)

    async def _remove(self, file_id: str) -> None:
        """Delete its bytes, and only then what says where they are and who pays for them."""
        for name in await self.storage.names(f"{file_id}/"):
            await self.storage.delete(name)
        async with changing(self.database) as connection:
            await connection.execute(delete(FilePartRow).where(FilePartRow.file_id == file_id))
            await connection.execute(delete(FileRow).where(FileRow.id == file_id))

    async def sweep(self, over: Sequence[str]) -> None:
        """Delete the files that have expired, unless a batch reads them that is not ``over``."""
        while await self._sweep_some(over) == SWEPT_AT_A_TIME:
            pass

    async def _sweep_some(self, over: Sequence[str]) -> int:
        """Delete some of them; return how many."""
        is_old = FileRow.expires_unix_ms <= unix_now_ms() - SWEEP_GRACE_MS
        read = select(BatchRow.input_file_id).where(BatchRow.status.not_in(over))
        old = select(FileRow.id).where(is_old, FileRow.id.not_in(read)).limit(SWEPT_AT_A_TIME)
        async with self.database.connect() as connection:
            expired = (await connection.execute(old)).scalars().all()
        deleted = 0
        for file_id in expired:
            try:
                await self._remove(file_id)
            except StorageError as error:  # its row stays, so it is tried again
                log.warning("the expired file %s cannot be deleted: %s", file_id, error)
                continue
            deleted += 1
        return deleted


# --- upload slots -----------------------------------------------------------------------------------------------------
#
# The slots in which a gateway receives uploads: how they are shared between tenants, and how fast a client must be.
#
# Pure: no I/O, no clock.

TOO_MANY_UPLOADS: Final = "too_many_uploads"


class UploadSlots:
    """The slots of one gateway. Only the event loop touches it.

    A tenant may hold as many as it leaves free, and one in any case: others find a slot, however many it wants.
    """

    def __init__(self, max_uploads: int) -> None:
        self._free = max_uploads
        self._held: Counter[str] = Counter()  # by tenant
        self._bytes: Counter[str] = Counter()  # by tenant: written, and not a file yet

    @contextmanager
    def hold(self, tenant: str) -> Iterator["Slot"]:
        """Hold a slot. Raises Overloaded, and RateLimitExceeded for more than the tenant's share."""
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
            self._held -= Counter({tenant: 1})  # which drops what has come to nothing
            self._bytes -= Counter({tenant: slot.written_bytes})


class Slot:
    """One upload's slot, which counts what is written."""

    def __init__(self, by_tenant: Counter[str], tenant: str) -> None:
        self.written_bytes = 0
        self._by_tenant = by_tenant
        self._tenant = tenant

    def count(self, size_bytes: int, room_bytes: int) -> None:
        """Count what is about to be written. Raises BodyTooLarge where all of the tenant's uploads have no room."""
        self.written_bytes += size_bytes
        self._by_tenant[self._tenant] += size_bytes
        if self._by_tenant[self._tenant] > room_bytes:
            raise BodyTooLarge(
                f"The uploads in progress of this API key or its team may have {room_bytes} more bytes in total."
            )


class Pace:
    """How fast an upload comes. Only time that was spent waiting for the client counts."""

    def __init__(self, min_bytes_per_s: int, window_s: float) -> None:
        self._min_bytes_per_s = min_bytes_per_s
        self._window_s = window_s
        self._bytes = 0
        self._waited_s = 0.0

    def note(self, size_bytes: int, waited_s: float) -> None:
        """Note what has come after a wait. Raises RequestTooSlow at the end of a window in which too little came."""
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
