"""The worker process: start the engine, connect, and serve until asked to stop."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

from pool_worker import engines, notices
from pool_worker.drain import Stop
from pool_worker.engines.base import AnyEngine, Capacity, EngineDiedError
from pool_worker.settings import ServerEngineSettings, WorkerSettings
from pool_worker.worker import OnReady, Worker
from protocol import process, subjects
from protocol.nats.access import WORKERS_API, access_options, worker_role
from protocol.nats.bus import API, Bus
from protocol.process import Restarts, on_stop_signals, unless_set, wait_for

if TYPE_CHECKING:
    from pool_worker.traces import AttemptTraces

RESTART_WINDOW_S: Final = 1800.0  # a large model takes minutes to load
FIRST_RESTART_WAIT_S: Final = 0.1

log = logging.getLogger(__name__)


async def run(settings: WorkerSettings, on_ready: OnReady | None = None) -> None:
    """Serve until SIGTERM, SIGINT or a notice, then drain and return; a second signal cuts the drain short.

    ``on_ready`` is called with the models' task when the worker is about to pull jobs, at first and after each restart
    of an owned server; with None when a server breaks. Raises EngineDiedError if the engine fails to start or is lost
    and is not to be restarted (its jobs are handed back by then), and BusError if no queue server answers at first.
    """
    stop = Stop(settings.drain_s, notices.signal_limit_s(settings.notice))
    with on_stop_signals(stop.on_signal):
        await _live(settings, stop, on_ready)


async def _live(settings: WorkerSettings, stop: Stop, on_ready: OnReady | None) -> None:
    """Serve with one engine after another if the worker owns the server's process and can restart it."""
    engine = settings.engine
    restarts = None
    if isinstance(engine, ServerEngineSettings) and engine.exec is not None:
        restarts = Restarts(engine.exec_restarts, RESTART_WINDOW_S, FIRST_RESTART_WAIT_S)
    for life in itertools.count(1):
        # Each life has its own worker id: messages for the dead worker must not reach its successor.
        own = settings if life == 1 else settings.model_copy(update={"worker_id": f"{settings.worker_id}-{life}"})
        try:
            await _live_once(own, stop, on_ready)
        except EngineDiedError as death:
            if restarts is None or stop.requested.is_set():
                raise
            wait_s = restarts.wait_s()
            if wait_s is None:
                times = f"{restarts.most + 1} crashes within {restarts.window_s:g} s"
                raise EngineDiedError(f"giving up after {times}; last error: {death}") from death
            log.error("%s; restarting the server in %.1f s", death, wait_s)  # noqa: TRY400  # not a bug here
            if not await wait_for(stop.requested, wait_s):
                continue
        return


async def _live_once(settings: WorkerSettings, stop: Stop, on_ready: OnReady | None) -> None:
    engine = engines.create(settings.engine)
    try:
        capacity = await unless_set(stop.requested, engine.start())
        if capacity is None:
            return
        bus = await unless_set(stop.requested, connect(settings))
        if bus is None:
            return
        try:
            async with _traces(settings) as traces:
                await _serve(settings, bus, engine, capacity, stop=stop, on_ready=on_ready, traces=traces)
        finally:
            await bus.close()
    finally:
        await engine.stop()


async def connect(settings: WorkerSettings) -> Bus:
    """Connect to the queue server. Raises BusError."""
    role = worker_role(settings.worker_id.rpartition(".")[0])
    access = access_options(settings.nats_credentials, settings.nats_ca_file, role)
    return await Bus.connect(
        list(settings.nats_urls),
        name=subjects.connection_name(settings.worker_id),
        options=access,
        api_prefix=_api_prefix(settings),
    )


def _api_prefix(settings: WorkerSettings) -> str:
    """Return the prefix of JetStream API calls: a leaf node passes only calls that name the domain."""
    if settings.nats_credentials is not None:
        return WORKERS_API
    return API if settings.nats_domain is None else f"$JS.{settings.nats_domain}.API"


@contextlib.asynccontextmanager
async def _traces(settings: WorkerSettings) -> AsyncIterator["AttemptTraces | None"]:
    if settings.telemetry.otlp_endpoint is None:
        yield None
        return
    # Imported here: OpenTelemetry is optional without traces.
    from pool_worker.traces import AttemptTraces  # noqa: PLC0415
    from protocol.tracing import Tracing  # noqa: PLC0415

    tracing = Tracing(settings.telemetry, "worker", settings.worker_id)
    try:
        yield AttemptTraces(tracing, settings)
    finally:
        await tracing.close()


async def _serve(
    settings: WorkerSettings,
    bus: Bus,
    engine: AnyEngine,
    capacity: Capacity,
    *,
    stop: Stop,
    on_ready: OnReady | None,
    traces: "AttemptTraces | None",
) -> None:
    process.freeze_heap()
    try:
        async with asyncio.TaskGroup() as tasks:
            await Worker(settings, bus, engine, capacity, tasks, traces=traces).serve(stop, on_ready)
    except BaseExceptionGroup as group:
        died = group.subgroup(EngineDiedError)
        if died is None or len(group.exceptions) > 1:
            raise
        raise died.exceptions[0] from None
