"""The life cycle of the real vLLM in this process: run by ``real_servers``, in vLLM's own environment."""

import asyncio
import multiprocessing

import pytest

from pool_worker import engines
from pool_worker.engines.base import EngineDiedError
from pool_worker.settings import VllmInProcessSettings
from tests.conformance.driven_engine import MAX_MODEL_LEN, MAX_SEQUENCES, REAL_SERVER, Driver, driving, request

BURIED_S = 20.0
REAL = VllmInProcessSettings(max_sequences=MAX_SEQUENCES, max_model_len=MAX_MODEL_LEN, **REAL_SERVER)


async def test_stopping_leaves_no_process() -> None:
    async with driving(REAL) as driver:
        driver.engine.submit(request("r", max_tokens=150))
        await driver.wait(lambda: bool(driver.answers["r", 0].token_ids))
        processes = multiprocessing.active_children()
        assert processes
    for process in processes:  # which vLLM may have killed just now: on a busy machine it takes time to exit
        await asyncio.to_thread(process.join, BURIED_S)
    assert not multiprocessing.active_children()


async def test_it_is_lost_with_its_engine_core() -> None:
    engine = engines.create(REAL)
    driver = Driver(engine, await engine.start())
    running = asyncio.create_task(driver.run())
    driver.engine.submit(request("r", max_tokens=150))
    await driver.wait(lambda: bool(driver.answers["r", 0].token_ids))
    for process in multiprocessing.active_children():
        process.kill()
    with pytest.raises(EngineDiedError, match="its engine core has died"):
        await running
    await engine.stop()
