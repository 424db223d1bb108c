"""Notes about items that were set aside, shown on the dashboard and, by kind, in the metrics.

    code that sets an item aside ──note──> buffer ──flush──> SQL, the newest MAX_ROWS of each kind

The note does not affect the item itself.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Literal

from sqlalchemy import delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from db.engine import SQL_ERRORS, changing, describe
from db.tables import SetAsideRow
from protocol.nats.clock import unix_now_ms

MAX_ROWS: Final = 1000  # per kind; older rows are deleted
MAX_WAITING: Final = 1000  # buffered while SQL is unavailable; older notes are dropped
MAX_CHARS: Final = 500
COUNT_LIMIT_S: Final = 0.5

Kind = Literal["usage record", "intent", "machine time", "payload", "webhook event", "request", "batch", "response"]

log = logging.getLogger(__name__)


class SetAside:
    """The notes of one process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING)

    def note(self, kind: Kind, item: str, owner: str, reason: str) -> None:
        """Buffer a note for the next ``flush``. The caller also logs it."""
        texts = {"kind": kind, "item": item, "owner": owner, "reason": reason}
        self._waiting.append({name: _storable(text) for name, text in texts.items()} | {"at_unix_ms": unix_now_ms()})

    async def flush(self) -> None:
        """Write the buffered notes. While SQL is unavailable, they stay buffered."""
        if not self._waiting:
            return
        notes = list(self._waiting)
        try:
            async with changing(self._engine) as connection:
                await _write(connection, notes)
        except SQL_ERRORS as error:
            log.warning("cannot write notes about set-aside items, will retry: %s", describe(error))
            return
        for written in notes:
            if self._waiting and self._waiting[0] is written:  # otherwise it was dropped meanwhile
                self._waiting.popleft()

    async def counts(self) -> Mapping[str, int] | None:
        """Return the number of rows by kind; None if SQL does not answer quickly."""
        statement = select(SetAsideRow.kind, func.count().label("number")).group_by(SetAsideRow.kind)
        try:
            async with asyncio.timeout(COUNT_LIMIT_S), self._engine.connect() as connection:
                found = await connection.execute(statement)
                return {row.kind: row.number for row in found}
        except SQL_ERRORS:
            return None


async def _write(connection: AsyncConnection, notes: list[dict[str, Any]]) -> None:
    inserting = (postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert)(SetAsideRow)
    changed = {name: inserting.excluded[name] for name in ("owner", "reason", "at_unix_ms")}
    statement = inserting.on_conflict_do_update(index_elements=["kind", "item"], set_=changed)
    newest = {(note["kind"], note["item"]): note for note in notes}  # a statement may not change a row twice
    await connection.execute(statement, [*newest.values()])
    for kind in {note["kind"] for note in notes}:
        is_its = SetAsideRow.kind == kind
        oldest = (
            select(SetAsideRow.at_unix_ms).where(is_its).order_by(SetAsideRow.at_unix_ms.desc()).offset(MAX_ROWS - 1)
        )
        kept_since = oldest.limit(1).scalar_subquery()
        await connection.execute(delete(SetAsideRow).where(is_its, SetAsideRow.at_unix_ms < kept_since))


def _storable(text: str) -> str:
    """Return a text that PostgreSQL can store. Texts may come from clients."""
    return text[:MAX_CHARS].replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
