"""A cheap pool and a dear one: who gets the jobs, and how soon the dear one takes over."""

import asyncio
import itertools
import signal
import time

from sqlalchemy import func, select

from db.tables import AttemptRow
from pool_worker.settings import GateSettings
from tests.chaos.load_scenarios.callers import Asked, Callers
from tests.chaos.load_scenarios.plan import Stage, expect
from tests.chaos.report import percentile
from tests.chaos.system import Shape, System
from tests.chaos.workers import LiveWorker

CHEAP, DEAR = "cheap", "dear"
CHEAP_SLOTS = (0, 1)
DEAR_SLOT = 2
TOKEN_S = 0.025
TOKENS = 40
SEQUENCES = 16
RATE_PER_S = 0.3 * len(CHEAP_SLOTS) * SEQUENCES / (TOKENS * TOKEN_S)
TIERS_SHAPE = Shape(workers=0, max_sequences=SEQUENCES, inter_token_s=TOKEN_S)  # the scenario starts its own
GATE = GateSettings(backlog_jobs=32, oldest_s=5.0)
TAKEOVER_LIMIT_S = 1.0
AFTER_KILL_S = 1.5  # how long requests keep coming once nobody but the dear pool is left
POLL_S = 0.02
SEEN_LIMIT_S = 10.0


async def tiers(stage: Stage) -> None:
    """``plan.count`` times: a while of health, the cheap pool killed in mid-stream, the cheap pool back."""
    system, callers, plan, report = stage.system, stage.callers, stage.plan, stage.report
    cheap = await _spawn_cheap(system)
    dear = await system.farm.spawn(DEAR_SLOT, {"pool": DEAR, "tier": "on-demand", "gate": GATE}, replace=False)
    await callers.wait_until_served()
    await _settle(system, [*cheap, dear])
    new_ms: list[float] = []
    cut_ms: list[float] = []
    jobs_in_health = 0
    for _ in range(plan.count):
        jobs_in_health += await _in_health(system, callers, plan.seconds, dear)
        killed_s, asked = await _kill_cheap(callers, cheap)
        report.faults += len(cheap)
        cut_ms += [_longest_pause_ms(one, killed_s) for one in asked if _was_cut(one, killed_s)]
        new_ms += [one.ttft_s * 1000 for one in asked if killed_s <= one.record.due_s]
        cheap = await _spawn_cheap(system)
        await _settle(system, cheap)
    jobs_in_health += await _in_health(system, callers, plan.seconds, dear)
    expect(report, "dear_jobs_in_health", jobs_in_health, at_most=0)
    limit_ms = plan.slack * TAKEOVER_LIMIT_S * 1000
    expect(report, "cut_streams_ms_max", percentile(cut_ms, 100), at_most=limit_ms)
    expect(report, "new_requests_ttft_ms_max", percentile(new_ms, 100), at_most=limit_ms)
    report.gaps_ms["cheap pool killed"] = cut_ms
    report.extras |= {"cut_streams": len(cut_ms), "new_requests": len(new_ms)}
    report.extras["attempts_by_pool"] = await _attempts_by_pool(system)


async def _spawn_cheap(system: System) -> list[LiveWorker]:
    change = {"pool": CHEAP, "tier": "spot"}
    return [await system.farm.spawn(slot, change, replace=False) for slot in CHEAP_SLOTS]


async def _settle(system: System, workers: list[LiveWorker]) -> None:
    """Wait until these workers' heartbeats have been heard, and a gate has had the time to hear them too."""
    deadline_s = time.monotonic() + SEEN_LIMIT_S
    while not all(system.watcher.has_beaten(worker.worker_id) for worker in workers):
        assert time.monotonic() < deadline_s, "a worker sends no heartbeat"
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(0.75)  # gates look four times a second


async def _in_health(system: System, callers: Callers, seconds: float, dear: LiveWorker) -> int:
    """Offer what the cheap pool can do; returns how many jobs the dear worker took."""
    before = _runs_of(system, dear)
    await callers.offer(RATE_PER_S, seconds, tokens=TOKENS)
    return _runs_of(system, dear) - before


def _runs_of(system: System, worker: LiveWorker) -> int:
    return sum(run.worker_id == worker.worker_id for runs in system.watcher.runs.values() for run in runs)


async def _kill_cheap(callers: Callers, cheap: list[LiveWorker]) -> tuple[float, list[Asked]]:
    """Kill the cheap workers under load, and go on asking; returns when, and what was asked."""
    before_s = 2 * TOKENS * TOKEN_S
    offered = asyncio.create_task(callers.offer(RATE_PER_S, before_s + AFTER_KILL_S, tokens=TOKENS))
    await asyncio.sleep(before_s)
    for worker in cheap:
        worker.send(signal.SIGKILL)
    return time.monotonic(), await offered


def _was_cut(asked: Asked, killed_s: float) -> bool:
    texts = asked.answer.texts
    return bool(texts) and texts[0][0] < killed_s < texts[-1][0]


def _longest_pause_ms(asked: Asked, killed_s: float) -> float:
    """Return a stream's longest pause after the kill. Tokens under way still arrive, so the first is no measure."""
    arrivals_s = [arrived_s for arrived_s, _ in asked.answer.texts]
    pauses_s = [later - max(earlier, killed_s) for earlier, later in itertools.pairwise(arrivals_s) if later > killed_s]
    return max(pauses_s) * 1000


async def _attempts_by_pool(system: System) -> dict[str, int]:
    query = select(AttemptRow.pool, func.count()).group_by(AttemptRow.pool)
    async with system.database.connect() as connection:
        return {str(pool): int(count) for pool, count in await connection.execute(query)}
