"""Batches in SQL. A gateway takes a batch under a new epoch; commits of older epochs are refused."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import Struct, structs
from sqlalchemy import CursorResult, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import changing
from db.tables import BatchRow, FilePartRow
from gateway.batches.files import File, Order, Part, add_file, in_order, page_of
from gateway.batches.lines import Done, LineError
from protocol.nats.clock import unix_now_ms

# --- states -----------------------------------------------------------------------------------------------------------
#
# States of a batch, and the API that created it.
#
#     validating ──> in_progress ──> finalizing ──> completed
#         │               │ ├── window expires ───> expired
#         │               │ └── its key is revoked ─> failed, results are kept
#         │               └──── cancelling ───────> cancelled
#         └── a line is invalid ───────────────────> failed
#
# Only the gateway that feeds it changes the state, except for ``cancelling``, which the client requests.


class Status(StrEnum):
    """Status of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


OPENAI: Final = "openai"
ANTHROPIC: Final = "anthropic"
OVER: Final = (Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED)


# --- store ------------------------------------------------------------------------------------------------------------

OPEN_AT_A_TIME: Final = 1000  # batches that a feeder considers, earliest due first


class Lost(Exception):
    """Another gateway has taken over the batch."""


class Batch(Struct, frozen=True):
    """A batch; see db.tables.BatchRow."""

    id: str
    surface: str
    tenant: str
    team_id: str
    key_id: str
    key_name: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_unix_ms: int
    expires_unix_ms: int
    status: str = Status.VALIDATING
    output_file_id: str | None = None
    error_file_id: str | None = None
    custom_metadata: str | None = None
    result_ttl_s: int | None = None
    errors: str | None = None
    in_progress_unix_ms: int | None = None
    finalizing_unix_ms: int | None = None
    cancelling_unix_ms: int | None = None
    over_unix_ms: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    given_up: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    models: str | None = None
    epoch: int = 0
    holder: str | None = None

    @property
    def result_ids(self) -> tuple[str, str]:
        """Ids of its output and error files, also before they exist."""
        random = self.id.removeprefix("batch_")
        return f"file-{random}-output", f"file-{random}-errors"


