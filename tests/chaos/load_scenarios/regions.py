"""Two regions: home has the queue, the other one workers behind a leaf node. Workers and the wire between are lost."""

import asyncio
import signal
import time

from benchmarks.ports import free_port
from tests.chaos.load_scenarios.plan import Stage
from tests.chaos.system import Shape, System
from tests.chaos.wire import Wire
from tests.chaos.workers import LiveWorker
from tests.shipped import ShippedLeaf

TOKEN_S = 0.05
TOKENS = 40
SEQUENCES = 16
HOME_SLOTS, AWAY_SLOTS = (0, 1), (2, 3)
RATE_PER_S = 0.7 * len(HOME_SLOTS) * SEQUENCES / (TOKENS * TOKEN_S)  # what one region can do alone
BEFORE_S = 3.0
SEEN_LIMIT_S = 60.0
POLL_S = 0.05
LEAF_PORT = free_port()
REGIONS_SHAPE = Shape(workers=0, max_sequences=SEQUENCES, inter_token_s=TOKEN_S, leaf_port=LEAF_PORT)


async def regions(stage: Stage) -> None:
    """``plan.count`` times: home's workers are killed; the wire is lost, by silence and by resets; each comes back."""
    system, callers, plan, report = stage.system, stage.callers, stage.plan, stage.report
    wire = Wire(LEAF_PORT)
    await wire.start()
    folder = system.folder / "leaf"
    folder.mkdir()
    leaf = ShippedLeaf(folder, f"{wire.host}:{wire.port}")
    leaf.network = wire.network
    try:
        await asyncio.to_thread(leaf.start)
        change = {"nats_urls": (leaf.url,), "nats_domain": "home", "region": "b"}
        there = None if wire.network is None else wire.network.path
        away = [await system.farm.spawn(slot, change, network=there) for slot in AWAY_SLOTS]
        home = [await system.farm.spawn(slot, {"region": "a"}, replace=False) for slot in HOME_SLOTS]
        await callers.wait_until_served()
        await _until_heard(system, [*home, *away])
        for _ in range(plan.count):
            offered = asyncio.create_task(callers.offer(RATE_PER_S, 6 * BEFORE_S + 3 * plan.seconds, tokens=TOKENS))
            await asyncio.sleep(BEFORE_S)
            for worker in home:
                worker.send(signal.SIGKILL)
            report.faults += 1
            await asyncio.sleep(plan.seconds)  # the other region alone
            _expect_served_by(stage, away, plan.seconds / 2)
            home = [await system.farm.spawn(slot, {"region": "a"}, replace=False) for slot in HOME_SLOTS]
            await _until_heard(system, home)
            await asyncio.sleep(BEFORE_S)
            for lose, give_back in ((wire.pull_out, wire.put_back), (wire.refuse, wire.accept)):
                await lose()
                report.faults += 1
                await asyncio.sleep(plan.seconds)  # home alone
                await give_back()
                await _until_heard(system, away)
                await asyncio.sleep(BEFORE_S)
            await offered
    finally:
        await system.farm.stop()
        await asyncio.to_thread(leaf.kill)
        await wire.stop()


def _expect_served_by(stage: Stage, workers: list[LiveWorker], lately_s: float) -> None:
    """All that was accepted lately must be at these workers."""
    since_s = time.monotonic() - lately_s
    ids = {worker.worker_id for worker in workers}
    runs = [run for found in stage.system.watcher.runs.values() for run in found if run.at_s > since_s]
    if not runs or any(run.worker_id not in ids for run in runs):
        stage.report.offend("the other region's workers do not serve alone")


async def _until_heard(system: System, workers: list[LiveWorker]) -> None:
    """Wait until each worker has been heard of since now."""
    since_unix_ms = time.time() * 1000
    async with asyncio.timeout(SEEN_LIMIT_S):
        for worker in workers:
            while not system.watcher.has_beaten(worker.worker_id):
                await asyncio.sleep(POLL_S)
            while system.watcher.beat_of(worker.worker_id).sent_unix_ms < since_unix_ms:
                await asyncio.sleep(POLL_S)
