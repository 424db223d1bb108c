"""What the ledger knows of the past: the tokens of each quarter of an hour of the last weeks."""

import logging
import time
from collections.abc import Set as AbstractSet
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from db.errors import SQL_ERRORS, describe
from db.models import RollupRow, SliceRow
from fleet.policy.forecast import SLOT_S, Forecast
from protocol import subjects

WEEKS: Final = 4

log = logging.getLogger(__name__)


async def learn(
    forecast: Forecast, engine: AsyncEngine, queues: AbstractSet[str], trusted_pools: AbstractSet[str]
) -> None:
    """Teach a forecast the last weeks' tokens of a group. Without SQL it knows nothing yet, which is logged.

    ``trusted_pools``: who answered in the queues of what demands them; nobody else did.
    """
    models = set(map(subjects.model_of, queues))
    is_trusted = SliceRow.pool.in_(trusted_pools)
    now_s = time.time()
    since_s = int((now_s - WEEKS * 7 * 86_400) // SLOT_S) * int(SLOT_S)
    tokens = func.sum(RollupRow.prompt_tokens + RollupRow.completion_tokens)
    statement = (
        select(RollupRow.bucket_unix_ms, tokens)
        .join(SliceRow, SliceRow.id == RollupRow.slice_id)
        .where(
            RollupRow.width_s == int(SLOT_S),
            RollupRow.bucket_unix_ms >= since_s * 1000,
            SliceRow.model.in_(models),
            ~is_trusted if models & queues else is_trusted,
        )
        .group_by(RollupRow.bucket_unix_ms)
    )
    try:
        async with engine.connect() as connection:
            by_slot = {int(row[0]) // 1000: int(row[1]) for row in await connection.execute(statement)}
    except SQL_ERRORS as error:
        log.warning("the past is not known: %s", describe(error))
        return
    if by_slot:
        last_s = int(now_s // SLOT_S) * int(SLOT_S)  # what has not ended yet is left out
        for slot_s in range(min(by_slot), last_s, int(SLOT_S)):
            forecast.learn(slot_s, by_slot.get(slot_s, 0) / SLOT_S)
