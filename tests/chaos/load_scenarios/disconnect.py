"""Callers who hang up at any moment: whatever their request held is free again at once, and nothing is left behind."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
from nats.aio.msg import Msg

from benchmarks.http_client import Exchange
from protocol import subjects
from protocol.job import Accepted, Failed, Finished, decode_step
from tests.chaos.load_scenarios.callers import Asked, Callers
from tests.chaos.load_scenarios.plan import Ceiling, LoadPlan, Stage, expect, expect_idle
from tests.chaos.report import Report, percentile
from tests.chaos.system import Shape, System

DISCONNECT_SHAPE = Shape(workers=1, max_sequences=16)
TOKENS = 50
CALLERS_PER_SLOT = 1.5  # some leave while they wait
WARM_UP = 60  # disconnects before memory is looked at
RUNNING_LIMIT_MS = 200.0
QUEUED_LIMIT_MS = 50.0
GROWTH_LIMIT_MIB = 16.0  # of one process; caches and arenas fill in any case
POLL_S = 0.001
WAIT_LIMIT_S = 60.0


@dataclass
class Ends:
    """The times when workers accepted and ended requests: a slot is free once the end is published."""

    accepted_s: dict[str, float] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)

    async def on_step(self, message: Msg) -> None:
        now_s = time.monotonic()
        for frame in decode_step(message.data).frames:
            if isinstance(frame, Accepted):
                self.accepted_s[frame.request_id] = now_s
            elif isinstance(frame, Finished | Failed):
                self.ended_s[frame.request_id] = now_s


async def disconnect(stage: Stage) -> None:
    """``plan.count`` callers hang up at any moment, and half as many surely in the queue."""
    system, callers, plan, report = stage.system, stage.callers, stage.plan, stage.report
    rng, ends = random.Random(f"disconnect {plan.seed}"), Ends()
    await system.bus.subscribe(subjects.frames_subject(">"), ends.on_step)
    await _leave_anywhen(system, callers, min(WARM_UP, plan.count), rng)
    await _leave_queued(system, callers, min(WARM_UP, plan.count) // 4, rng)
    await _until_idle(report, system)
    before = await _held(system)
    started = len(callers.asked)
    await _leave_anywhen(system, callers, plan.count, rng)
    left = [asked for asked in callers.asked[started:] if asked.was_left]
    queued_ms = await _leave_queued(system, callers, plan.count // 2, rng)
    await _until_idle(report, system)
    report.faults += sum(asked.was_left for asked in callers.asked)
    _judge(report, plan, _freed_ms(report, left, ends), queued_ms)
    _judge_growth(report, before, await _held(system))


def _judge(report: Report, plan: LoadPlan, running_ms: list[float], queued_ms: list[float]) -> None:
    for name, values, limit_ms in (
        ("running", running_ms, RUNNING_LIMIT_MS),
        ("queued", queued_ms, QUEUED_LIMIT_MS),
    ):
        report.extras[f"{name}_left"] = len(values)
        report.extras[f"{name}_freed_ms_p50"] = percentile(values, 50)
        report.extras[f"{name}_freed_ms_p99"] = percentile(values, 99)
        expect(report, f"{name}_freed_ms_max", percentile(values, 100), at_most=plan.slack * limit_ms)


def slots_of(system: System) -> int:
    """Return how many requests can run at the same time."""
    return system.shape.workers * system.shape.max_sequences


# --- hanging up -------------------------------------------------------------------------------------------------------


async def _leave_anywhen(system: System, callers: Callers, count: int, rng: random.Random) -> None:
    """Send ``count`` requests and disconnect, each at a random moment from the request to just after the answer."""
    gate = asyncio.Semaphore(round(CALLERS_PER_SLOT * slots_of(system)))

    async def one(after_s: float) -> None:
        async with gate:
            leave = asyncio.Event()
            asyncio.get_running_loop().call_later(after_s, leave.set)
            await callers.ask(tokens=TOKENS, leave=leave)

    longest_s = CALLERS_PER_SLOT * Ceiling(system.shape, TOKENS).service_s
    await asyncio.gather(*(one(rng.uniform(0.0, longest_s)) for _ in range(count)))


def _freed_ms(report: Report, left: list[Asked], ends: Ends) -> list[float]:
    """From hanging up to the end of the attempt, for all that were running then."""
    freed = []
    for asked in left:
        request_id = asked.request_id or ""
        left_s = asked.record.ended_s
        if ends.accepted_s.get(request_id, float("inf")) > left_s:
            continue  # it was queued, or its head had not come
        ended_s = ends.ended_s.get(request_id)
        if ended_s is None:
            report.offend("it runs on though its caller has left", asked.request_id)
        elif ended_s > left_s:
            freed.append((ended_s - left_s) * 1000)
    return freed


async def _leave_queued(system: System, callers: Callers, count: int, rng: random.Random) -> list[float]:
    """Each enters the queue behind a full engine and leaves; returns how long each message outlived it."""
    async with full_engine(system, callers):
        return [await _enter_and_leave(system, callers, rng.uniform(0.0, 0.02)) for _ in range(count)]


async def _enter_and_leave(system: System, callers: Callers, stay_s: float) -> float:
    leave = asyncio.Event()
    caller = asyncio.create_task(callers.ask(tokens=TOKENS, leave=leave))
    await until_queued(system, 1)
    await asyncio.sleep(stay_s)
    left_s = time.monotonic()
    leave.set()
    await until_queued(system, 0)
    gone_ms = (time.monotonic() - left_s) * 1000
    await caller
    return gone_ms


@asynccontextmanager
async def full_engine(system: System, callers: Callers) -> AsyncIterator[None]:
    """Hold every slot with an answer that stands still after its first token."""
    leave = asyncio.Event()
    running = asyncio.Semaphore(0)
    seen: set[int] = set()

    def on_piece(record: Exchange) -> None:
        if id(record) not in seen:
            seen.add(id(record))
            running.release()

    holders = [
        asyncio.create_task(callers.ask(tokens=TOKENS, wish="[[stall after=1]]", leave=leave, on_piece=on_piece))
        for _ in range(slots_of(system))
    ]
    try:
        async with asyncio.timeout(WAIT_LIMIT_S):
            for _ in range(slots_of(system)):
                await running.acquire()
        yield
    finally:
        leave.set()
        await asyncio.gather(*holders)


async def until_queued(system: System, messages: int) -> None:
    """Wait until ``messages`` jobs are in the queue, of any client."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while await _messages(system) != messages:
            await asyncio.sleep(POLL_S)


