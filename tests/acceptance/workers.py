"""Workers in this process, which has imported what they need: in a process of its own, torch alone takes seconds."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pool_worker import main
from pool_worker.drain import Stop
from pool_worker.settings import WorkerSettings
from spillway.config import load_config
from tests.acceptance.system import System
from tests.waiting import HANGS_S


@contextmanager
def workers_here(system: System, *pools: str) -> Iterator[None]:
    """Run one worker of each pool, as ``spillway worker`` does, beside those that the system has started."""
    config = load_config(system.data_dir / "run" / "config.json", env={})
    with _running_loop() as loop, ExitStack() as workers:
        for pool in pools:  # one after the other: transformers changes torch for all threads while it loads a model
            workers.enter_context(_running_worker(config.worker_settings(pool), loop))
        yield


@contextmanager
def _running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="workers")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def _running_worker(settings: WorkerSettings, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    stop, began = Stop(settings.drain_s), threading.Event()
    life = asyncio.run_coroutine_threadsafe(main._live(settings, stop, lambda _task: began.set()), loop)
    life.add_done_callback(lambda _life: began.set())
    try:
        assert began.wait(HANGS_S)
        assert not life.done()
        yield
    finally:
        loop.call_soon_threadsafe(stop.request)
        life.result(HANGS_S)
