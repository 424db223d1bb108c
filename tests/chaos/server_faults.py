"""Faults of whole inference servers: killed in mid-stream, and replaced by another pool under load."""

import asyncio
import signal
import time

from tests.chaos.servers import Server
from tests.chaos.strikes import VICTIM_LIMIT_S, Chaos, Strike, fault
from tests.chaos.workers import LiveWorker

BUSY_LIMIT_S = 900.0  # until a server is in mid-stream while another pool serves: one may have to start first
MOVING_S = 2.0  # that the load goes on in between


@fault
async def kill_vllm(chaos: Chaos) -> None:
    """SIGKILL a vLLM server in mid-stream; it is started again while other pools serve."""
    await _kill_server(chaos, "vllm")


@fault
async def kill_llamacpp(chaos: Chaos) -> None:
    """The same with llama.cpp's."""
    await _kill_server(chaos, "llamacpp")


async def _kill_server(chaos: Chaos, kind: str) -> None:
    server, side_car = await _busy_server(chaos, kind)
    strike = chaos.strike(f"kill_{kind}", side_car)
    server.kill()
    chaos.left_running.append(asyncio.create_task(_mend(server, strike)))


async def _mend(server: Server, strike: Strike) -> None:
    await server.start()
    strike.mended_s = time.monotonic()


async def _busy_server(chaos: Chaos, kind: str) -> tuple[Server, LiveWorker]:
    """A server of that kind in the midst of a stream, while another pool is there to go on with it."""
    deadline_s = time.monotonic() + BUSY_LIMIT_S
    while time.monotonic() < deadline_s:
        for task in chaos.left_running:
            if task.done():
                task.result()  # a server that did not start again
        serving = _serving_pools(chaos)
        busy = {chaos.system.watcher.worker_of(request) for request in chaos.load.mid_stream(lambda _: True)}
        found = [
            (chaos.system.servers[pool], worker)
            for pool in serving
            if chaos.system.engine_of(pool) == kind
            for worker in chaos.system.workers_of(pool)
            if worker.worker_id in busy
        ]
        if found and len(serving) > 1:
            return chaos.rng.choice(found)
        await asyncio.sleep(0.005)
    raise AssertionError(f"for {BUSY_LIMIT_S:g} s no {kind} server was in mid-stream while another pool served")


def _serving_pools(chaos: Chaos) -> list[str]:
    """The pools whose workers have told of themselves, and whose server runs, if it is a server's."""
    system = chaos.system
    return [
        pool
        for pool in system.pools
        if (pool not in system.servers or system.servers[pool].is_up)
        and any(system.watcher.has_beaten(worker.worker_id) for worker in system.workers_of(pool))
    ]


@fault
async def swap(chaos: Chaos) -> None:
    """Drain and remove a pool under load, add another, and kill one of that one's workers; then all of it back."""
    system = chaos.system
    old, new = system.pools[0], system.shape.standing_by
    assert new is not None
    strike = chaos.strike("swap")
    strike.may_stay = True
    await asyncio.gather(system.retire_pool(old), system.start_pool(new))
    await system.servers[old].stop()
    await asyncio.sleep(MOVING_S)
    victim = await _in_mid_stream(chaos, new)
    chaos.strike("swap-kill", victim)
    victim.send(signal.SIGKILL)
    await asyncio.sleep(MOVING_S)
    await system.servers[old].start()
    await system.start_pool(old)
    await system.retire_pool(new)
    strike.mended_s = time.monotonic()


async def _in_mid_stream(chaos: Chaos, pool: str) -> LiveWorker:
    """A worker of that pool in the midst of a stream."""
    async with asyncio.timeout(VICTIM_LIMIT_S):
        while True:
            busy = {chaos.system.watcher.worker_of(request) for request in chaos.load.mid_stream(lambda _: True)}
            found = [worker for worker in chaos.system.workers_of(pool) if worker.worker_id in busy]
            if found:
                return chaos.rng.choice(found)
            await asyncio.sleep(0.005)
