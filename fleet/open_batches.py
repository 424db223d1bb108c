"""The remaining work of open batches and its deadlines, from the tables of batches.

A feeder keeps the batch lane short, so the lane does not show a million lines that are due tomorrow.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import SQL_ERRORS, DatabaseUnavailable, describe
from db.tables import ApiKeyRow, BatchRow, TeamRow
from protocol.subjects import queue_of

OPEN_AT_A_TIME: Final = 1000  # batches that are looked at, soonest due first: as many as a feeder looks at

_by_model = msgspec.json.Decoder(dict[str, tuple[int, int]])


class OpenBatch(Struct, frozen=True):
    """What one batch still needs of one queue."""

    due_unix_ms: int
    lines: int
    tokens: float


async def open_batches(engine: AsyncEngine) -> Mapping[str, Sequence[OpenBatch]]:
    """Return what batches still need, by queue, soonest due first. Raises DatabaseUnavailable."""
    statement = (
        select(
            BatchRow.models,
            BatchRow.expires_unix_ms,
            BatchRow.total,
            (BatchRow.completed + BatchRow.failed).label("done"),
            BatchRow.completed,
            (BatchRow.prompt_tokens + BatchRow.completion_tokens).label("used"),
            or_(ApiKeyRow.trusted_only.is_(True), TeamRow.trusted_only.is_(True)).label("trusted"),
        )
        .join(ApiKeyRow, ApiKeyRow.id == BatchRow.key_id)
        .join(TeamRow, TeamRow.id == ApiKeyRow.team_id)
        .where(BatchRow.status == "in_progress")
        .order_by(BatchRow.expires_unix_ms, BatchRow.id)
        .limit(OPEN_AT_A_TIME)
    )
    found: dict[str, list[OpenBatch]] = {}
    try:
        async with engine.connect() as connection:
            rows = (await connection.execute(statement)).all()
    except SQL_ERRORS as error:
        raise DatabaseUnavailable(describe(error)) from error
    for models, due_unix_ms, total, done, completed, used, is_trusted in rows:
        counted = _by_model.decode(models or "{}")
        left = 1 - done / total
        if left <= 0:
            continue
        # Estimates take a line's limit for its length; what its lines have really used corrects them.
        estimated = sum(tokens for _, tokens in counted.values()) / total
        factor = used / completed / estimated if completed and estimated else 1.0
        for model, (lines, tokens) in counted.items():
            work = OpenBatch(due_unix_ms, round(lines * left), tokens * factor * left)
            found.setdefault(queue_of(model, trusted=is_trusted), []).append(work)
    return found
