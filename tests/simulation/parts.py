"""The simulated processes: the product's own parts, assembled as in their ``main`` modules, over simulated edges.

A supervisor restarts dead processes, with a new id.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from db.accounts.principal import Policy, Principal
from db.money import TokenPrice
from gateway.admission.control import AdmissionControl
from gateway.admission.registry import WorkerRegistry
from gateway.api.calls import CompletionCall
from gateway.core import Core
from gateway.dispatch.dispatcher import Dispatcher
from gateway.endpoints.endpoint import Edge, GenerationEndpoint
from gateway.endpoints.generate import Generation
from gateway.http.body import BodyReader
from gateway.limits.leases import Quotas
from gateway.limits.seeds import RollupLedger
from gateway.main import FLUSH_LIMIT_S, _must_not_end
from gateway.payloads import PayloadPublisher
from gateway.settings import GatewaySettings
from gateway.telemetry.metrics import RequestSeries
from gateway.telemetry.refusal_records import RefusalRecords
from gateway.telemetry.refusals import RefusalLog
from gateway.tokenizing.model_tokens import ModelTokens
from ledger.intake import wait_for_consumer
from ledger.settings import LedgerSettings
from ledger.writer import LedgerWriter
from pool_worker.drain import Stop
from pool_worker.main import _serve as serve_worker
from pool_worker.settings import ScriptedEngineSettings, WorkerSettings
from protocol import subjects
from protocol.errors import BusError
from protocol.nats.bus import Bus
from protocol.nats.outbox import Outbox
from tests.simulation import sql
from tests.simulation.disk import Disk
from tests.simulation.engine import CONTEXT, Pace, SimulatedEngine
from tests.simulation.network import Host, connect_bus
from tests.simulation.virtual_time import Process
from tests.simulation.world import MODEL, World

if TYPE_CHECKING:
    from gateway.dispatch.lifecycle import OpenRequest

RESTART_S = (0.3, 2.0)
BATCH_WAIT_S = 1.0  # of the ledger writer: a quarter of our processor time is its SQL
PRICE = TokenPrice(1_000_000_000, 1_000_000_000, 2_000_000_000)  # nano-USD for a million: 1 and 2 for a thousandth


class Part:
    """One process that is started, dies and is started again."""

    def __init__(self, world: World, name: str, host: Host, skew_s: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.skew_s = skew_s
        self.lives = 0
        self.process: Process | None = None
        self.may_start = True  # its supervisor is running and may start it

    @property
    def is_alive(self) -> bool:
        return self.process is not None and not self.process.is_dead

    @property
    def id(self) -> str:
        """The id of the current process."""
        return f"{self.name}-{self.lives}"

    def start(self) -> None:
        if self.is_alive or not self.host.is_up or not self.may_start:
            return
        self.lives += 1
        self.process = Process(self.world.loop, self.id, self.skew_s)
        self.world.log("start", self.id)
        self.process.run(self._live(self.process))

    async def _live(self, process: Process) -> None:
        try:
            await self.main(process)
            self.world.log("ends", self.id)
        except (BusError, asyncio.CancelledError) as error:  # no queue server yet: the supervisor retries
            self.world.log("ends", self.id, repr(error))
        except BaseException as error:  # noqa: BLE001  # any exception is the cause of death
            self.world.complain(f"{self.id} died: {_leaf(error)!r}")
        self._gone(with_host=False)

    async def main(self, process: Process) -> None:
        raise NotImplementedError

    def kill(self, *, with_host: bool = False) -> None:
        if self.is_alive:
            self.world.log("kill", self.id, with_host)
            self._gone(with_host=with_host)

    def _gone(self, *, with_host: bool) -> None:
        assert self.process is not None
        process = self.process
        process.kill()
        for client in [client for client in self.world.clients if client.process is process]:
            self.world.clients.remove(client)
            client.is_closed = True
            if client.connection is not None:
                self.world.server.client_dies(client.connection, with_host=with_host)
        self.on_gone()
        if not with_host and self.may_start:
            supervisor = self.world.outside
            self.world.loop.call_later(self.world.rng.uniform(*RESTART_S), self.start, context=supervisor)

    def on_gone(self) -> None:
        """Handle the process's death, which loses its memory."""

    def stop_in_order(self) -> None:
        """Stop as on SIGTERM."""

    def freeze(self) -> None:
        if self.process is not None:
            self.process.freeze()

    def thaw(self) -> None:
        if self.process is not None and self.process.is_frozen:
            self.process.thaw()


