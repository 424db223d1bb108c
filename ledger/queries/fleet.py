"""The fleet's machines, decisions, and what losses of machines cost requests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import and_, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from db.tables import AttemptRow, Decision, DecisionRow, MachineRow, RequestRow
from ledger.queries.window import NO_FILTERS, Filters, Window

ENDING_MS: Final = 15 * 60_000  # a machine that its provider has not ended since then is a leak
STARTING_MS: Final = 30 * 60_000  # a machine without a worker since then is one, too
_OVER: Final = ("gone", "lost", "failed")  # of fleet.machine.State
MAX_MACHINES: Final = 20_000  # of a time span; a chart of more shows the latest ones only


@dataclass(frozen=True, slots=True)
class FleetMachine:
    """One machine of the fleet controller."""

    machine_id: str
    pool: str
    place: str
    state: str  # fleet.machine.State
    worker_id: str | None
    wanted_unix_ms: int
    serving_unix_ms: int | None
    over_unix_ms: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class LossCost:
    """What the end of one worker cost the requests that it had."""

    requests: int = 0
    failed: int = 0  # of these; the others were continued elsewhere
    pause_ms: float | None = None  # the longest, from its end to the next token; None: nothing was continued


async def machines(connection: AsyncConnection, window: Window) -> list[FleetMachine]:
    """Return the machines that were there in a time span, the latest first."""
    columns = [getattr(MachineRow, name) for name in FleetMachine.__dataclass_fields__]
    statement = (
        select(*columns)
        .where(
            MachineRow.wanted_unix_ms < window.until_unix_ms,
            or_(MachineRow.over_unix_ms.is_(None), MachineRow.over_unix_ms >= window.since_unix_ms),
        )
        .order_by(MachineRow.wanted_unix_ms.desc())
        .limit(MAX_MACHINES)
    )
    return [FleetMachine(*row) for row in await connection.execute(statement)]


async def lost_machines(
    connection: AsyncConnection, window: Window, limit: int, *, where: Filters = NO_FILTERS
) -> list[tuple[int, str]]:
    """Return when and in which pool machines were lost in a time span, the latest first; a pool filters them."""
    within = [
        MachineRow.state == "lost",
        MachineRow.over_unix_ms >= window.since_unix_ms,
        MachineRow.over_unix_ms < window.until_unix_ms,
    ]
    if where.get("pool"):
        within.append(MachineRow.pool.in_(list(where["pool"])))
    latest = select(MachineRow.over_unix_ms, MachineRow.pool).where(*within).order_by(MachineRow.over_unix_ms.desc())
    return [(row.over_unix_ms, row.pool) for row in await connection.execute(latest.limit(limit))]


async def has_machines(connection: AsyncConnection) -> bool:
    """Return whether the fleet has machines that may cost money."""
    there = select(MachineRow.machine_id).where(MachineRow.state.not_in(_OVER)).limit(1)
    return await connection.scalar(there) is not None


async def leaked_machines(connection: AsyncConnection, now_unix_ms: int) -> list[tuple[str, str]]:
    """Return id and pool of machines that cost money without serving: not ended in time, or long without a worker."""
    columns = MachineRow.__table__.columns
    times = (columns.drained_unix_ms, columns.serving_unix_ms, columns.launched_unix_ms, columns.wanted_unix_ms)
    is_leaked = or_(
        and_(columns.state == "ending", func.coalesce(*times) < now_unix_ms - ENDING_MS),
        and_(columns.state.in_(["wanted", "launched"]), columns.wanted_unix_ms < now_unix_ms - STARTING_MS),
    )
    statement = select(columns.machine_id, columns.pool).where(is_leaked).order_by(columns.wanted_unix_ms)
    return [(row.machine_id, row.pool) for row in await connection.execute(statement.limit(MAX_MACHINES))]


async def decisions(connection: AsyncConnection, window: Window, limit: int) -> list[Decision]:
    """Return the latest decisions of a time span, the latest first."""
    columns = [getattr(DecisionRow, name) for name in Decision.__struct_fields__]
    statement = (
        select(*columns)
        .where(DecisionRow.decided_unix_ms >= window.since_unix_ms, DecisionRow.decided_unix_ms < window.until_unix_ms)
        .order_by(DecisionRow.decided_unix_ms.desc())
        .limit(limit)
    )
    return [Decision(*row) for row in await connection.execute(statement)]


async def decided_before(connection: AsyncConnection, window: Window) -> dict[str, int]:
    """Return the size that was in force for each pool when a time span began."""
    newest = (
        select(DecisionRow.pool, func.max(DecisionRow.decided_unix_ms).label("decided_unix_ms"))
        .where(DecisionRow.decided_unix_ms < window.since_unix_ms)
        .group_by(DecisionRow.pool)
        .subquery()
    )
    is_newest = (DecisionRow.pool == newest.c.pool) & (DecisionRow.decided_unix_ms == newest.c.decided_unix_ms)
    statement = select(DecisionRow.pool, DecisionRow.size).join(newest, is_newest)
    return {row.pool: row.size for row in await connection.execute(statement)}


async def loss_costs(connection: AsyncConnection, worker_ids: Iterable[str]) -> dict[str, LossCost]:
    """Return what the ends of workers cost, by worker; one whose end met no request is left out.

    A pause lies between two machines' clocks: it is as exact as these agree.
    """
    wanted: Sequence[str] = list(worker_ids)
    if not wanted:
        return {}
    last, following = aliased(AttemptRow), aliased(AttemptRow)
    pause_ms = following.started_unix_ms + following.ttft_ms - (last.started_unix_ms + last.total_ms)
    statement = (
        select(
            last.worker_id,
            func.count(),
            func.sum(case((RequestRow.outcome == "failed", 1), else_=0)),
            func.max(pause_ms),
        )
        .join(RequestRow, RequestRow.request_id == last.request_id)
        .join(
            following,
            (following.request_id == last.request_id) & (following.attempt == last.attempt + 1),
            isouter=True,
        )
        .where(last.worker_id.in_(wanted), last.outcome == "failed")
        .group_by(last.worker_id)
    )
    found = await connection.execute(statement)
    return {row[0]: LossCost(row[1], row[2], None if row[3] is None else max(0.0, row[3])) for row in found}
