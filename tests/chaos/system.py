"""The Spillway under test: every part a process of its own, in a folder of its own.

Queue server and load balancer run with the files that are shipped in ``deploy/``; callers come through the balancer.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from benchmarks.ports import free_port
from db.accounts.keys import Grant, create_key
from db.accounts.principal import Policy
from db.accounts.token import load_or_create_pepper
from db.engine import create_engine
from migrations import upgrade
from protocol.nats.bus import Bus
from spillway.children import Child
from spillway.cli.ledger import LEDGER_NICENESS
from spillway.config import DEMO_MODEL_PATH, Config, load_config
from tests.chaos.children import ForkedChild
from tests.chaos.credentials import SignedQueue
from tests.chaos.older import create_older_key, create_older_schema, install_its_packages, unpack_older
from tests.chaos.proxy import CutProxy
from tests.chaos.servers import FIRST_SLOT, REVISION, Server, ServerSpec, engine_settings, make_servers
from tests.chaos.watcher import Watcher
from tests.chaos.workers import LiveWorker, WorkerFarm, worker_process
from tests.nats_server import NatsCluster, NatsServer
from tests.postgres import TEMPLATE, PostgresServer
from tests.shipped import HAProxy, ShippedCluster, ShippedNats

MODEL = "chaos"
STOP_LIMIT_S = 45.0
WORKERS_LIMIT_S = 120.0  # until one serves or has left, on a busy machine
WRONG_CLOCK = Path(__file__).with_name("wrong_clock")  # Python imports what is in there before anything else
SHUTDOWN_S = 1.0  # of gateways: callers are only left at the end of a run that is interrupted
EngineKind = Literal["scripted", "spillway"]


@dataclass(frozen=True)
class Shape:
    """The number of processes of each kind."""

    engine: EngineKind = "scripted"
    workers: int = 4
    gateways: int = 1
    cluster: bool = False  # three queue servers instead of one
    leaf_port: int | None = None  # where the queue server takes leaf nodes of other regions
    credentials: bool = False  # for each part its own at the queue server, instead of one password
    postgres: bool = False  # instead of SQLite
    proxied: bool = False  # a wire that can be cut between each worker and its queue server
    gateways_proxied: bool = False  # likewise between each gateway and its queue server
    inter_token_s: float = 0.02  # of the scripted engine
    max_sequences: int = 64  # per worker
    drain_s: float = 0.3  # shorter than most streams last, so that a drain hands back
    max_attempts: int = 6  # the default
    gateway_timeouts: dict[str, float] = field(default_factory=dict)  # further keys of [gateway.timeouts]
    worker_settings: dict[str, Any] = field(default_factory=dict)  # further keys of [pools.chaos]
    tenants: dict[str, float] = field(default_factory=dict)  # further API keys and their weights
    limited: dict[str, Policy] = field(default_factory=dict)  # further API keys and their limits
    price: dict[str, float] | None = None  # of the model's tokens
    clocks_ahead_s: tuple[float, ...] = ()  # of the gateways, in order; the others' are right
    other_models: tuple[str, ...] = ()  # that no worker serves
    servers: tuple[ServerSpec, ...] = ()  # each a pool beside that of the workers
    other_pools: dict[str, dict[str, Any]] = field(default_factory=dict)  # further [pools.X], which gateways know
    fleet: dict[str, Any] = field(default_factory=dict)  # [fleet]
    responses: dict[str, Any] = field(default_factory=dict)  # [responses]
    batches: dict[str, Any] = field(default_factory=dict)  # [batches]
    standing_by: str | None = None  # the pool that only a fault starts
    worker_life: Callable[[str, str], None] = worker_process  # the whole life of each of our workers
    older: bool = False  # database, gateways and ledger writer begin with the older release's code


class System:
    """Use it as an async context manager: inside, everything runs and a request finds a worker."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.folder = folder
        self.shape = shape
        self.logs = folder / "logs"
        self.watcher = Watcher()
        self.api_key = ""
        self.tenant_keys: dict[str, str] = {}
        self.key_ids: dict[str, str] = {}  # of those with limits
        self.gateways: list[Child] = []
        self.gateway_killed_s = float("-inf")  # monotonic, the latest
        self.gateway_ports = [free_port() for _ in range(shape.gateways)]
        self.balancer = HAProxy(folder, self.gateway_ports)
        self.proxies: dict[int, CutProxy] = {}  # by the slot of the worker
        self.gateway_proxies: list[CutProxy] = []
        self.cluster: NatsCluster | None = None
        self.signed: SignedQueue | None = None
        self.postgres: PostgresServer | None = None
        self.queue_servers: list[NatsServer] = []
        self.bus: Bus
        self.ledger: Child
        self.servers: dict[str, Server] = {}  # by pool
        self.worker_processes: dict[int, Child] = {}  # by slot: those that are none of the farm's
        self.older_code: dict[str, str] = {}  # the environment in which the older release's code runs
        self.farm: WorkerFarm
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        self.logs.mkdir(parents=True)
        if self.shape.older:
            self.older_code = unpack_older(self.folder / "older")
            install_its_packages(self.folder / "older")
        self.bus = await self._start_queue()
        database_url = await self._start_database()
        if self.shape.gateways_proxied:
            self.gateway_proxies = [await self._start_proxy() for _ in self.gateway_ports]
        config = self.write_config(database_url)
        self.database = create_engine(config.database_url)
        self._stack.push_async_callback(self.database.dispose)
        pepper = load_or_create_pepper(config.data_dir)
        if self.shape.older:
            self.api_key = await asyncio.to_thread(create_older_key, self.older_code, self.config_path, "chaos")
        else:
            _, self.api_key = await create_key(self.database, "chaos", pepper)
        for name in self.shape.tenants:
            _, self.tenant_keys[name] = await create_key(self.database, name, pepper)
        for name, policy in self.shape.limited.items():
            key, self.tenant_keys[name] = await create_key(self.database, name, pepper, Grant(policy=policy))
            self.key_ids[name] = key.key_id
        self.ledger = await self._start_child("ledger", ["ledger"], 0, self.older_code)
        self.gateways = [
            await self._start_child(f"gateway-{number}", ["gateway"], number, self.older_code | self._clock_of(number))
            for number in range(self.shape.gateways)
        ]
        for child in (*self.gateways, self.ledger):  # a ledger writer waits for what gateways make
            await child.wait_ready()
        self._stack.push_async_callback(self.balancer.stop)
        await self.balancer.start()
        await self._start_workers(config)

    async def _start_queue(self) -> Bus:
        folder = self.folder / "nats"
        folder.mkdir()
        if self.shape.cluster:
            self.cluster = ShippedCluster(folder)
            self._stack.push_async_callback(asyncio.to_thread, self.cluster.stop_all)
            await asyncio.to_thread(self.cluster.start_all)
            self.queue_servers = self.cluster.servers
        else:
            server = ShippedNats(folder)
            if self.shape.leaf_port is not None:
                server.further_config = f"leafnodes {{ host: 127.0.0.1, port: {self.shape.leaf_port} }}"
            if self.shape.credentials:
                self.signed = SignedQueue(server, self.folder / "credentials", MODEL)
            self._stack.push_async_callback(asyncio.to_thread, server.kill)
            await asyncio.to_thread(server.start)
            self.queue_servers = [server]
        options = None if self.signed is None else self.signed.watcher_options()
        bus = await self.watcher.start([server.url for server in self.queue_servers], options)
        self._stack.push_async_callback(bus.close)
        if self.shape.servers:
            await self.watcher.watch_tokens(bus)
        if self.cluster is not None:
            await self.cluster.wait_until_ready(bus)
        return bus

    async def _start_database(self) -> str:
        if not self.shape.postgres:
            url = f"sqlite:///{self.folder / 'spillway.db'}"
            if self.shape.older:
                await asyncio.to_thread(create_older_schema, self.older_code, url)
            else:
                await asyncio.to_thread(upgrade, url)
            return url
        server = self.postgres = PostgresServer(niceness=LEDGER_NICENESS)  # as the compose file's shares have it
        self._stack.push_async_callback(asyncio.to_thread, server.remove)
        await asyncio.to_thread(server.create)
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(server.execute, f"CREATE DATABASE {TEMPLATE}")
        await asyncio.to_thread(upgrade, server.url(TEMPLATE))
        return server.url(TEMPLATE)

    def write_config(self, database_url: str) -> Config:
        """One file per gateway: they differ in their port. Returns the first, which the others go by too.

        An older release refuses sections that it does not know, so a file has only those that a scenario uses.
        """
        shape = self.shape
        # A controller ends processes with this id that it does not know: runs at the same time must not share one.
        fleet = {"fleet_id": f"chaos-{self.gateway_ports[0]}", **shape.fleet} if shape.fleet else {}
        sections = {"fleet": fleet, "responses": shape.responses, "batches": shape.batches}
        for number, port in enumerate(self.gateway_ports):
            config = {
                "data_dir": str(self.folder),
                "gateway": {
                    "port": port,
                    "max_attempts": shape.max_attempts,
                    "timeouts": {"leave_s": 0, "shutdown_s": SHUTDOWN_S, **shape.gateway_timeouts},
                },
                "nats": {
                    "urls": self._gateway_urls(number),
                    "queue": {"replicas": 3 if shape.cluster else 1},
                    **({} if self.signed is None else {"credentials": str(self.signed.folder)}),
                },
                "database": {"url": database_url},
                "models": {
                    MODEL: {} if shape.price is None else {"price": shape.price},
                    **{name: {} for name in shape.other_models},
                },
                "tenants": {name: {"weight": weight} for name, weight in shape.tenants.items()},
                **{name: keys for name, keys in sections.items() if keys},
                "pools": {
                    MODEL: {
                        "models": [MODEL],
                        "drain_s": shape.drain_s,
                        "engine": self._engine(),
                        **shape.worker_settings,
                    },
                    **shape.other_pools,
                },
            }
            self._config_path(number).write_text(json.dumps(config))
        return load_config(self._config_path(0), env={})

    def _gateway_urls(self, number: int) -> list[str]:
        if self.shape.gateways_proxied:
            return [self._url_through(self.gateway_proxies[number])]
        return [server.url for server in self.queue_servers]

    def _engine(self) -> dict[str, Any]:
        if self.shape.engine == "spillway":
            engine = {"kind": "spillway", "path": str(DEMO_MODEL_PATH), "threads": 1, "max_sequences": 16, "kv_mib": 64}
            return {**engine, "revision": REVISION} if self.shape.servers else engine
        return {
            "kind": "scripted",
            "inter_token_s": self.shape.inter_token_s,
            "max_sequences": self.shape.max_sequences,
            "faults_from_prompt": True,
        }

    def _config_path(self, number: int) -> Path:
        return self.folder / f"config-{number}.json"

    def _clock_of(self, number: int) -> dict[str, str]:
        """The environment of a gateway whose clock is wrong."""
        ahead_s = self.shape.clocks_ahead_s[number] if number < len(self.shape.clocks_ahead_s) else 0.0
        return {"PYTHONPATH": str(WRONG_CLOCK), "CLOCK_AHEAD_S": str(ahead_s)} if ahead_s else {}

    async def _start_child(
        self, name: str, command: list[str], number: int, environment: dict[str, str] | None = None
    ) -> Child:
        arguments = [*command, "--config", str(self._config_path(number))]
        kind = Child if environment else ForkedChild  # it changes what is imported
        child = kind(name, arguments, self.folder, self.logs, STOP_LIMIT_S, environment=environment)
        await child.start()
        self._stack.push_async_callback(child.stop)
        return child

    @property
    def config_path(self) -> Path:
        """The configuration of everything but further gateways."""
        return self._config_path(0)

    def add_pool(self, name: str, keys: dict[str, Any]) -> None:
        """Add a pool with our engine to the configuration, for whoever reads it from now on."""
        config = json.loads(self.config_path.read_text())
        config["pools"][name] = {"drain_s": self.shape.drain_s, "engine": self._engine(), **keys}
        self.config_path.write_text(json.dumps(config))

    async def start_child(self, name: str, command: list[str], environment: dict[str, str]) -> Child:
        """Start another process of ours; it is ended with the rest."""
        child = await self._start_child(name, command, 0, environment)
        await child.wait_ready()
        return child

    async def add_worker_process(self, slot: int, environment: dict[str, str]) -> None:
        """Start a worker as it is started outside tests; it stays until it is stopped."""
        command = ["worker", "--pool", MODEL]
        child = await self._start_child(f"worker-{slot}", command, 0, environment)
        self.worker_processes[slot] = child
        await child.wait_ready()

    async def _start_workers(self, config: Config) -> None:
        url_of_slot = None
        if self.shape.proxied:
            for slot in range(self.shape.workers + 1):  # one is for a worker that a fault adds
                self.proxies[slot] = await self._start_proxy()
            url_of_slot = self._proxy_url
        self.farm = WorkerFarm(config.worker_settings(MODEL), self.logs, url_of_slot, self.shape.worker_life)
        self.servers = make_servers(self.shape.servers, self.folder, self.logs, self._stack)
        for server in self.servers.values():  # one after the other: they share few cores
            await server.start()
        self._stack.push_async_callback(self.farm.stop)
        if not self.servers:
            await self.farm.start(self.shape.workers)

    # --- pools beside inference servers -------------------------------------------------------------------------------

    @property
    def pools(self) -> list[str]:
        """Those of servers, and that of our own workers if there are any. Whoever needs one starts it."""
        return [*self.servers, *([MODEL] if self.shape.workers else [])]

    def engine_of(self, pool: str) -> str:
        """Return the make of engine of this pool."""
        return self.servers[pool].spec.kind if pool in self.servers else self.shape.engine

    async def start_pool(self, pool: str) -> None:
        """Start the workers of a pool, and wait until they serve."""
        change: dict[str, Any] = {"pool": pool}
        if pool in self.servers:
            server = self.servers[pool]
            change |= {"tier": server.spec.tier, "engine": engine_settings(server)}
        for slot in self._slots_of(pool):
            await self.farm.spawn(slot, change)
        async with asyncio.timeout(WORKERS_LIMIT_S):
            while not all(self.watcher.has_beaten(worker.worker_id) for worker in self.workers_of(pool)):
                await asyncio.sleep(0.05)

    def workers_of(self, pool: str) -> list[LiveWorker]:
        """The workers of a pool that live now; beside a server they are its side-cars."""
        return [worker for slot in self._slots_of(pool) if (worker := self.farm.at(slot)) is not None]

    def _slots_of(self, pool: str) -> range:
        if pool not in self.servers:
            return range(self.shape.workers)
        first = FIRST_SLOT * (1 + list(self.servers).index(pool))
        return range(first, first + self.servers[pool].spec.side_cars)

    async def retire_pool(self, pool: str) -> None:
        """SIGTERM the workers of a pool for good, and wait until they have left."""
        leaving = self.workers_of(pool)
        for worker in leaving:
            self.farm.retire(worker)
        async with asyncio.timeout(WORKERS_LIMIT_S):
            while any(worker.worker_id in self.farm.live for worker in leaving):
                await asyncio.sleep(0.05)

    async def _start_proxy(self) -> CutProxy:
        proxy = CutProxy(self.queue_servers[0].port)
        await proxy.start()
        self._stack.push_async_callback(proxy.stop)
        return proxy

    def _proxy_url(self, slot: int) -> str:
        return self._url_through(self.proxies[slot])

    def _url_through(self, proxy: CutProxy) -> str:
        return self.queue_url("127.0.0.1", proxy.port)

    def queue_url(self, host: str, port: int) -> str:
        """The queue server's URL where it is reached at this address."""
        server = self.queue_servers[0]
        return server.url.replace(f"127.0.0.1:{server.port}", f"{host}:{port}")

    @property
    def port(self) -> int:
        """The load balancer's port, which clients use."""
        return self.balancer.port

    def is_at(self, request_id: str, gateway: Child) -> bool:
        """Report whether that gateway's process holds a request that a worker has accepted."""
        return f"-{gateway.pid}-" in self.watcher.gateways.get(request_id, "")

    async def kill(self, child: Child) -> None:
        """SIGKILL one of the children and wait for its end; ``restart`` brings it back."""
        if child in self.gateways:
            self.gateway_killed_s = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()

    async def kill_at_once(self, children: Sequence[Child], workers: Sequence[LiveWorker]) -> None:
        """SIGKILL them before any can react to another's end. The farm replaces its workers by itself."""
        self.gateway_killed_s = time.monotonic()
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
        for worker in workers:
            worker.send(signal.SIGKILL)
        for child in children:
            await child.wait()

    async def cut_power(self) -> None:
        """Kill everything at once but callers and their load balancer; ``restore_power`` starts it again."""
        servers = [asyncio.to_thread(server.kill) for server in self.queue_servers]
        if self.postgres is not None:
            servers.append(asyncio.to_thread(self.postgres.stop, crash=True))
        dying = asyncio.gather(*servers)
        await self.kill_at_once([*self.gateways, self.ledger], list(self.farm.live.values()))
        await dying
        self.gateway_killed_s = float("inf")  # whatever fails until power is back fails for that

    async def restore_power(self, balanced_limit_s: float) -> None:
        """Start everything in whatever order; workers have been started by then, and look for the queue server."""
        for server in self.queue_servers:
            await asyncio.to_thread(server.start)
        if self.postgres is not None:
            await asyncio.to_thread(self.postgres.start)
        await asyncio.gather(*map(self.restart, (*self.gateways, self.ledger)))
        await self.wait_until_balanced(balanced_limit_s)
        self.gateway_killed_s = time.monotonic()

    async def upgrade_schema(self) -> None:
        """Give the database the tables of this release; it has them already where this release has begun."""
        await asyncio.to_thread(upgrade, self.database.url.render_as_string(hide_password=False))

    async def restart(self, child: Child) -> None:
        await child.start()
        await child.wait_ready()

    async def wait_until_balanced(self, limit_s: float) -> None:
        """Wait until the load balancer sends to every gateway, for ``limit_s`` at most."""
        deadline_s = time.monotonic() + limit_s
        while (down := self.balancer.down()) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.1)
        assert not down, f"for {limit_s:g} s the load balancer sends nothing to {down}"

    def log_lines(self, word: str, limit: int = 40) -> list[str]:
        """Return the processes' log lines about a request or a worker."""
        return [
            f"{path.name}: {line[:400]}"
            for path in sorted(self.logs.glob("*.log"))
            for line in path.read_text(errors="replace").splitlines()
            if word in line
        ][-limit:]
