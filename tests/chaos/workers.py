"""Worker processes that are forked (``tests/forks.py``): a thousand kills need a thousand restarts."""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import uvloop

from pool_worker.main import run
from pool_worker.settings import WorkerSettings
from spillway import logs
from tests import forks, networks

STOP_LIMIT_S = 40.0
Change = dict[str, Any]
Life = Callable[[str, str], None]


def worker_process(settings_json: str, log_path: str) -> None:
    """The whole life of one worker process."""
    forks.begin(Path(log_path))
    settings = WorkerSettings.model_validate_json(settings_json)
    with logs.configured(settings.worker_id):
        uvloop.run(run(settings))


def _live_in(network: str, life: Life, settings_json: str, log_path: str) -> None:
    networks.enter(network)
    life(settings_json, log_path)


@dataclass(slots=True)
class LiveWorker:
    """One running worker process."""

    slot: int
    worker_id: str
    process: ForkServerProcess
    change: Change | None  # of the farm's settings, for who takes its place too
    network: str | None  # the path of the one that it is in, likewise; None: ours

    def send(self, number: signal.Signals) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)


class WorkerFarm:
    """Keeps ``size`` workers alive: one that has died is replaced at once by a new one with a new id."""

    def __init__(
        self,
        settings: WorkerSettings,
        log_dir: Path,
        url_of_slot: Callable[[int], str] | None = None,
        life: Life = worker_process,
    ) -> None:
        self.settings = settings
        self._life = life
        self._log_dir = log_dir
        self._url_of_slot = url_of_slot
        torch = ["pool_worker.engines.local"] if settings.engine.kind == "spillway" else []
        self._context = forks.context(life.__module__, *torch)
        self._numbers = itertools.count(1)
        self._by_slot: dict[int, LiveWorker] = {}
        self._all: list[LiveWorker] = []
        self._retired: set[str] = set()
        self._respawns: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def live(self) -> dict[str, LiveWorker]:
        """The workers that should be alive, by id."""
        return {worker.worker_id: worker for worker in self._by_slot.values()}

    def at(self, slot: int) -> LiveWorker | None:
        """Return the worker that has this slot now."""
        return self._by_slot.get(slot)

    @property
    def started(self) -> int:
        """The number of worker processes started so far."""
        return len(self._all)

    async def start(self, size: int) -> None:
        for slot in range(size):
            await self.spawn(slot)

    async def spawn(
        self, slot: int, change: Change | None = None, *, replace: bool = True, network: str | None = None
    ) -> LiveWorker:
        """Start one worker, with changed settings if wished; one that is not to be replaced dies for good."""
        credentials = self.settings.worker_id.rpartition(".")[0]  # "" without
        worker_id = f"{credentials}.w{next(self._numbers)}".removeprefix(".")
        urls = (self._url_of_slot(slot),) if self._url_of_slot else self.settings.nats_urls
        settings = self.settings.model_copy(update={"worker_id": worker_id, "nats_urls": urls, **(change or {})})
        life = self._life if network is None else partial(_live_in, network, self._life)
        arguments = (settings.model_dump_json(), str(self._log_dir / "workers.log"))
        process = self._context.Process(target=life, args=arguments, name=worker_id)
        await asyncio.to_thread(process.start)
        worker = LiveWorker(slot, worker_id, process, change, network)
        self._by_slot[slot] = worker
        self._all.append(worker)
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_death, worker, replace)
        return worker

    def _on_death(self, worker: LiveWorker, replace: bool) -> None:
        asyncio.get_running_loop().remove_reader(worker.process.sentinel)
        worker.process.join()
        if self._by_slot.get(worker.slot) is worker:
            del self._by_slot[worker.slot]
        if replace and not self._stopping and worker.worker_id not in self._retired:
            task = asyncio.create_task(self._respawn(worker))
            self._respawns.add(task)
            task.add_done_callback(self._respawns.discard)

    def retire(self, worker: LiveWorker) -> None:
        """SIGTERM one for good."""
        self._retired.add(worker.worker_id)
        worker.send(signal.SIGTERM)

    async def _respawn(self, worker: LiveWorker) -> None:
        await self.spawn(worker.slot, worker.change, network=worker.network)

    async def stop(self) -> None:
        """End all by SIGTERM, or by SIGKILL where that takes too long."""
        self._stopping = True
        await asyncio.gather(*self._respawns)
        for worker in list(self._by_slot.values()):
            worker.send(signal.SIGCONT)
            worker.send(signal.SIGTERM)
        deadline_s = asyncio.get_running_loop().time() + STOP_LIMIT_S
        while self._by_slot and asyncio.get_running_loop().time() < deadline_s:
            await asyncio.sleep(0.02)
        for worker in list(self._by_slot.values()):
            worker.send(signal.SIGKILL)
