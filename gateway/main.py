"""The gateway process: connects, serves until it is asked to stop, and shuts down cleanly.

connect → topology → keys → models → serve ──SIGTERM──> leave → refuse new → drain → stop serving → flush usage → close
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from db.accounts.keyring import KeyRing
from db.engine import create_engine
from db.set_aside import SetAside
from gateway.admission.control import AdmissionControl
from gateway.admission.hosted import providers_still_allowed
from gateway.admission.registry import WorkerRegistry
from gateway.app import BATCH_ENDPOINTS, Application, build_app, make_operations
from gateway.batches.asking import Asking
from gateway.batches.feeder import Feeder
from gateway.batches.open import make_feeder, open_batches
from gateway.batches.series import BatchSeries
from gateway.core import Core
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.hosted import HostedPools
from gateway.dispatch.overflow import Overflow
from gateway.endpoints.endpoint import Edge, counted
from gateway.endpoints.services import Services
from gateway.http.body import BodyReader
from gateway.http.server import Connection, Connections
from gateway.idempotency.keyed import KeyedRequests
from gateway.limits.leases import Quotas
from gateway.limits.prices import CurrentPrices
from gateway.limits.seeds import RollupLedger
from gateway.mount import GatewayParts, Mount
from gateway.payloads import PayloadPublisher
from gateway.responses.runs import BackgroundRuns
from gateway.responses.store import ReadShares, ResponseStore
from gateway.settings import LEAVE_S, GatewaySettings
from gateway.telemetry.log import RecentFailovers, RequestLog
from gateway.telemetry.metrics import RequestSeries
from gateway.telemetry.refusal_records import RefusalRecords
from gateway.telemetry.refusals import RefusalLog
from gateway.tokenizing.catalog import ModelCatalog
from gateway.tokenizing.settings import canonical_names
from ledger.payloads.sealing import SEALED_BEFORE, Sealer, parse_keys
from ledger.webhooks.events import publish_batch_ended, publish_response_ended
from ledger.webhooks.state import StateView
from protocol import process, subjects
from protocol.nats.access import access_options
from protocol.nats.bus import Bus
from protocol.nats.outbox import Outbox, Spool
from protocol.process import in_url, on_stop_signals

if TYPE_CHECKING:
    from gateway.telemetry.traces import RequestTraces

FLUSH_LIMIT_S: Final = 10.0
PAYLOAD_FLUSH_LIMIT_S: Final = 3.0
LISTEN_BACKLOG: Final = 2048
STATEMENT_LIMIT_S: Final = 10.0  # a user at a browser waits
CLOSE_LIMIT_S: Final = 5  # for connections that are open after the last answer
CANCEL_AGAIN_S: Final = 0.5

log = logging.getLogger(__name__)


class GatewayDied(RuntimeError):
    """A background task of the gateway ended by itself; the process must end too."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: ``run`` defines the order of the shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def main_loop(self) -> None:
        """Serve until ``should_exit``. A gateway that dies instead takes no connections while it records requests."""
        try:
            await super().main_loop()
        finally:
            for server in self.servers:
                server.close()


