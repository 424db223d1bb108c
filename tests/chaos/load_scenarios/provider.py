"""A whole provider lost: the network to all of its workers is cut, or goes silent, and comes back."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from tests.chaos.load_scenarios.callers import Asked
from tests.chaos.load_scenarios.plan import Stage
from tests.chaos.report import percentile
from tests.chaos.system import Shape, System
from tests.chaos.wire import Wire
from tests.chaos.workers import LiveWorker

SLOTS = {"aws": (0, 1), "gcp": (2, 3)}
TOKEN_S = 0.05
TOKENS = 40
SEQUENCES = 16
PROVIDER_SHAPE = Shape(workers=0, max_sequences=SEQUENCES, inter_token_s=TOKEN_S)
OF_ONE_PROVIDER = 0.7  # offered: what one of the two can do alone
RATE_PER_S = OF_ONE_PROVIDER * len(SLOTS["gcp"]) * SEQUENCES / (TOKENS * TOKEN_S)
BEFORE_S = 3.0  # of load before each loss
BACK_LIMIT_S = 60.0
POLL_S = 0.05


async def provider(stage: Stage) -> None:
    """``plan.count`` times: one provider's workers lose the network for ``plan.seconds``, by silence and by resets."""
    wires = {name: Wire(stage.system.queue_servers[0].port) for name in SLOTS}
    try:
        for wire in wires.values():
            await wire.start()
        await _lose_one_after_the_other(stage, wires)
    finally:
        await stage.system.farm.stop()
        for wire in wires.values():
            await wire.stop()


async def _lose_one_after_the_other(stage: Stage, wires: Mapping[str, Wire]) -> None:
    system, callers, plan, report = stage.system, stage.callers, stage.plan, stage.report
    workers = [worker for name, wire in wires.items() for worker in await _start(system, name, wire)]
    await callers.wait_until_served()
    await _until_back(system, workers)
    pauses_ms: list[float] = []
    for number in range(plan.count):
        lost = list(SLOTS)[number % len(SLOTS)]
        offered = asyncio.create_task(callers.offer(RATE_PER_S, BEFORE_S + plan.seconds, tokens=TOKENS))
        await asyncio.sleep(BEFORE_S)
        lost_s = time.monotonic()
        wire = wires[lost]
        is_silent = number % 4 < 2
        await (wire.pull_out() if is_silent else wire.refuse())
        report.faults += 1
        await asyncio.sleep(plan.seconds)
        await (wire.put_back() if is_silent else wire.accept())
        pauses_ms += _pauses_ms(await offered, lost_s)
        await _until_back(system, workers)
    report.gaps_ms["provider lost"] = pauses_ms
    report.extras |= {
        "pause_ms_p50": percentile(pauses_ms, 50),
        "pause_ms_p99": percentile(pauses_ms, 99),
        "cut_streams": len(pauses_ms),
    }


async def _start(system: System, name: str, wire: Wire) -> list[LiveWorker]:
    """Start a provider's workers at the end of its wire."""
    change = {"pool": name, "provider": name, "nats_urls": (system.queue_url(wire.host, wire.port),)}
    there = None if wire.network is None else wire.network.path
    return [await system.farm.spawn(slot, change, network=there) for slot in SLOTS[name]]


async def _until_back(system: System, workers: Sequence[LiveWorker]) -> None:
    """Wait until each worker has been heard of since now."""
    since_unix_ms = time.time() * 1000
    async with asyncio.timeout(BACK_LIMIT_S):
        for worker in workers:
            while not system.watcher.has_beaten(worker.worker_id):
                await asyncio.sleep(POLL_S)
            while system.watcher.beat_of(worker.worker_id).sent_unix_ms < since_unix_ms:
                await asyncio.sleep(POLL_S)


def _pauses_ms(asked: Sequence[Asked], lost_s: float) -> list[float]:
    """The longest gap of each stream that was running when a provider was lost."""
    pauses = []
    for one in asked:
        arrivals_s = [arrived_s for arrived_s, _ in one.answer.texts]
        if arrivals_s and arrivals_s[0] < lost_s < arrivals_s[-1]:
            later = [at for at in arrivals_s if at > lost_s]
            gaps = [after - before for before, after in zip([lost_s, *later], later, strict=False)]
            if max(gaps) > 2 * TOKEN_S:
                pauses.append(max(gaps) * 1000)
    return pauses
