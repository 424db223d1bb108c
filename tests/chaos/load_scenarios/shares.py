"""Who is served how much, and how soon, while there is not enough for all."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.chaos.load_scenarios.callers import Asked, Callers, served_tokens, ttfts_ms
from tests.chaos.load_scenarios.plan import LoadPlan, expect
from tests.chaos.report import Report, percentile
from tests.chaos.system import Shape, System

WORKERS = 2
SLOTS = 10
TOKEN_S = 0.05
TOKENS = 32
SERVICE_S = TOKENS * TOKEN_S
CAPACITY_PER_S = WORKERS * SLOTS / SERVICE_S
BUSY, QUIET = "busy", "quiet"
ALONE = 20  # requests that tell how it is without others


def _shape(busy_weight: float = 1.0) -> Shape:
    tenants = {BUSY: busy_weight, QUIET: 1.0}
    return Shape(workers=WORKERS, max_sequences=SLOTS, inter_token_s=TOKEN_S, tenants=tenants)


async def fair(folder: Path, plan: LoadPlan) -> Report:
    """Equal weights, one offers ten times what the other does: equal shares."""
    return await _two_backlogs(folder, plan, busy_weight=1.0, offers=(10.0, 1.0), tolerance=0.10)


async def weights(folder: Path, plan: LoadPlan) -> Report:
    """Weights of three to one: shares of three to one."""
    return await _two_backlogs(folder, plan, busy_weight=3.0, offers=(5.0, 5.0), tolerance=0.15)


async def _two_backlogs(
    folder: Path, plan: LoadPlan, *, busy_weight: float, offers: tuple[float, float], tolerance: float
) -> Report:
    """Both tenants keep a backlog; when the time is over, those that still wait hang up."""
    report = Report(plan.name, plan.seed, 0)
    async with System(folder, _shape(busy_weight)) as system:
        callers = Callers(system, plan.seed)
        await callers.wait_until_served()
        leave = asyncio.Event()
        psutil.cpu_percent()
        first_s = time.perf_counter()
        offered = [
            asyncio.create_task(
                callers.offer(offer * CAPACITY_PER_S, plan.seconds, tokens=TOKENS, tenant=tenant, leave=leave)
            )
            for tenant, offer in zip((BUSY, QUIET), offers, strict=True)
        ]
        await asyncio.sleep(plan.seconds)
        until_s = time.perf_counter()
        report.extras["machine_busy_percent"] = psutil.cpu_percent()
        leave.set()
        await asyncio.gather(*offered)
        # The first jobs find the slots free; the fair order shows from the second round on.
        served = served_tokens(callers.asked, first_s + SERVICE_S, until_s)
        report.extras |= {"busy_tokens": served[BUSY], "quiet_tokens": served[QUIET]}
        ratio = served[BUSY] / max(1, served[QUIET]) / busy_weight
        report.extras["share_over_fair_share"] = round(ratio, 3)
        expect(report, "unfairness", max(ratio, 1 / max(ratio, 1e-9)) - 1, at_most=tolerance * plan.slack)
        await callers.reckon(report)
    return report


async def light_tenant(folder: Path, plan: LoadPlan) -> Report:
    """A tenant who asks now and then hardly notices the other's spike."""
    report = Report(plan.name, plan.seed, 0)
    async with System(folder, _shape()) as system:
        callers = Callers(system, plan.seed)
        await callers.wait_until_served()
        alone = await callers.offer(2.0, ALONE / 2.0, tokens=TOKENS, tenant=QUIET)
        leave = asyncio.Event()
        heavy = asyncio.create_task(
            callers.offer(10 * CAPACITY_PER_S, plan.seconds, tokens=TOKENS, tenant=BUSY, leave=leave)
        )
        await asyncio.sleep(SERVICE_S)  # until the spike holds every slot
        light = await callers.offer(1.0, plan.seconds - SERVICE_S, tokens=TOKENS, tenant=QUIET)
        leave.set()
        await heavy
        before_ms = _ttft_p95(report, "alone", alone)
        during_ms = _ttft_p95(report, "during_spike", light)
        bound_ms = plan.slack * (2 * before_ms + SERVICE_S * 1000)
        expect(report, "light_ttft_ms_p95", during_ms, at_most=bound_ms)
        report.extras["bound_ms"] = round(bound_ms, 1)
        await callers.reckon(report)
    return report


async def batch(folder: Path, plan: LoadPlan) -> Report:
    """Batch jobs fill every pool; interactive ones find a place at once nevertheless."""
    report = Report(plan.name, plan.seed, 0)
    async with System(folder, _shape()) as system:
        callers = Callers(system, plan.seed)
        await callers.wait_until_served()
        idle = await callers.offer(2.0, ALONE / 2.0, tokens=4, tenant=QUIET)
        leave = asyncio.Event()
        flood = asyncio.create_task(
            callers.offer(3 * CAPACITY_PER_S, plan.seconds, tokens=TOKENS, tenant=BUSY, flex=True, leave=leave)
        )
        await asyncio.sleep(SERVICE_S)
        interactive = await callers.offer(2.0, plan.seconds - SERVICE_S, tokens=4, tenant=QUIET)
        report.extras["batch_tokens"] = 0
        leave.set()
        flooded = await flood
        report.extras["batch_tokens"] = sum(served_tokens(flooded, 0, float("inf")).values())
        idle_ms = _ttft_p95(report, "idle", idle)
        bound_ms = plan.slack * (1.5 * idle_ms + TOKEN_S * 1000)
        expect(report, "interactive_ttft_ms_p95", _ttft_p95(report, "during_batch", interactive), at_most=bound_ms)
        report.extras["bound_ms"] = round(bound_ms, 1)
        await callers.reckon(report)
    return report


def _ttft_p95(report: Report, name: str, asked: Sequence[Asked]) -> float:
    value = percentile(ttfts_ms(asked), 95) or 0.0
    report.extras[f"ttft_ms_p95_{name}"] = value
    return value