async def run(
    settings: GatewaySettings,
    on_ready: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
    *,
    mount: Mount,
) -> None:
    """Serve until SIGTERM, SIGINT or ``stop``. ``on_ready`` is called with the port once requests are accepted.

    ``mount``: served beside the API.

    Raises the errors of a failed start (BusError, those of keys and tokenizers, OSError for the port) and, in an
    exception group, GatewayDied if a background task ends.
    """
    stop = stop or asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        traces = _traces(settings, stack)
        bus = await _connected(settings)
        stack.push_async_callback(bus.close)
        keys = KeyRing(settings.database_url, settings.key_pepper, bus)
        stack.push_async_callback(keys.close)
        outbox, intents = (
            _outbox(bus, settings, subject, stack)
            for subject in (subjects.REQUEST_USAGE_SUBJECT, subjects.INTENT_USAGE_SUBJECT)
        )
        registry = WorkerRegistry(bus, settings.timeouts.worker_silence_s)
        admission_control = AdmissionControl(bus, settings, registry)
        database = create_engine(settings.database_url, statement_limit_s=STATEMENT_LIMIT_S)
        stack.push_async_callback(database.dispose)
        prices, set_aside = CurrentPrices(database, settings.prices), SetAside(database)
        series = RequestSeries(prices)
        quotas = Quotas(bus, settings.gateway_id, RollupLedger(database), settings.timeouts.limits_s)
        failovers = RecentFailovers()
        hosted = HostedPools(settings.hosted, admission_control.capacity, quotas, prices)
        allowed = partial(providers_still_allowed, keys, admission_control)
        observers = [series, RequestLog(), failovers, *([] if traces is None else [traces])]
        dispatcher = Dispatcher(
            bus,
            settings,
            registry,
            outbox,
            intents=intents,
            overflow=Overflow(hosted, admission_control, registry, settings, allowed),
            observers=observers,
        )
        catalog = _catalog(settings, bus)
        stack.push_async_callback(catalog.close)
        keys.on_revoked = dispatcher.keys_revoked
        await dispatcher.start()
        await keys.start()
        keyed = KeyedRequests(bus, settings, keys)
        await keyed.start()
        await quotas.start()
        stack.push_async_callback(quotas.close)
        await catalog.start()
        webhooks = StateView()
        await webhooks.start(bus)
        responses, background_runs = _responses(settings, bus, keys, catalog, set_aside)
        await background_runs.start()
        core = Core(settings, keys, catalog, dispatcher, admission_control, quotas, prices)
        payloads, batch_series = PayloadPublisher(bus, settings.payloads), BatchSeries()
        services = Services(
            settings=settings,
            bus=bus,
            keys=keys,
            catalog=catalog,
            core=core,
            dispatcher=dispatcher,
            admission_control=admission_control,
            bodies=BodyReader(settings.limits, settings.timeouts.body_s),
            series=series,
            quotas=quotas,
            payloads=payloads,
            set_aside=set_aside,
            started_unix_s=int(time.time()),
            further_series=(webhooks.families, batch_series.families, background_runs.series.families),
        )
        edge = Edge(
            timeouts=settings.timeouts,
            keys=keys,
            bodies=services.bodies,
            refusals=RefusalLog(series, RefusalRecords(outbox.put, settings.gateway_id, catalog.known_name)),
            begin_trace=None if traces is None else traces.begin,
        )
        parts = GatewayParts(settings, bus, keys, database, catalog, dispatcher, admission_control, series, failovers)
        mounted = await stack.enter_async_context(mount(parts))
        batches = open_batches(
            settings.batches,
            settings.data_dir,
            database,
            keys,
            endpoints=BATCH_ENDPOINTS,
            counted=partial(counted, core, failed_too=True),
            threads=catalog.pool,
        )
        operations = make_operations(core, catalog.pool, payloads, responses)
        app = build_app(services, edge, operations, keyed=keyed, runs=background_runs, batches=batches, mounted=mounted)
        feeder = make_feeder(
            batches,
            bus,
            Asking(core, operations.of_batches(), edge.refusals, edge.begin_trace),
            admission_control,
            series=batch_series,
            set_aside=set_aside,
            models=canonical_names(settings.models),
            gateway_id=settings.gateway_id,
            finished=partial(publish_batch_ended, bus),
        )
        process.freeze_heap()
        force_exit = asyncio.Event()
        background_parts = BackgroundParts(edge.refusals, prices, feeder, background_runs)
        with on_stop_signals(partial(_take_signal, stop, force_exit)):
            await _serve(
                services, app, background_parts, (outbox, intents), on_ready=on_ready, stop=stop, force_exit=force_exit
            )


async def _connected(settings: GatewaySettings) -> Bus:
    access = access_options(settings.nats_credentials, settings.nats_ca_file, "gateway")
    return await Bus.connect(list(settings.nats_urls), name=f"gateway-{settings.gateway_id}", options=access)


def _catalog(settings: GatewaySettings, bus: Bus) -> ModelCatalog:
    return ModelCatalog(
        bus,
        settings.models,
        settings.data_dir,
        by_messages=settings.by_messages,
        only_by_messages=settings.only_by_messages,
        pools=settings.pools,
    )


def _responses(
    settings: GatewaySettings, bus: Bus, keys: KeyRing, catalog: ModelCatalog, set_aside: SetAside
) -> tuple[ResponseStore, BackgroundRuns]:
    # Gateways of the previous release read stored responses too, and support only this way of sealing.
    responses = ResponseStore(
        bus,
        settings.responses,
        Sealer(parse_keys(settings.payloads.key), SEALED_BEFORE),
        max_body_bytes=settings.limits.max_body_bytes,
        shares=ReadShares(
            settings.limits.max_reading_bytes,
            settings.limits.max_body_bytes,
            settings.timeouts.body_s,
            catalog.pool,
        ),
    )
    runs = BackgroundRuns(
        bus,
        responses,
        keys,
        settings.responses,
        gateway_id=settings.gateway_id,
        most=settings.limits.max_in_flight,
        limit_s=settings.timeouts.total_s,
        set_aside=set_aside.note,
        finished=partial(publish_response_ended, bus),
    )
    return responses, runs


