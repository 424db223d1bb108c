"""Pools whose size the fleet controller decides: steps of load here, and a day of a spot market at EC2 in a box."""

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.machine import Machine, State
from fleet.machine_store import MachineStore
from spillway.children import Child
from tests.chaos.load_scenarios.plan import Stage, expect
from tests.chaos.system import MODEL, Shape, System
from tests.fleet.ec2_box import CREDENTIALS, ZONES, Ec2Box

TOKEN_S = 0.05
TOKENS = 40
PROMPT_TOKENS = 20  # about
SEQUENCES = 8
TOKENS_PER_S = SEQUENCES / TOKEN_S * (TOKENS + PROMPT_TOKENS) / TOKENS  # of one worker
ONE_WORKER_PER_S = SEQUENCES / (TOKENS * TOKEN_S)  # requests
STEP = 8
DECISION_LIMIT_S = 10.0
SETTLE_LIMIT_S = 180.0
POLL_S = 0.2

FLEET: dict[str, Any] = {
    "period_s": 1.0,
    "idle_s": 8.0,
    "cool_down_s": 10.0,
    "launch_limit_s": 20.0,
    "listed_after_s": 2.0,
}
POOL: dict[str, Any] = {
    "max_workers": 8,
    "tokens_per_s": TOKENS_PER_S,
    "start_s": 5.0,
    "start_limit_s": 90.0,
    "unavailable_s": 5.0,
}
STEPS_SHAPE = Shape(
    workers=0,
    max_sequences=SEQUENCES,
    inter_token_s=TOKEN_S,
    drain_s=20.0,
    fleet=FLEET,
    worker_settings={
        "tier": "spot",
        "usd_per_hour": 1.0,
        "fleet": {**POOL, "driver": {"kind": "process", "places": ["a", "b"]}},
    },
)


# --- steps of load, with processes ------------------------------------------------------------------------------------


async def steps(stage: Stage) -> None:
    """Nothing, then a little work, then eight times as much, then nothing; then one request wakes the pool."""
    system, callers, plan, report = stage.system, stage.callers, stage.plan, stage.report
    controller = await start_controller(system, {})
    store = MachineStore(system.database)
    await callers.wait_until_served()
    low_per_s = ONE_WORKER_PER_S / 2
    await callers.offer(low_per_s, plan.seconds, tokens=TOKENS)
    stepped_unix_ms = time.time() * 1000
    await callers.offer(STEP * low_per_s, plan.seconds, tokens=TOKENS)
    limit_s = plan.slack * DECISION_LIMIT_S
    expect(report, "decision_s", await _decided_s(store, stepped_unix_ms), at_most=limit_s)
    report.extras["workers_most"] = max(one.size for one in await store.decisions(0))
    await _until_none(store)
    woken = await callers.ask(tokens=TOKENS)
    report.extras["woken_ttft_s"] = woken.ttft_s
    await _until_none(store)
    over = await store.over_since(0)
    report.faults = len(over)
    not_drained = [one for one in over if one.state is not State.GONE or one.drained_unix_ms is None]
    for machine in not_drained:
        report.offend(f"machine {machine.machine_id} was not drained: {machine.state}, {machine.reason}")
    await controller.stop()


async def _decided_s(store: MachineStore, since_unix_ms: float) -> float | None:
    """Return how long after a step the next larger size was decided."""
    decisions = await store.decisions(0)  # the latest first
    before = next((one.size for one in decisions if one.decided_unix_ms < since_unix_ms), 0)
    larger = [one.decided_unix_ms for one in decisions if one.decided_unix_ms >= since_unix_ms and one.size > before]
    return (min(larger) - since_unix_ms) / 1000 if larger else None


async def _until_none(store: MachineStore) -> None:
    async with asyncio.timeout(SETTLE_LIMIT_S):
        while await store.machines():
            await asyncio.sleep(POLL_S)


async def start_controller(system: System, environment: dict[str, str]) -> Child:
    """Start a fleet controller as it is started outside tests."""
    command = ["fleet", "run", "--end-machines"]
    return await system.start_child("fleet", command, environment)


# --- a day of a spot market, at EC2 in a box --------------------------------------------------------------------------

SPEED = 200.0
NOTICE_S = 120.0 / SPEED
WITHOUT_NOTICE = 0.1  # of the interruptions
FULL_ZONE = 2  # instances that a zone has at most: these stand for all that the trace saw at once
RATE_PER_S = 2.5 * ONE_WORKER_PER_S
KILL_EVERY_S = (5.0, 25.0)  # of the controller
SPOT_SHAPE = Shape(workers=0, max_sequences=SEQUENCES, inter_token_s=TOKEN_S, drain_s=NOTICE_S / 2, fleet=FLEET)


