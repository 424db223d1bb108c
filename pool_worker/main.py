"""The worker process: start the engine, connect, serve until SIGTERM."""

import asyncio
import logging
import signal
from collections.abc import Callable

from pool_worker import engines
from pool_worker.engines.base import Capacity, Engine, EngineDiedError
from pool_worker.settings import WorkerSettings
from pool_worker.worker import Worker
from protocol.bus import Bus

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = logging.getLogger(__name__)


async def run(settings: WorkerSettings, on_ready: Callable[[], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    ``on_ready`` is called once, when jobs are about to be pulled. Raises EngineDiedError if the engine does not start
    or is lost (its jobs have been handed back by then), and BusError if no queue server answers at first.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stopping.set)
    engine = engines.create(settings.engine)
    try:
        capacity = await _started(engine, stopping)
        if capacity is not None:
            await _serve(settings, engine, capacity, stopping, on_ready)
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        await engine.stop()


async def _started(engine: Engine, stopping: asyncio.Event) -> Capacity | None:
    """Start the engine; None if the process was told to stop before that was done. Raises EngineDiedError."""
    starting = asyncio.ensure_future(engine.start())
    told_to_stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({starting, told_to_stop}, return_when=asyncio.FIRST_COMPLETED)
    told_to_stop.cancel()
    if not starting.done():
        starting.cancel()
        return None
    return starting.result()


async def _serve(
    settings: WorkerSettings,
    engine: Engine,
    capacity: Capacity,
    stopping: asyncio.Event,
    on_ready: Callable[[], None] | None,
) -> None:
    bus = await Bus.connect(list(settings.nats_urls), name=f"spillway-worker {settings.worker_id}")
    try:
        async with asyncio.TaskGroup() as tasks:
            worker = Worker(settings, bus, engine, capacity, tasks)
            await worker.serve(stopping, on_ready)
    except BaseExceptionGroup as group:
        died = group.subgroup(EngineDiedError)
        if died is None or len(group.exceptions) > 1:
            raise
        raise died.exceptions[0] from None
    finally:
        await bus.close()