def _traces(settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> "RequestTraces | None":
    if settings.telemetry.otlp_endpoint is None:
        return None
    # Imported here, so that OpenTelemetry is only required for traces.
    from gateway.telemetry.traces import RequestTraces  # noqa: PLC0415
    from protocol.tracing import Tracing  # noqa: PLC0415

    tracing = Tracing(settings.telemetry, "gateway", settings.gateway_id)
    stack.push_async_callback(tracing.close)
    return RequestTraces(tracing)


@dataclass(frozen=True, slots=True)
class BackgroundParts:
    """Parts that run in the background."""

    refusals: RefusalLog
    prices: CurrentPrices
    feeder: Feeder
    runs: BackgroundRuns


async def _serve(
    services: Services,
    app: Application,
    parts: BackgroundParts,
    outboxes: Sequence[Outbox],
    *,
    on_ready: Callable[[int], None] | None,
    stop: asyncio.Event,
    force_exit: asyncio.Event,
) -> None:
    listener = listen(services.settings.host, services.settings.port)
    port = listener.getsockname()[1]
    server, connections = _make_server(services, parts.refusals, app)
    async with _flushed(services, outboxes), asyncio.TaskGroup() as group:
        background = [
            group.create_task(_must_not_end(part, work), name=part)
            for part, work in {
                "dispatcher": services.dispatcher.run(),
                "admission control": services.admission_control.run(),
                "key ring": services.keys.run(),
                "model catalog": services.catalog.run(),
                "limits": services.quotas.run(),
                "prices": parts.prices.run(),
                "feeder": parts.feeder.run(),
                "background responses": parts.runs.run(),
            }.items()
        ]
        serving = group.create_task(server.serve(sockets=[listener]), name="http")
        log.info("listening on http://%s:%d", in_url(services.settings.host), port)
        if on_ready is not None:
            on_ready(port)
        await stop.wait()
        log.info("shutting down: %d requests in flight", services.dispatcher.in_flight)
        connections.is_gateway_leaving = True
        timeouts = services.settings.timeouts
        parts.feeder.leave()
        await services.dispatcher.leave(LEAVE_S if timeouts.leave_s is None else timeouts.leave_s, force_exit)
        await parts.runs.leave()
        await services.dispatcher.drain(timeouts.shutdown_s, force_exit)
        await parts.feeder.close()
        server.should_exit = True
        await serving
        parts.refusals.flush()
        await _end(background)


@contextlib.asynccontextmanager
async def _flushed(services: Services, outboxes: Sequence[Outbox]) -> AsyncIterator[None]:
    """Run the outboxes longer than everything that writes to them, so that every request is recorded."""
    async with asyncio.TaskGroup() as group:
        publishing = [
            group.create_task(_must_not_end("usage outbox", outbox.run()), name="usage outbox") for outbox in outboxes
        ]
        keeping = group.create_task(_must_not_end("payload publisher", services.payloads.run()), name="payloads")
        try:
            yield
        finally:
            services.dispatcher.settle_all()
            if not any(task.done() for task in publishing):
                await asyncio.gather(*(outbox.flush(FLUSH_LIMIT_S) for outbox in outboxes))
            if not keeping.done():
                await services.payloads.flush(PAYLOAD_FLUSH_LIMIT_S)
            for task in publishing:
                task.cancel()
            keeping.cancel()


def _outbox(bus: Bus, settings: GatewaySettings, subject: str, stack: contextlib.AsyncExitStack) -> Outbox:
    """Return an outbox with its own spool. Raises OSError."""
    spool = Spool(settings.data_dir / "spool" / subject)
    stack.callback(spool.close)
    return Outbox(bus, subject, settings.limits.max_unpublished_usage, spool=spool)


async def _end(tasks: list[asyncio.Task[NoReturn]]) -> None:
    # Repeatedly: nats-py uses asyncio.wait_for, which in Python 3.11 loses a cancellation that arrives together with
    # its result (https://github.com/python/cpython/issues/86296).
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


async def _must_not_end(part: str, work: Coroutine[Any, Any, None]) -> NoReturn:
    try:
        await work
    except Exception as error:
        log.critical("the %s died", part, exc_info=error)
        raise GatewayDied(f"the {part} died: {error}") from error
    raise GatewayDied(f"the {part} ended")


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = host == "::" and socket.has_dualstack_ipv6()  # all addresses, including IPv4
    listener = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG, dualstack_ipv6=is_dual)
    # Connections inherit it. uvloop sets it, asyncio's loop does not: with the latter, a body in a second packet would
    # wait 40 ms for the client's acknowledgement of the head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _make_server(services: Services, refusals: RefusalLog, app: Application) -> tuple[_Server, Connections]:
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        forwarded_allow_ips=list(services.settings.connections.trusted_proxies),
        timeout_graceful_shutdown=CLOSE_LIMIT_S,
    )
    proxies = ProxyHeadersMiddleware(cast("Any", app), config.forwarded_allow_ips).trusted_hosts
    connections = Connections(services.settings.connections, refusals, proxies.__contains__)
    config.http = cast("type[Connection]", partial(Connection, connections))
    return _Server(config), connections


def _is_news(record: logging.LogRecord) -> bool:
    # A failed stream is broken off by an incomplete response; the failure is logged elsewhere.
    return record.msg != "ASGI callable returned without completing response."


def _take_signal(stop: asyncio.Event, force_exit: asyncio.Event) -> None:
    """Stop at the first signal; stop at once at the second."""
    (force_exit if stop.is_set() else stop).set()
