"""What was set aside, so that people see it: on the dashboard, by kind in the metrics.

    whoever sets an item aside ──note──> waiting here ──flush──> SQL, the newest MAX_ROWS of each kind

What happens to the item itself is decided where it is set aside, and does not depend on this note.
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

MAX_ROWS: Final = 1000  # of a kind; older ones are deleted
MAX_WAITING: Final = 1000  # while SQL is away; older ones are dropped
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
        """Keep a note for the next ``flush``. Whoever calls this logs it, too."""
        texts = {"kind": kind, "item": item, "owner": owner, "reason": reason}
        self._waiting.append({name: _storable(text) for name, text in texts.items()} | {"at_unix_ms": unix_now_ms()})

    async def flush(self) -> None:
        """Write the notes that wait; while SQL is away they go on waiting."""
        if not self._waiting:
            return
        notes = list(self._waiting)
        try:
            async with changing(self._engine) as connection:
                await _write(connection, notes)
        except SQL_ERRORS as error:
            log.warning("what was set aside is not in SQL yet: %s", describe(error))
            return
        for written in notes:
            if self._waiting and self._waiting[0] is written:  # else it was dropped meanwhile
                self._waiting.popleft()

    async def counts(self) -> Mapping[str, int] | None:
        """Return how many rows there are of each kind; None: SQL does not say so at once."""
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
    """Return a text as PostgreSQL takes it: some are of whoever made the item."""
    return text[:MAX_CHARS].replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