@dataclass(frozen=True)
class Market:
    """How many spot instances each zone has: (seconds from the start, zone, count), in order."""

    changes: Sequence[tuple[float, str, int]]

    @classmethod
    def read(cls, path: Path, seconds: float) -> "Market":
        """Read the first day of a published trace, ``SPEED`` times as fast."""
        data = json.loads(path.read_text())
        tick_s = data["gap_seconds"] / SPEED
        most = max(count for runs in data["zones"].values() for count, _ in runs)
        changes = []
        for zone, runs in zip(ZONES, data["zones"].values(), strict=False):
            ticks = itertools.accumulate((ticks for _, ticks in runs), initial=0)
            changes += [
                (tick * tick_s, zone, round(count * FULL_ZONE / most))
                for tick, (count, _) in zip(ticks, runs, strict=False)
                if tick * tick_s < seconds
            ]
        return cls(sorted(changes))

    @classmethod
    def made_up(cls, rng: random.Random, seconds: float) -> "Market":
        """Draw one whose zones lose all of their instances at once, now and then."""
        changes = [(0.0, zone, FULL_ZONE) for zone in ZONES]
        for zone in ZONES:
            at_s = rng.uniform(0.1, 0.5) * seconds
            while at_s < seconds:
                changes += [(at_s, zone, rng.choice((0, 0, 1))), (at_s + rng.uniform(5, 15), zone, FULL_ZONE)]
                at_s += rng.uniform(15, 40)
        return cls(sorted(changes))


async def spot_market(stage: Stage) -> None:
    """A market that takes machines back, zone by zone, and a controller that is killed now and then."""
    rng = random.Random(f"market {stage.plan.seed}")
    seconds, trace = stage.plan.seconds, stage.plan.trace
    market = Market.made_up(rng, seconds) if trace is None else Market.read(trace, seconds)
    environment = CREDENTIALS | {"PYTHONPATH": str(Path.cwd())}
    ports = [server.port for server in stage.system.queue_servers]
    box = Ec2Box(stage.system.folder / "ec2", environment, ports)
    async with box.running():
        await _play_market(stage, box, market, rng)


async def _play_market(stage: Stage, box: Ec2Box, market: Market, rng: random.Random) -> None:
    system, callers, plan, report = stage.system, stage.callers, stage.plan, stage.report
    config = f"{sys.executable} -m spillway worker --config {system.config_path}"
    for pool, tier, usd in (("spot", "spot", 0.4), ("on-demand", "on-demand", 1.0)):
        system.add_pool(
            pool,
            {
                "models": [MODEL],
                "tier": tier,
                "usd_per_hour": usd,
                "notice": "aws",
                "fleet": {**POOL, "driver": box.driver(config)},
            },
        )
    controller = await start_controller(system, CREDENTIALS)
    store = MachineStore(system.database)
    await callers.wait_until_served()
    playing = asyncio.create_task(_follow(box, market, rng))
    killing = asyncio.create_task(_kill_now_and_then(stage, controller, rng))
    try:
        await callers.offer(RATE_PER_S, plan.seconds, tokens=TOKENS)
    finally:
        playing.cancel()
        killing.cancel()
        ended = await asyncio.gather(playing, killing, return_exceptions=True)
    for one in ended:
        if isinstance(one, Exception):
            raise one
    if not controller.is_running:
        await system.restart(controller)
    box.capacity = None
    report.faults = len(box.taken)
    await _compare(stage, box, store)
    over = await store.over_since(0)
    lost = {one.machine_id for one in over if one.state is State.LOST}
    for machine_id in lost - set(box.taken):
        report.offend(f"machine {machine_id} is lost in the store, and nobody has taken it")
    report.extras |= {
        "machines": len(over) + len(await store.machines()),
        "machines_lost": len(lost),
        "refused": sum(box.refused.values()),
        "decisions": len(await store.decisions(0)),
    }
    await controller.stop()
    if box.live():
        report.offend(f"{len(box.live())} instances are left over")


async def _follow(box: Ec2Box, market: Market, rng: random.Random) -> None:
    """Change what the market has, and take back what is too much."""
    began_s = time.monotonic()
    box.capacity = {}
    taking: set[asyncio.Task[None]] = set()
    for at_s, zone, count in market.changes:
        await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
        box.capacity[zone] = count
        there = [one for one in box.live() if box.zone_of(one) == zone and box.is_spot(one)]
        for instance_id in there[count:]:
            notice_s = 0.0 if rng.random() < WITHOUT_NOTICE else NOTICE_S
            task = asyncio.create_task(box.interrupt(instance_id, notice_s))
            taking.add(task)
            task.add_done_callback(taking.discard)


async def _kill_now_and_then(stage: Stage, controller: Child, rng: random.Random) -> None:
    stage.report.extras["controller_kills"] = 0
    while True:
        await asyncio.sleep(rng.uniform(*KILL_EVERY_S))
        os.kill(controller.pid, signal.SIGKILL)
        stage.report.extras["controller_kills"] += 1
        await controller.wait()
        await stage.system.restart(controller)


async def _compare(stage: Stage, box: Ec2Box, store: MachineStore) -> None:
    """The provider's machines must become those in the store, each with its label."""
    there: dict[str, str] = {}
    rows: Sequence[Machine] = ()
    deadline_s = time.monotonic() + SETTLE_LIMIT_S
    while time.monotonic() < deadline_s:
        there = {one: tags.get("spillway-machine", "") for one, tags in box.live().items()}
        rows = await store.machines()
        if {(row.provider_id, row.machine_id) for row in rows} == set(there.items()):
            return
        await asyncio.sleep(POLL_S)
    stage.report.offend(f"machines at the provider: {there}, in the store: {[(r.provider_id, r.state) for r in rows]}")