def _leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.__cause__ or error


# --- gateways ---------------------------------------------------------------------------------------------------------


class Keys:
    """Replaces the key ring: knows every token."""

    may_be_old = False

    def __init__(self, policies: dict[str, Policy]) -> None:
        self._principals = {
            name: Principal(name, name, f"team-{name}", f"team-{name}", "organisation", key_policy=policy)
            for name, policy in policies.items()
        }

    def authenticate(self, token: str) -> Principal | None:
        return self._principals.get(token)

    def is_revoked(self, _key_id: str) -> bool:
        return False


class Catalog:
    """Replaces the model catalog: prompts are token ids, and nothing is encoded."""

    def __init__(self) -> None:
        unused: Any = None
        self._tokens = ModelTokens(MODEL, unused, None, CONTEXT, unused, control_tokens_in_content=True)

    def canonical_name(self, name: str, _principal: Principal) -> str:
        return name

    def tokens_of(self, _model: str) -> ModelTokens:
        return self._tokens


class Prices:
    def of(self, _model: str, _unix_ms: int, pool: str = "") -> TokenPrice | None:
        return None if pool else PRICE


class Gateway(Part):
    """One gateway, without HTTP parsing: clients call its ASGI application."""

    def __init__(
        self,
        world: World,
        name: str,
        host: Host,
        skew_s: float,
        policies: dict[str, Policy],
        on_open: Callable[..., None],
    ) -> None:
        super().__init__(world, name, host, skew_s)
        self._policies = policies
        self._on_open = on_open
        self.disk = Disk()
        self.application: Any = None  # None: not listening
        self.callers: dict[Any, None] = {}  # clients with a connection, in order
        self.dispatcher: Dispatcher | None = None
        self.quotas: Quotas | None = None
        self.outbox: Outbox | None = None
        self.admission_control: AdmissionControl | None = None
        self._stop: asyncio.Event | None = None

    async def main(self, process: Process) -> None:
        settings = GatewaySettings(
            gateway_id=self.id,
            nats_urls=(),
            database_url="",
            data_dir=Path(),
            key_pepper=SecretStr("pepper"),
            models={MODEL: {}},  # type: ignore[dict-item]
        )
        self._stop = asyncio.Event()
        bus = await connect_bus(self.world, process, self.host, f"gateway-{self.id}")
        most = settings.limits.max_unpublished_usage
        outbox, intents = (
            Outbox(bus, subject, most, spool=self.disk.spool(subject))
            for subject in (subjects.REQUEST_USAGE_SUBJECT, subjects.INTENT_USAGE_SUBJECT)
        )
        registry = WorkerRegistry(bus)
        admission_control = AdmissionControl(bus, settings, registry)
        series = RequestSeries(Prices())
        dispatcher = Dispatcher(bus, settings, registry, outbox, intents=intents, observers=[series])
        await dispatcher.start()
        quotas = Quotas(bus, settings.gateway_id, RollupLedger(sql.engine()))
        await quotas.start()
        nothing: Any = None
        keys: Any = Keys(self._policies)
        catalog: Any = Catalog()
        prices: Any = Prices()
        core = Core(settings, keys, catalog, dispatcher, admission_control, quotas, prices)
        edge = Edge(
            timeouts=settings.timeouts,
            keys=keys,
            bodies=BodyReader(settings.limits, settings.timeouts.body_s),
            refusals=RefusalLog(series, RefusalRecords(outbox.put, settings.gateway_id, lambda name: name)),
        )
        completions = Generation(core, nothing, PayloadPublisher(bus, settings.payloads), CompletionCall)
        self._watch(dispatcher)
        self.dispatcher, self.quotas, self.outbox, self.admission_control = (
            dispatcher,
            quotas,
            outbox,
            admission_control,
        )
        await self._serve(core, GenerationEndpoint(edge, completions), (outbox, intents), bus)

    def _watch(self, dispatcher: Dispatcher) -> None:
        open_it = dispatcher.open

        def watched(*asked: Any) -> "OpenRequest":
            request = open_it(*asked)
            self._on_open(self, request)
            return request

        dispatcher.open = watched  # type: ignore[assignment, method-assign]

    async def _serve(
        self, core: Core, endpoint: GenerationEndpoint[CompletionCall], outboxes: Sequence[Outbox], bus: Bus
    ) -> None:
        assert self._stop is not None
        async with asyncio.TaskGroup() as group:
            publishing = [group.create_task(_must_not_end("usage outbox", outbox.run())) for outbox in outboxes]
            background = [
                group.create_task(_must_not_end(part, work))
                for part, work in {
                    "dispatcher": core.dispatcher.run(),
                    "admission control": core.admission_control.run(),
                    "limits": core.quotas.run(),
                }.items()
            ]
            self.application = endpoint
            await self._stop.wait()
            await core.dispatcher.drain(core.settings.timeouts.shutdown_s, asyncio.Event())
            self.application = None
            await asyncio.sleep(0.05)  # let answers be sent
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            core.dispatcher.settle_all()
            await asyncio.gather(*(outbox.flush(FLUSH_LIMIT_S) for outbox in outboxes))
            for task in publishing:
                task.cancel()
        await core.quotas.close()
        await bus.close()

    def stop_in_order(self) -> None:
        if self.is_alive and self._stop is not None:
            self.world.log("stop", self.id)
            self._stop.set()

    def on_gone(self) -> None:
        self.application = self.dispatcher = self.quotas = self.outbox = self.admission_control = None
        for caller in list(self.callers):
            caller.cut_off()
        self.callers.clear()
        self.disk.let_go()


