"""More than can be served at once, and nobody to serve it."""

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.chaos.load_scenarios.callers import Asked, Callers, served_tokens, ttfts_ms
from tests.chaos.load_scenarios.plan import LoadPlan, expect
from tests.chaos.report import Report, percentile
from tests.chaos.system import Shape, System

WORKERS = 2
SLOTS = 20
TOKEN_S = 0.05
TOKENS = 40
SHAPE = Shape(workers=WORKERS, max_sequences=SLOTS, inter_token_s=TOKEN_S)
CEILING_TOKENS_PER_S = WORKERS * SLOTS / TOKEN_S
CAPACITY_PER_S = CEILING_TOKENS_PER_S / TOKENS
SERVICE_S = TOKENS * TOKEN_S
SPIKE_FACTOR = 10
MIN_OF_CEILING = 0.95
PROBES = 20
DRAIN_MARGIN = 1.05
LATE_PROBE_TTFT_MS = 4 * TOKEN_S * 1000


async def spike(folder: Path, plan: LoadPlan) -> Report:
    """Offer ten times the capacity; then the queue must be gone as soon as the engines can make it."""
    report = Report(plan.name, plan.seed, 0)
    async with System(folder, SHAPE) as system:
        callers = Callers(system, plan.seed)
        await callers.wait_until_served()
        idle = [await callers.ask(tokens=2) for _ in range(PROBES)]
        psutil.cpu_percent()
        first_s = time.perf_counter()
        offered = asyncio.create_task(callers.offer(SPIKE_FACTOR * CAPACITY_PER_S, plan.seconds, tokens=TOKENS))
        drain_s = DRAIN_MARGIN * plan.slack * SPIKE_FACTOR * plan.seconds + SERVICE_S
        await asyncio.sleep(drain_s)
        report.extras["machine_busy_percent"] = psutil.cpu_percent()
        late = [await callers.ask(tokens=2) for _ in range(PROBES)]
        spiked = await offered
        _judge_spike(report, plan, first_s, spiked, idle=idle, late=late)
        await callers.reckon(report)
    return report


def _judge_spike(
    report: Report,
    plan: LoadPlan,
    first_s: float,
    spiked: Sequence[Asked],
    *,
    idle: Sequence[Asked],
    late: Sequence[Asked],
) -> None:
    # All slots are filled a moment after the start; until the queue is empty, nothing but the path can hold them up.
    from_s, until_s = first_s + SERVICE_S / 2, first_s + max(plan.seconds, 2 * SERVICE_S)
    rate = served_tokens(spiked, from_s, until_s).total() / (until_s - from_s)
    expect(report, "ceiling_over_throughput", CEILING_TOKENS_PER_S / rate, at_most=plan.slack / MIN_OF_CEILING)
    report.extras["tokens_per_s"] = round(rate, 1)
    report.extras["capacity_tokens_per_s"] = CEILING_TOKENS_PER_S
    latencies_s = [asked.record.latency_s for asked in spiked]
    report.extras |= {"latency_s_p50": percentile(latencies_s, 50), "latency_s_max": percentile(latencies_s, 100)}
    report.extras["idle_ttft_ms_p95"] = percentile(ttfts_ms(idle), 95)
    ttft_ms = percentile(ttfts_ms(late), 95) or 0.0
    expect(report, "ttft_ms_p95_after_drain", ttft_ms, at_most=plan.slack * LATE_PROBE_TTFT_MS)


async def zero_workers(folder: Path, plan: LoadPlan) -> Report:
    """Nobody is there for a while: all requests wait, are told so, and are answered when a worker has come."""
    report = Report(plan.name, plan.seed, 0)
    shape = Shape(
        workers=0, max_sequences=SLOTS, inter_token_s=0.02, gateway_settings={"timeouts": {"queued_comment_s": 1.0}}
    )
    async with System(folder, shape) as system:
        callers = Callers(system, plan.seed)
        only = await system.farm.spawn(0, replace=False)
        await callers.wait_until_served()
        only.send(signal.SIGTERM)
        await asyncio.to_thread(only.process.join)
        offered = asyncio.create_task(callers.offer(plan.count / plan.seconds, plan.seconds, tokens=TOKENS))
        await asyncio.sleep(plan.seconds)
        came_s = time.perf_counter()
        early = [asked for asked in callers.asked if asked.record.due_s > came_s - plan.seconds]
        if early:
            report.offend(f"{len(early)} requests ended while nobody was there", early[0].request_id, str(early[0]))
        await system.farm.spawn(0)
        waited = await offered
        report.extras["comments"] = sum(len(asked.answer.comments) for asked in waited)
        uninformed = [a for a in waited if came_s - a.record.due_s > 2.5 * plan.slack and not a.answer.comments]
        if uninformed:
            report.offend(f"{len(uninformed)} waited without a word", uninformed[0].request_id)
        report.extras["s_from_worker_to_first_token"] = round(
            min(a.answer.texts[0][0] for a in waited if a.answer.texts) - came_s, 2
        )
        report.extras["s_from_worker_to_last_answer"] = round(max(a.record.ended_s for a in waited) - came_s, 2)
        await callers.reckon(report)
    return report


async def nats_idle(folder: Path, plan: LoadPlan) -> Report:
    """The queue server dies while nothing runs; whoever asks while it is away, or right after, is answered."""
    report = Report(plan.name, plan.seed, plan.count)
    async with System(folder, Shape(workers=1)) as system:
        callers = Callers(system, plan.seed)
        await callers.wait_until_served()
        server = system.queue_servers[0]
        back_ms = []
        for _ in range(plan.count):
            await asyncio.to_thread(server.kill)
            during = asyncio.create_task(callers.ask(tokens=2))
            await asyncio.sleep(plan.seconds)
            await asyncio.to_thread(server.start)
            started_s = time.perf_counter()
            after = await callers.ask(tokens=2)
            back_ms += [(asked.record.ended_s - started_s) * 1000 for asked in (await during, after)]
        report.extras["answered_after_restart_ms_p50"] = percentile(back_ms, 50)
        report.extras["answered_after_restart_ms_max"] = percentile(back_ms, 100)
        await callers.reckon(report)
    return report
