"""Workers in this process, which has imported what they need: in a process of its own, torch alone takes seconds."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pool_worker import main
from pool_worker.settings import WorkerSettings
from pool_worker.stopping import Stop
from spillway.config import load_config
from tests.acceptance.system import System
from tests.waiting import HANGS_S


@contextmanager
def workers_here(system: System, *pools: str) -> Iterator[None]:
    """Run one worker of each pool, as ``spillway worker`` does, beside those that the system has started."""
    config = load_config(system.data_dir / "run" / "config.json", env={})
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="workers")
    thread.start()
    workers = [_Worker(config.worker_settings(pool), loop) for pool in pools]
    try:
        for worker in workers:
            assert worker.is_ready.wait(HANGS_S)
        yield
    finally:
        for worker in workers:
            worker.stop()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Worker:
    def __init__(self, settings: WorkerSettings, loop: asyncio.AbstractEventLoop) -> None:
        self.is_ready = threading.Event()
        self._loop = loop
        self._stop = Stop(settings.drain_s)
        life = main._live(settings, self._stop, lambda _task: self.is_ready.set())
        self._life = asyncio.run_coroutine_threadsafe(life, loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.request)
        self._life.result(HANGS_S)