class Counts(Struct):
    """Counts added by a commit."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    given_up: int = 0


class Batches:
    """All batches. Methods raise SQL errors."""

    def __init__(self, database: AsyncEngine) -> None:
        self._database = database

    # --- for clients --------------------------------------------------------------------------------------------------

    async def add(self, batch: Batch) -> None:
        """Create a batch."""
        async with changing(self._database) as connection:
            await connection.execute(insert(BatchRow).values(structs.asdict(batch)))

    async def find(self, batch_id: str, tenant: str | None = None, surface: str | None = None) -> Batch | None:
        """Return a batch, optionally only of a tenant and surface; None: not found."""
        wanted = ((BatchRow.id, batch_id), (BatchRow.tenant, tenant), (BatchRow.surface, surface))
        conditions = [column == value for column, value in wanted if value is not None]
        found = await self._select(select(BatchRow.__table__).where(*conditions))
        return found[0] if found else None

    async def page(
        self, tenant: str, after: Batch | None, limit: int, *, surface: str, order: Order = "desc"
    ) -> Sequence[Batch]:
        """Return a tenant's batches after a given one."""
        mark = None if after is None else (after.created_unix_ms, after.id)
        conditions = [*page_of(BatchRow, tenant, mark, order), BatchRow.surface == surface]
        wanted = select(BatchRow.__table__).where(*conditions).order_by(*in_order(BatchRow, order)).limit(limit)
        return await self._select(wanted)

    async def count_open(self, tenant: str) -> int:
        """Return the number of a tenant's batches in progress."""
        mine = select(func.count()).where(BatchRow.tenant == tenant, BatchRow.status.not_in(OVER))
        async with self._database.connect() as connection:
            return int((await connection.execute(mine)).scalar_one())

    async def delete(self, batch_id: str) -> None:
        """Delete an ended batch; its files stay."""
        async with changing(self._database) as connection:
            await connection.execute(delete(BatchRow).where(BatchRow.id == batch_id, BatchRow.status.in_(OVER)))

    async def ask_to_cancel(self, batch_id: str) -> None:
        """Request the cancellation of a batch, unless it has ended or is finalizing."""
        running = (Status.VALIDATING, Status.IN_PROGRESS)
        asked = update(BatchRow).where(BatchRow.id == batch_id, BatchRow.status.in_(running))
        async with changing(self._database) as connection:
            await connection.execute(asked.values(status=Status.CANCELLING, cancelling_unix_ms=unix_now_ms()))

    # --- for feeders --------------------------------------------------------------------------------------------------

    async def open_batches(self) -> Sequence[Batch]:
        """Return the batches in progress, earliest due first."""
        wanted = select(BatchRow.__table__).where(BatchRow.status.not_in(OVER))
        return await self._select(wanted.order_by(BatchRow.expires_unix_ms, BatchRow.id).limit(OPEN_AT_A_TIME))

    async def over_since(self, unix_ms: int) -> Sequence[Batch]:
        """Return the batches that ended since a time."""
        return await self._select(select(BatchRow.__table__).where(BatchRow.over_unix_ms >= unix_ms))

    async def take(self, batch_id: str, gateway_id: str) -> Batch:
        """Take a batch: commits of earlier holders are refused from now on. Raises Lost if it has ended."""
        taken = update(BatchRow).where(BatchRow.id == batch_id, BatchRow.status.not_in(OVER))
        async with changing(self._database) as connection:
            await _one(connection, taken.values(epoch=BatchRow.epoch + 1, holder=gateway_id))
            row = (await connection.execute(select(BatchRow.__table__).where(BatchRow.id == batch_id))).mappings().one()
        return Batch(**row)

    async def start(self, batch: Batch, total: int, models: dict[str, tuple[int, int]]) -> None:
        """Start a batch after its lines are counted. Raises Lost."""
        values = {"total": total, "models": msgspec.json.encode(models).decode(), "in_progress_unix_ms": unix_now_ms()}
        async with changing(self._database) as connection:
            await _one(connection, _mine(batch).values(**values))
            progressing = _mine(batch).where(BatchRow.status == Status.VALIDATING)  # not if it is being canceled
            await connection.execute(progressing.values(status=Status.IN_PROGRESS))

    async def done(self, batch: Batch) -> tuple[Done, int]:
        """Return its completed lines, and the number of the next part."""
        done, following = Done(), 0
        parts = select(FilePartRow.number, FilePartRow.lines).where(FilePartRow.file_id.in_(batch.result_ids))
        async with self._database.connect() as connection:
            async for number, packed in await connection.stream(parts):
                following = max(following, number + 1)
                done.add(packed or b"")
        return done, following

    async def commit(self, batch: Batch, parts: Sequence[Part], counts: Counts) -> None:
        """Commit parts and their lines. Idempotent. Raises Lost."""
        first = parts[0]
        stands = select(FilePartRow.object_name).where(
            FilePartRow.file_id == first.file_id, FilePartRow.number == first.number
        )
        added = {name: getattr(BatchRow, name) + value for name, value in structs.asdict(counts).items()}
        async with changing(self._database) as connection:
            if (await connection.execute(stands)).scalar() == first.object_name:
                return  # the reply to an earlier attempt was lost
            await _one(connection, _mine(batch).values(**added))
            await connection.execute(insert(FilePartRow).values([structs.asdict(part) for part in parts]))

    async def finalizing(self, batch: Batch) -> None:
        """Set the status after the last line. Raises Lost."""
        async with changing(self._database) as connection:
            await _one(connection, _mine(batch).values(finalizing_unix_ms=unix_now_ms()))
            running = _mine(batch).where(BatchRow.status == Status.IN_PROGRESS)
            await connection.execute(running.values(status=Status.FINALIZING))

    async def end(self, batch: Batch, status: Status, ttl_s: float, errors: Sequence[LineError] = ()) -> None:
        """Make its results files and end the batch. Idempotent. Raises Lost."""
        now_ms = unix_now_ms()
        values: dict[str, Any] = {"status": status, "over_unix_ms": now_ms}
        if errors:
            values["errors"] = msgspec.json.encode(errors).decode()
        expires_ms = now_ms + int(1000 * (batch.result_ttl_s or ttl_s))
        kinds = ("output", "error")
        async with changing(self._database) as connection:
            row = (await connection.execute(select(BatchRow.status).where(BatchRow.id == batch.id))).scalar()
            if row == status:
                return
            for kind, file_id in zip(kinds, batch.result_ids, strict=True):
                size = select(func.sum(FilePartRow.size_bytes)).where(FilePartRow.file_id == file_id)
                found = (await connection.execute(size)).scalar()
                if found is not None:
                    name = f"{batch.id}_{kind}.jsonl"
                    file = File(
                        file_id, batch.tenant, batch.key_id, now_ms, expires_ms, "batch_output", name, int(found)
                    )
                    await add_file(connection, file)
                    values[f"{kind}_file_id"] = file_id
            await _one(connection, _mine(batch).values(**values))

    async def objects(self, file_id: str) -> set[str]:
        """Return the storage names of a file's parts."""
        async with self._database.connect() as connection:
            names = await connection.execute(select(FilePartRow.object_name).where(FilePartRow.file_id == file_id))
            return set(names.scalars())

    async def _select(self, statement: Any) -> Sequence[Batch]:  # noqa: ANN401  # SQLAlchemy's expressions
        async with self._database.connect() as connection:
            return [Batch(**row) for row in (await connection.execute(statement)).mappings()]


def _mine(batch: Batch) -> Any:  # noqa: ANN401  # SQLAlchemy's expressions
    return update(BatchRow).where(BatchRow.id == batch.id, BatchRow.epoch == batch.epoch)


async def _one(connection: AsyncConnection, statement: Any) -> None:  # noqa: ANN401
    """Change one row. Raises Lost if it no longer matches."""
    result: CursorResult[Any] = await connection.execute(statement)
    if result.rowcount != 1:
        raise Lost