async def _messages(system: System) -> int:
    info = await system.bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}")
    return int(info["state"]["messages"])


# --- what is left behind ----------------------------------------------------------------------------------------------


async def _until_idle(report: Report, system: System) -> None:
    """Nothing runs and nothing waits; what still does after a while has leaked."""
    await expect_idle(report, system)
    for worker_id in system.farm.live:
        beat = system.watcher.beat_of(worker_id)
        if (beat.free_sequences, beat.free_kv_tokens) != (beat.max_sequences, beat.max_kv_tokens):
            report.offend(f"an idle worker says that something is taken: {beat}")
    with contextlib.suppress(TimeoutError):
        await until_queued(system, 0)
        return
    report.offend(f"{await _messages(system)} messages of nobody are in the queue")


async def _held(system: System) -> dict[str, dict[str, Any]]:
    """Subscriptions by connection, and resident memory by process."""
    reply = await system.bus.request("$SYS.REQ.ACCOUNT.PING.CONNZ", b"{}", timeout_s=WAIT_LIMIT_S)
    connections = json.loads(reply.data)["data"]["connections"]
    subscriptions = {one.get("name", ""): one["subscriptions"] for one in connections}
    return {"subscriptions": subscriptions, "rss_mib": _rss_mib(system)}


def _rss_mib(system: System) -> dict[str, float]:
    pids = {"gateway": system.gateways[0].pid}
    pids |= {f"worker_{worker.slot}": worker.process.pid or 0 for worker in system.farm.live.values()}
    return {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in pids.items()}


def _judge_growth(report: Report, before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> None:
    if before["subscriptions"] != after["subscriptions"]:
        report.offend(f"subscriptions were {before['subscriptions']} and are {after['subscriptions']}")
    for name, mib in after["rss_mib"].items():
        expect(report, f"{name}_growth_mib", mib - before["rss_mib"][name], at_most=GROWTH_LIMIT_MIB)
