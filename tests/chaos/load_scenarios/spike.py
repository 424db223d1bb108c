"""More than can be served at once, and nobody to serve it."""

import asyncio
import signal
import time
from collections.abc import Sequence

import psutil

from tests.chaos.load_scenarios.callers import Asked, served_tokens, ttfts_ms
from tests.chaos.load_scenarios.plan import Ceiling, Stage, expect
from tests.chaos.report import percentile
from tests.chaos.system import Shape

SPIKE_SHAPE = Shape(workers=2, max_sequences=20, inter_token_s=0.05)
# One worker, started by the scenario; callers are told more often that they wait.
NOBODY_SHAPE = Shape(workers=0, max_sequences=20, gateway_timeouts={"queued_comment_s": 1.0})
TOKENS = 40
SPIKE_FACTOR = 10
MIN_OF_CEILING = 0.95
PROBES = 10
DRAIN_MARGIN = 1.05
COMMENT_LIMIT_S = 2.5


async def spike(stage: Stage) -> None:
    """Offer ten times the capacity; then the queue must be gone as soon as the engines can make it."""
    callers, plan, report = stage.callers, stage.plan, stage.report
    ceiling = Ceiling(stage.system.shape, TOKENS)
    idle = [await callers.ask(tokens=2) for _ in range(PROBES)]
    psutil.cpu_percent()
    first_s = time.monotonic()
    offer = callers.offer(SPIKE_FACTOR * ceiling.requests_per_s, plan.seconds, tokens=TOKENS)
    offered = asyncio.create_task(offer)
    await asyncio.sleep(DRAIN_MARGIN * SPIKE_FACTOR * plan.seconds + ceiling.service_s)
    report.extras["machine_busy_percent"] = psutil.cpu_percent()
    late = [await callers.ask(tokens=2) for _ in range(PROBES)]
    spiked = await offered
    _judge_throughput(stage, ceiling, first_s, spiked)
    latencies_s = [asked.record.latency_s for asked in spiked]
    report.extras |= {"latency_s_p50": percentile(latencies_s, 50), "latency_s_max": percentile(latencies_s, 100)}
    # A free slot's first token comes with the next step.
    limit_ms = plan.slack * 2 * stage.system.shape.inter_token_s * 1000
    report.extras["idle_ttft_ms_p95"] = percentile(ttfts_ms(idle), 95)
    expect(report, "ttft_ms_p95_after_drain", percentile(ttfts_ms(late), 95), at_most=limit_ms)


def _judge_throughput(stage: Stage, ceiling: Ceiling, first_s: float, spiked: Sequence[Asked]) -> None:
    # All slots are filled a moment after the start; until the queue is empty, nothing but the path can hold them up.
    from_s = first_s + ceiling.service_s / 2
    until_s = first_s + max(stage.plan.seconds, 3 * ceiling.service_s)
    rate = served_tokens(spiked, from_s, until_s).total() / (until_s - from_s)
    stage.report.extras |= {"tokens_per_s": round(rate, 1), "capacity_tokens_per_s": ceiling.tokens_per_s}
    limit = stage.plan.slack / MIN_OF_CEILING
    expect(stage.report, "capacity_over_throughput", ceiling.tokens_per_s / max(rate, 1.0), at_most=limit)


async def zero_workers(stage: Stage) -> None:
    """Nobody is there for a while: all requests wait, are told so, and are answered when a worker has come."""
    callers, plan, report, farm = stage.callers, stage.plan, stage.report, stage.system.farm
    only = await farm.spawn(0, replace=False)  # gateways know a model's tokenizer from its first worker
    await callers.wait_until_served()
    only.send(signal.SIGTERM)
    await asyncio.to_thread(only.process.join)
    went_s = time.monotonic()
    offered = asyncio.create_task(callers.offer(plan.count / plan.seconds, plan.seconds, tokens=TOKENS))
    await asyncio.sleep(plan.seconds)
    early = [asked for asked in callers.asked if asked.record.due_s > went_s]
    if early:
        report.offend(f"{len(early)} requests ended while nobody was there", early[0].request_id, str(early[0]))
    came_s = time.monotonic()
    await farm.spawn(0)
    waited = await offered
    long = [asked for asked in waited if came_s - asked.record.due_s > COMMENT_LIMIT_S * plan.slack]
    if not all(asked.answer.comments for asked in long):
        report.offend("some waited long without a word")
    report.extras["comments"] = sum(len(asked.answer.comments) for asked in waited)
    first_s = min(asked.record.due_s + asked.ttft_s for asked in waited)
    report.extras["s_from_worker_to_first_token"] = round(first_s - came_s, 2)
    report.extras["s_from_worker_to_last_answer"] = round(max(asked.record.ended_s for asked in waited) - came_s, 2)


async def nats_idle(stage: Stage) -> None:
    """The queue server dies while nothing runs; whoever asks while it is away, or right after, is answered."""
    server, callers, report = stage.system.queue_servers[0], stage.callers, stage.report
    back_ms: list[float] = []
    for _ in range(stage.plan.count):
        await asyncio.to_thread(server.kill)
        report.faults += 1
        during = asyncio.create_task(callers.ask(tokens=2))
        await asyncio.sleep(stage.plan.seconds)
        await asyncio.to_thread(server.start)
        started_s = time.monotonic()
        after = await callers.ask(tokens=2)
        back_ms += [(asked.record.ended_s - started_s) * 1000 for asked in (await during, after)]
    report.extras["answered_after_restart_ms_p50"] = percentile(back_ms, 50)
    report.extras["answered_after_restart_ms_max"] = percentile(back_ms, 100)
