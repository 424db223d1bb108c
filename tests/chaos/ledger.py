"""The ledger's rows at the end of a run."""

import asyncio
import time
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.tables import OpenRequestRow, RefusalCountRow, RefusalGroupRow, RequestRow

SETTLE_LIMIT_S = 120.0  # the rows of a killed gateway's requests come when nobody has had them for long enough


@dataclass(frozen=True, slots=True)
class LedgerRow:
    request_id: str
    outcome: str
    completion_tokens: int
    attempts: int


async def settled_rows(engine: AsyncEngine, request_ids: set[str]) -> list[LedgerRow]:
    """Wait until all these requests have their rows, for ``SETTLE_LIMIT_S`` at most; returns all rows there are."""
    deadline_s = time.monotonic() + SETTLE_LIMIT_S
    while time.monotonic() < deadline_s and not request_ids <= await _ids(engine):
        await asyncio.sleep(0.2)
    columns = (RequestRow.request_id, RequestRow.outcome, RequestRow.completion_tokens, RequestRow.attempts)
    async with engine.connect() as connection:
        return [LedgerRow(*row) for row in await connection.execute(select(*columns))]


async def settled_refusals(engine: AsyncEngine, key_id: str, seen: int) -> int:
    """Wait until so many refusals of a key are counted, for ``SETTLE_LIMIT_S`` at most; returns how many there are."""
    deadline_s = time.monotonic() + SETTLE_LIMIT_S
    while (counted := await _refusals(engine, key_id)) < seen and time.monotonic() < deadline_s:
        await asyncio.sleep(0.2)
    return counted


async def _refusals(engine: AsyncEngine, key_id: str) -> int:
    counted = (
        select(func.sum(RefusalCountRow.refusals))
        .join(RefusalGroupRow, RefusalGroupRow.id == RefusalCountRow.group_id)
        .where(RefusalGroupRow.key_id == key_id)
    )
    async with engine.connect() as connection:
        return int(await connection.scalar(counted) or 0)


async def still_open(engine: AsyncEngine) -> set[str]:
    """Return the requests whose intents are in the database, and whose rows are not yet."""
    async with engine.connect() as connection:
        return set((await connection.scalars(select(OpenRequestRow.request_id))).all())


async def _ids(engine: AsyncEngine) -> set[str]:
    async with engine.connect() as connection:
        return set((await connection.scalars(select(RequestRow.request_id))).all())
