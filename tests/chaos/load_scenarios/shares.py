"""The shares and the latencies of tenants while capacity does not suffice for all."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import psutil

from tests.chaos.load_scenarios.callers import Asked, served_tokens, ttfts_ms
from tests.chaos.load_scenarios.disconnect import full_engine, until_queued
from tests.chaos.load_scenarios.plan import Ceiling, Stage, expect
from tests.chaos.report import Report, percentile
from tests.chaos.system import Shape

BUSY, QUIET = "busy", "quiet"
TOKENS = 32
FEW_TOKENS = 4
FAIR_SHAPE = Shape(workers=2, max_sequences=10, inter_token_s=0.05, tenants={BUSY: 1.0, QUIET: 1.0})
WEIGHTS_SHAPE = Shape(workers=2, max_sequences=10, inter_token_s=0.05, tenants={BUSY: 3.0, QUIET: 1.0})
MIN_FLOOD = 0.8  # of capacity: what others must be kept busy with, or nothing is proven; a tenth is reserved
ALONE_S = 10.0  # how long it is measured how it is without others
BEFORE_PER_S = 2.0
IN_TURN_LIMIT = 1.0  # two workers deal out a few dozen jobs, each by itself; in the order of coming it is far more
FLEX = {"service_tier": "flex"}


async def fair(stage: Stage) -> None:
    """Equal weights, one offers ten times what the other does: equal shares."""
    await _two_backlogs(stage, offers=(10.0, 1.0), tolerance=0.10)


async def weights(stage: Stage) -> None:
    """Weights of three to one: shares of three to one."""
    await _two_backlogs(stage, offers=(5.0, 5.0), tolerance=0.15)


async def _two_backlogs(stage: Stage, *, offers: tuple[float, float], tolerance: float) -> None:
    """Both tenants keep a backlog; when the time is over, those that still wait hang up."""
    callers, plan, report = stage.callers, stage.plan, stage.report
    ceiling = Ceiling(stage.system.shape, TOKENS)
    leave = asyncio.Event()
    psutil.cpu_percent()
    first_s = time.monotonic()
    offered = [
        asyncio.create_task(
            callers.offer(offer * ceiling.requests_per_s, plan.seconds, tokens=TOKENS, tenant=tenant, leave=leave)
        )
        for tenant, offer in zip((BUSY, QUIET), offers, strict=True)
    ]
    await asyncio.sleep(plan.seconds)
    until_s = time.monotonic()
    report.extras["machine_busy_percent"] = psutil.cpu_percent()
    leave.set()
    await asyncio.gather(*offered)
    # The first jobs find the slots free; the fair order shows from the second round on.
    served = served_tokens(callers.asked, first_s + ceiling.service_s, until_s)
    of_weights = stage.system.shape.tenants[BUSY] / stage.system.shape.tenants[QUIET]
    ratio = max(1, served[BUSY]) / max(1, served[QUIET]) / of_weights
    report.extras |= {"busy_tokens": served[BUSY], "quiet_tokens": served[QUIET], "of_fair_share": round(ratio, 3)}
    expect(report, "unfairness", max(ratio, 1 / ratio) - 1, at_most=tolerance * plan.slack)


async def backlogs(stage: Stage) -> None:
    """Both wait behind full engines, all of one before the first of the other: then they are served in turn.

    Judged by the order alone, which is the same however slow the machine is. ``plan.count``: of the smaller backlog.
    """
    callers, system, count = stage.callers, stage.system, stage.plan.count
    backlogs = {BUSY: 2 * count, QUIET: count}
    asked: list[asyncio.Task[Asked]] = []
    async with full_engine(system, callers):
        for tenant, waiting in backlogs.items():
            asked += [asyncio.create_task(callers.ask(tokens=FEW_TOKENS, tenant=tenant)) for _ in range(waiting)]
            await until_queued(system, len(asked))
    began = sorted(await asyncio.gather(*asked), key=lambda one: one.answer.texts[0][0])
    served = Counter(one.tenant for one in began[:count])  # of which neither tenant alone has had enough
    stage.report.extras |= {"busy_began": served[BUSY], "quiet_began": served[QUIET]}
    unfairness = max(served.values()) / max(1, min(served[BUSY], served[QUIET])) - 1
    expect(stage.report, "unfairness_in_turn", unfairness, at_most=IN_TURN_LIMIT)


async def light_tenant(stage: Stage) -> None:
    """A tenant who asks now and then hardly notices the other's spike."""
    callers, plan, report = stage.callers, stage.plan, stage.report
    ceiling = Ceiling(stage.system.shape, TOKENS)
    alone = await callers.offer(BEFORE_PER_S, ALONE_S, tokens=TOKENS, tenant=QUIET)
    leave = asyncio.Event()
    first_s = time.monotonic()
    heavy = asyncio.create_task(
        callers.offer(10 * ceiling.requests_per_s, plan.seconds, tokens=TOKENS, tenant=BUSY, leave=leave)
    )
    await asyncio.sleep(ceiling.service_s)  # until the spike holds every slot
    light = await callers.offer(1.0, plan.seconds - ceiling.service_s, tokens=TOKENS, tenant=QUIET)
    until_s = time.monotonic()
    leave.set()
    await heavy
    _expect_flood(stage, ceiling, first_s + ceiling.service_s, until_s)
    bound_ms = plan.slack * (2 * _ttft_p95(report, "alone", alone) + ceiling.service_s * 1000)
    expect(report, "light_ttft_ms_p95", percentile(ttfts_ms(light), 95), at_most=bound_ms)


async def batch(stage: Stage) -> None:
    """Batch jobs fill every pool; interactive ones find a place at once nevertheless."""
    callers, plan, report = stage.callers, stage.plan, stage.report
    ceiling = Ceiling(stage.system.shape, TOKENS)
    idle = await callers.offer(BEFORE_PER_S, ALONE_S, tokens=FEW_TOKENS, tenant=QUIET)
    leave = asyncio.Event()
    first_s = time.monotonic()
    flood = asyncio.create_task(
        callers.offer(3 * ceiling.requests_per_s, plan.seconds, tokens=TOKENS, tenant=BUSY, rest=FLEX, leave=leave)
    )
    await asyncio.sleep(ceiling.service_s)
    interactive = await callers.offer(BEFORE_PER_S, plan.seconds - ceiling.service_s, tokens=FEW_TOKENS, tenant=QUIET)
    until_s = time.monotonic()
    leave.set()
    await flood
    _expect_flood(stage, ceiling, first_s + ceiling.service_s, until_s)
    step_ms = stage.system.shape.inter_token_s * 1000
    bound_ms = plan.slack * (1.5 * _ttft_p95(report, "idle", idle) + step_ms)
    expect(report, "interactive_ttft_ms_p95", percentile(ttfts_ms(interactive), 95), at_most=bound_ms)


def _expect_flood(stage: Stage, ceiling: Ceiling, from_s: float, until_s: float) -> None:
    rate = served_tokens(stage.callers.asked, from_s, until_s)[BUSY] / (until_s - from_s)
    stage.report.extras |= {"flood_tokens_per_s": round(rate, 1), "capacity_tokens_per_s": ceiling.tokens_per_s}
    limit = stage.plan.slack / MIN_FLOOD
    expect(stage.report, "capacity_over_flood", ceiling.tokens_per_s / max(rate, 1.0), at_most=limit)


def _ttft_p95(report: Report, name: str, asked: Sequence[Asked]) -> float:
    value = percentile(ttfts_ms(asked), 95) or 0.0
    report.extras[f"ttft_ms_p95_{name}"] = value
    return value
