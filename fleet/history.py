"""The history of demand, from the ledger: tokens per quarter of an hour of the last weeks, and per request."""

import logging
import time
from collections.abc import Set as AbstractSet
from typing import Final

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import SQL_ERRORS, describe
from db.tables import RollupRow, SliceRow
from fleet.policy.forecast import SLOT_S, Forecast
from protocol import subjects

WEEKS: Final = 4
SIZED_SLOTS: Final = 2  # quarters of an hour, this one included, whose requests say what one takes

log = logging.getLogger(__name__)


def _requests_of(queues: AbstractSet[str], trusted_pools: AbstractSet[str], since_s: int) -> list[ColumnElement[bool]]:
    """Return the conditions for the quarters of an hour of a group's requests."""
    models = set(map(subjects.model_of, queues))
    is_trusted = SliceRow.pool.in_(trusted_pools)
    return [
        RollupRow.width_s == int(SLOT_S),
        RollupRow.bucket_unix_ms >= since_s * 1000,
        SliceRow.model.in_(models),
        ~is_trusted if models & queues else is_trusted,
    ]


async def tokens_per_request(
    engine: AsyncEngine, trusted_pools: AbstractSet[str], queues: AbstractSet[str]
) -> float | None:
    """Return the mean tokens of a group's recent answered requests; None: no requests, or SQL is unavailable."""
    since_s = (int(time.time() // SLOT_S) - SIZED_SLOTS + 1) * int(SLOT_S)
    sums = func.sum(RollupRow.requests), func.sum(RollupRow.prompt_tokens + RollupRow.completion_tokens)
    statement = select(*sums).join(SliceRow, SliceRow.id == RollupRow.slice_id)
    answered = SliceRow.outcome == "ok"
    try:
        async with engine.connect() as connection:
            found = await connection.execute(statement.where(answered, *_requests_of(queues, trusted_pools, since_s)))
            requests, tokens = found.one()
    except SQL_ERRORS as error:
        log.warning("cannot read how many tokens requests use: %s", describe(error))
        return None
    return float(tokens) / int(requests) if tokens else None


async def learn(
    forecast: Forecast, engine: AsyncEngine, queues: AbstractSet[str], trusted_pools: AbstractSet[str]
) -> None:
    """Teach a forecast the last weeks' tokens of a group. Without SQL it knows nothing yet, which is logged.

    ``trusted_pools``: the only pools that answer jobs of trusted queues.
    """
    now_s = time.time()
    since_s = int((now_s - WEEKS * 7 * 86_400) // SLOT_S) * int(SLOT_S)
    tokens = func.sum(RollupRow.prompt_tokens + RollupRow.completion_tokens)
    statement = (
        select(RollupRow.bucket_unix_ms, tokens)
        .join(SliceRow, SliceRow.id == RollupRow.slice_id)
        .where(*_requests_of(queues, trusted_pools, since_s))
        .group_by(RollupRow.bucket_unix_ms)
    )
    try:
        async with engine.connect() as connection:
            by_slot = {int(row[0]) // 1000: int(row[1]) for row in await connection.execute(statement)}
    except SQL_ERRORS as error:
        log.warning("cannot read the history of demand: %s", describe(error))
        return
    if by_slot:
        last_s = int(now_s // SLOT_S) * int(SLOT_S)  # what has not ended yet is left out
        for slot_s in range(min(by_slot), last_s, int(SLOT_S)):
            forecast.learn(slot_s, by_slot.get(slot_s, 0) / SLOT_S)