# --- workers ----------------------------------------------------------------------------------------------------------


class PoolWorker(Part):
    def __init__(self, world: World, name: str, host: Host, skew_s: float, max_sequences: int, tier: str) -> None:
        super().__init__(world, name, host, skew_s)
        self.pace = Pace()
        self.engine: SimulatedEngine | None = None
        self._max_sequences = max_sequences
        self._tier = tier
        self._stop: Stop | None = None

    async def main(self, process: Process) -> None:
        settings = WorkerSettings(
            worker_id=self.id,
            pool=self.name,
            nats_urls=(),
            models=(MODEL,),
            tier=self._tier,  # type: ignore[arg-type]
            engine=ScriptedEngineSettings(),
            drain_s=5.0,
        )
        self._stop = Stop(settings.drain_s)
        engine = self.engine = SimulatedEngine(self._max_sequences, self.pace, self.world.made)
        capacity = await engine.start()
        name = subjects.connection_name(self.id)
        bus = await connect_bus(self.world, process, self.host, name)
        from pool_worker.engines.base import EngineDiedError

        with contextlib.suppress(EngineDiedError):
            await serve_worker(
                settings,
                bus,
                engine,
                capacity,
                stop=self._stop,
                on_ready=None,
                traces=None,
            )
        await bus.close()

    def stop_in_order(self) -> None:
        if self.is_alive and self._stop is not None:
            self.world.log("stop", self.id)
            self._stop.on_signal()

    def on_gone(self) -> None:
        self.engine = None


# --- the ledger -------------------------------------------------------------------------------------------------------


class Ledger(Part):
    def __init__(self, world: World, host: Host, skew_s: float) -> None:
        super().__init__(world, "ledger", host, skew_s)
        self._stopping: asyncio.Event | None = None

    async def main(self, process: Process) -> None:
        settings = LedgerSettings(nats_urls=(), database_url="", batch_wait_s=BATCH_WAIT_S)
        stopping = self._stopping = asyncio.Event()
        bus = await connect_bus(self.world, process, self.host, "spillway-ledger")
        await wait_for_consumer(bus, subjects.USAGE_STREAM, subjects.LEDGER_CONSUMER, stopping)
        await LedgerWriter(bus, sql.engine(), settings, stopping).run()
        await bus.close()

    def stop_in_order(self) -> None:
        if self.is_alive and self._stopping is not None:
            self.world.log("stop", self.id)
            self._stopping.set()


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()
