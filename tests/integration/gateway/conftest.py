"""A whole gateway in the test's own loop, with a real nats-server, real SQL and scripted workers.

Two fixtures start it, with the same arguments:

- ``share_gateway``: one for all tests of the module that ask for the same settings, in the module's event loop. A test
  gets API keys of its own, sees the usage records of these alone, and adds its own workers. It fails if it leaves
  requests or jobs behind. For all that shows in requests and answers.
- ``start_gateway``: a fresh one, with a queue server and a database of its own. For what outlives a request: kills,
  restarts, budgets, bounds of what may wait, series and logs of the whole gateway.

Neither has the console: ``console={}`` adds it, with its usual settings.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import pytest
import pytest_asyncio
from nats.aio.msg import Msg
from pydantic import SecretStr
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncEngine

from console.mount import mount
from console.settings import LoginSettings
from db.accounts.keys import USUAL_GRANT, ApiKey, Grant, create_key
from db.accounts.principal import METRICS, Principal
from db.engine import create_engine
from db.tables import BatchRow
from gateway.admission.registry import WorkerRegistry
from gateway.batches.store import OVER
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.records import newest_dead_letters
from gateway.main import run
from gateway.mount import GatewayParts, Mount, Mounted
from gateway.request.request import Admission, Arrival, Prompt
from gateway.settings import GatewaySettings, ModelSettings
from gateway.tokenizing.catalog import ModelCatalog
from ledger.webhooks.settings import WebhookSettings
from protocol import job as m
from protocol import subjects
from protocol.errors import ApiError, BusTimeout
from protocol.job import PROTOCOL_VERSION, ModelCard
from protocol.nats import objects
from protocol.nats.bus import Bus
from protocol.nats.outbox import Outbox
from protocol.usage import DeadLetter, RequestRecord, UsageRecord, decode_usage
from tests.integration.gateway.scripted_worker import ScriptedWorker, wait_for_consumer
from tests.integration.queued_jobs import queued_jobs
from tests.nats_server import NatsServer
from tests.small_tokenizer import BOS, CHATML, EOS, byte_tokenizer_json
from tests.waiting import HANGS_S, until

MODEL = "test/model-1"
PEPPER = SecretStr("p" * 64)
NO_MESSAGE_FOUND = 10037

QUICK = {
    "headers_grace_s": 0.3,
    "queued_comment_s": 0.3,
    "leave_s": 0.0,
    "shutdown_s": 0.5,
    "limits_s": HANGS_S,  # a busy machine's queue server is not away
    "worker_silence_s": HANGS_S,  # no heartbeat that is late on a busy machine costs an attempt
}


async def restart(server: NatsServer, bus: Bus) -> None:
    """Kill the server and start it again; returns when ``bus`` has noticed and is back."""
    reconnects = bus.client.stats["reconnects"]
    server.kill()
    server.start()
    await until(lambda: bus.client.stats["reconnects"] > reconnects and bus.connected)


def admission(request_id: str) -> Admission:
    now_s = time.monotonic()
    return Admission(
        arrival=Arrival(request_id, received_s=now_s, received_unix_ms=0, queue_wait_s=600.0),
        endpoint="chat.completions",
        model="m",
        principal=Principal("k", "k", "t", "t", "o"),
        prompt=Prompt(m.pack_token_ids([1]), 1, "messages", m.Sampling(max_tokens=9), stream=True),
        admitted_s=now_s,
    )


class GatewayUnderTest:
    """The running gateway and what surrounds it."""

    def __init__(self, settings: GatewaySettings, key: str, bus: Bus, console: Mount | None = None) -> None:
        self.settings = settings
        self._console = console
        self._catalog: ModelCatalog | None = None
        self.key = key
        self.bus = bus
        self.port = 0
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.workers: list[ScriptedWorker] = []
        self.key_ids: set[str] | None = None  # of a shared one: of whose records there may be others
        self._clients: list[openai.AsyncOpenAI] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        ready = asyncio.Event()

        def on_ready(port: int) -> None:
            self.port = port
            ready.set()

        self.task = asyncio.create_task(run(self.settings, on_ready, self.stop, mount=self._mounted))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self.task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=HANGS_S)
        waiting.cancel()
        if self.task.done():
            await self.task
        assert ready.is_set()

    @contextlib.asynccontextmanager
    async def _mounted(self, parts: GatewayParts) -> AsyncIterator[Mounted]:
        self._catalog = parts.catalog
        if self._console is None:  # it takes as long to start as all the rest of a gateway
            yield Mounted((), (), lambda app: None)
        else:
            async with self._console(parts) as mounted:
                yield mounted

    def knows_its_model(self) -> bool:
        return self._catalog is not None and self._catalog.context_length(MODEL) is not None

    async def end(self) -> None:
        self.stop.set()
        if self.task is not None:
            async with asyncio.timeout(HANGS_S):
                await self.task

    async def add_worker(self, worker_id: str = "w1", **rest: Any) -> ScriptedWorker:
        await wait_for_consumer(self.bus, MODEL)
        worker = ScriptedWorker(self.bus, MODEL, worker_id, **rest)
        await worker.start()
        self.workers.append(worker)
        return worker

    def client(self, **rest: Any) -> openai.AsyncOpenAI:
        options = {"base_url": f"{self.url}/v1", "max_retries": 0, "timeout": HANGS_S, "api_key": self.key, **rest}
        client = openai.AsyncOpenAI(**options)
        self._clients.append(client)
        return client

    async def close_clients(self) -> None:
        for client in self._clients:
            await client.close()

    async def records(self, count: int = 1) -> list[RequestRecord]:
        """The usage stream's records of requests, once there are ``count``; duplicates would be among them."""
        found: list[RequestRecord] = []
        async with asyncio.timeout(HANGS_S):
            while len(found) < count:
                found = [record for record in await self.usage() if isinstance(record, RequestRecord)]
                await asyncio.sleep(0.02)
        return found

    async def dead_letter(self) -> DeadLetter:
        """The first letter of the dead-letter stream, once it is there."""
        async with asyncio.timeout(HANGS_S):
            while True:
                letters = await newest_dead_letters(self.bus, limit=1)
                if letters:
                    return letters[0]
                await asyncio.sleep(0.02)

    async def usage(self) -> list[UsageRecord]:
        """What the usage stream holds now, of gateways and workers; nothing while it cannot be asked."""
        records: list[UsageRecord] = []
        messages: list[Msg] = []
        try:
            info = await self.bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}")
        except (ApiError, BusTimeout):
            return []
        inbox = self.bus.client.new_inbox()
        wanted = int(info["state"]["messages"])

        async def on_message(message: Msg) -> None:
            records.extend(record for record in decode_usage(message.data) if self._is_ours(record))
            messages.append(message)

        subscription = await self.bus.subscribe(inbox, on_message)
        body = {"stream_name": subjects.USAGE_STREAM, "config": {"deliver_subject": inbox, "ack_policy": "none"}}
        try:
            await self.bus.api(f"CONSUMER.CREATE.{subjects.USAGE_STREAM}", body)
        except (ApiError, BusTimeout):  # a cluster elects
            return []
        else:
            await until(lambda: len(messages) >= wanted)
            return records
        finally:
            await subscription.unsubscribe()

    def _is_ours(self, record: UsageRecord) -> bool:
        return self.key_ids is None or record.key_id in self.key_ids


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="test")
    yield bus
    await bus.close()


def card() -> ModelCard:
    return ModelCard(
        v=PROTOCOL_VERSION,
        model=MODEL,
        context_length=512,
        tokenizer_object=objects.tokenizer_object_name(byte_tokenizer_json()),
        chat_template=CHATML,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
    )


Start = Callable[..., Awaitable[GatewayUnderTest]]


async def begin(
    gateway: GatewayUnderTest, *, with_card: bool = True, model_card: ModelCard | None = None, tokenizer: bytes = b""
) -> None:
    """Start it; with a card, return once it knows its model."""
    await gateway.start()
    if with_card:
        published = model_card or card()
        await objects.publish_model_card(gateway.bus, published, tokenizer or byte_tokenizer_json())
        await until(gateway.knows_its_model)


def settings_of(number: int, *, timeouts: dict[str, float] | None = None, **rest: Any) -> GatewaySettings:
    return GatewaySettings.model_validate(
        {
            "gateway_id": f"g{number}",
            "port": 0,
            "key_pepper": PEPPER,
            "models": {MODEL: ModelSettings(aliases=("short",))},
            "timeouts": {**QUICK, **(timeouts or {})},
            **rest,
        }
    )


def console_of(options: dict[str, Any]) -> Mount | None:
    """Take the console's settings out of what a fixture is asked for; without ``console=...`` there is none."""
    console, webhooks = options.pop("console", None), options.pop("webhooks", None)
    return None if console is None else mount(LoginSettings.model_validate(console), webhooks or WebhookSettings())


CARD_OPTIONS: Final = frozenset({"with_card", "model_card", "tokenizer"})
IS_OPEN: Final = BatchRow.status.not_in(OVER)
RUNNING: Final = ("spillway_requests_in_flight ", "spillway_usage_records_unpublished ")


@pytest.fixture(scope="session")
def sqlite_with_key(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A migrated SQLite file to copy, and the key that it has: to make one takes a tenth of a start."""
    path = Path(shutil.copy(migrated_sqlite, tmp_path_factory.mktemp("sqlite") / "with_key.db"))

    async def make() -> str:
        engine = create_engine(f"sqlite:///{path}")
        _, key = await create_key(engine, "test 0", PEPPER)
        await engine.dispose()
        return key

    return path, asyncio.run(make())


@pytest.fixture
def sqlite_url(sqlite_with_key: tuple[Path, str], tmp_path: Path) -> str:
    """A fresh SQLite file with that key."""
    return f"sqlite:///{shutil.copy(sqlite_with_key[0], tmp_path / 'spillway.db')}"


@pytest.fixture
async def start_gateway(
    sqlite_with_key: tuple[Path, str], nats_url: str, bus: Bus, sqlite_url: str, tmp_path: Path
) -> AsyncIterator[Start]:
    """Starts a gateway with the settings given; ends it, and its workers, after the test."""
    started: list[GatewayUnderTest] = []

    async def start(**options: Any) -> GatewayUnderTest:
        of_card = {name: options.pop(name) for name in CARD_OPTIONS & options.keys()}
        console = console_of(options)
        options = {"nats_urls": (nats_url,), "database_url": sqlite_url, "data_dir": tmp_path / "data", **options}
        key = sqlite_with_key[1]
        if started or options["database_url"] != sqlite_url:
            engine = create_engine(options["database_url"])
            _, key = await create_key(engine, f"test {len(started)}", PEPPER)
            await engine.dispose()
        gateway = GatewayUnderTest(settings_of(len(started), **options), key, bus, console)
        started.append(gateway)
        await begin(gateway, **of_card)
        return gateway

    yield start
    for gateway in started:
        await gateway.close_clients()
        for worker in gateway.workers:
            await worker.stop()
        if gateway.task is not None and not gateway.task.done():
            await gateway.end()


class SharedSystem:
    """A gateway for several tests, one after the other, with a queue server and a database of its own."""

    FIRST_KEYS: Final = 2
    FURTHER_KEYS: Final = 16  # the gateway takes 0.2 s to learn of them

    def __init__(self, gateway: GatewayUnderTest, engine: AsyncEngine) -> None:
        self.gateway = gateway
        self.engine = engine
        self._keys: list[tuple[ApiKey, str]] = []  # that no test has had
        self._made = 0

    async def start(self, **of_card: Any) -> None:
        _, self._metrics_key = await create_key(self.engine, "metrics", PEPPER, Grant(scopes=(METRICS,)))
        await self._make_keys(self.FIRST_KEYS)
        self.gateway.key = self._keys[0][1]
        await begin(self.gateway, **of_card)

    async def of_one_test(self) -> "GatewayOfOneTest":
        if not self._keys:
            await self._make_keys(self.FURTHER_KEYS)
            await self._until_known(self._keys[-1][1])
        return GatewayOfOneTest(self, *self._keys.pop())

    async def new_key(self, grant: Grant) -> tuple[ApiKey, str]:
        """A key that the gateway knows."""
        key, token = await self._create(grant)
        await self._until_known(token)
        return key, token

    async def _make_keys(self, count: int) -> None:
        self._keys = [await self._create(USUAL_GRANT) for _ in range(count)]

    async def _create(self, grant: Grant) -> tuple[ApiKey, str]:
        self._made += 1
        return await create_key(self.engine, f"test {self._made}", PEPPER, grant)

    async def _until_known(self, token: str) -> None:
        await self.gateway.bus.publish(subjects.KEYS_CHANGED_SUBJECT, b"")
        async with self._client(token) as client:

            async def is_known() -> bool:
                return (await client.get("/v1/models")).status_code in {httpx.codes.OK, httpx.codes.FORBIDDEN}

            await until(is_known)

    def _client(self, token: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {token}"}
        return httpx.AsyncClient(base_url=self.gateway.url, headers=headers, timeout=HANGS_S)

    async def expire_batches(self) -> None:
        """Have the gateway end its batches: otherwise a worker of the next test gets their lines."""
        if self._has_batches:
            async with self.engine.begin() as connection:
                await connection.execute(update(BatchRow).where(IS_OPEN).values(expires_unix_ms=0))

    @property
    def _has_batches(self) -> bool:
        return "batches" in self.gateway.settings.model_fields_set

    async def what_runs(self) -> list[str]:
        """Batches and jobs in the queue; if there are none, requests and usage records that have not ended."""
        if self._has_batches:
            async with self.engine.connect() as connection:
                batches = (await connection.execute(select(BatchRow.id).where(IS_OPEN))).scalars().all()
            if batches:
                return [f"batches {', '.join(batches)}"]
        try:
            jobs = await queued_jobs(self.gateway.bus)
        except BusTimeout:
            return ["the queue server does not say"]
        if jobs:
            return [f"{jobs} jobs in the queue"]
        async with self._client(self._metrics_key) as client:
            series = (await client.get("/metrics")).text.splitlines()
        return [line for line in series if line.startswith(RUNNING) and not line.endswith(" 0.0")]


class GatewayOfOneTest(GatewayUnderTest):
    """A shared gateway as one test has it: with its own keys and workers, and without the others' records."""

    def __init__(self, system: SharedSystem, key: ApiKey, token: str) -> None:
        super().__init__(system.gateway.settings, token, system.gateway.bus)
        self.port = system.gateway.port
        self.key_id = key.key_id
        self.key_ids = {key.key_id}
        self.engine = system.engine
        self._system = system

    async def make_key(self, **grant: Any) -> tuple[str, str]:
        """A further key of the test's own, with the Grant given; returns its id and its plaintext."""
        key, token = await self._system.new_key(Grant(**grant))
        assert self.key_ids is not None
        self.key_ids.add(key.key_id)
        return key.key_id, token

    async def leave(self) -> None:
        """Take away what the test has added, once its requests have ended. Raises AssertionError if they do not."""
        await self.close_clients()
        await self._system.expire_batches()
        running: list[str] = []

        async def is_over() -> bool:
            nonlocal running
            running = await self._system.what_runs()
            return not running

        try:
            await until(is_over)
        except TimeoutError:
            raise AssertionError(f"The test leaves this to the next ones: {running}") from None
        finally:
            for worker in self.workers:
                await worker.stop()
                await worker.sign_off()


Share = Callable[..., Awaitable[GatewayOfOneTest]]
SystemWith = Callable[..., Awaitable[SharedSystem]]


@contextlib.asynccontextmanager
async def shared_system(folder: Path, database: Path, **options: Any) -> AsyncIterator[SharedSystem]:
    of_card = {name: options.pop(name) for name in CARD_OPTIONS & options.keys()}
    console = console_of(options)
    server = NatsServer(folder)
    server.start()
    try:
        bus = await Bus.connect(server.url, name="test")
        database_url = f"sqlite:///{shutil.copy(database, folder / 'spillway.db')}"
        its_own: dict[str, Any] = {"nats_urls": (server.url,), "database_url": database_url}
        engine = create_engine(database_url)
        gateway = GatewayUnderTest(settings_of(0, data_dir=folder / "data", **its_own, **options), "", bus, console)
        system = SharedSystem(gateway, engine)
        await system.start(**of_card)
        yield system
        await gateway.close_clients()
        await gateway.end()
        await engine.dispose()
        await bus.close()
    finally:
        server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_systems(migrated_sqlite: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SystemWith]:
    """Starts a system for the module, or returns the one that has the same settings."""
    async with contextlib.AsyncExitStack() as stack:
        systems: dict[str, SharedSystem] = {}

        async def system_with(**options: Any) -> SharedSystem:
            name = repr(sorted(options.items()))
            if name not in systems:
                new = shared_system(tmp_path_factory.mktemp("shared"), migrated_sqlite, **options)
                systems[name] = await stack.enter_async_context(new)
            return systems[name]

        yield system_with


@pytest_asyncio.fixture(loop_scope="module")
async def share_gateway(shared_systems: SystemWith) -> AsyncIterator[Share]:
    """The module's gateway with the settings given, as one test has it."""
    shared: list[GatewayOfOneTest] = []

    async def share(**options: Any) -> GatewayOfOneTest:
        system = await shared_systems(**options)
        shared.append(await system.of_one_test())
        return shared[-1]

    yield share
    for gateway in shared:
        await gateway.leave()


IN_THE_MODULES_LOOP: Final = pytest.mark.asyncio(loop_scope="module")


@pytest.hookimpl(tryfirst=True)  # before pytest-asyncio takes the scope of a loop that is not asyncio's own
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what uses a shared gateway in the loop of its module."""
    if "share_gateway" in metafunc.fixturenames:
        metafunc.definition.add_marker(IN_THE_MODULES_LOOP, append=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests themselves, too."""
    for item in items:
        if "share_gateway" in getattr(item, "fixturenames", ()):
            item.add_marker(IN_THE_MODULES_LOOP, append=False)


@contextlib.asynccontextmanager
async def dispatching(nats_url: str, data_dir: Path) -> AsyncIterator[tuple[Dispatcher, Bus]]:
    """A gateway's dispatcher alone, and its connection."""
    bus = await Bus.connect(nats_url, name="test")
    settings = GatewaySettings(
        gateway_id="g",
        nats_urls=(nats_url,),
        database_url="sqlite:///unused",
        data_dir=data_dir,
        key_pepper=SecretStr("unused"),
        models={"m": ModelSettings()},
    )
    outbox = Outbox(bus, subjects.REQUEST_USAGE_SUBJECT, 10)
    intents = Outbox(bus, subjects.INTENT_USAGE_SUBJECT, 10)
    dispatcher = Dispatcher(bus, settings, WorkerRegistry(bus), outbox, intents=intents)
    await dispatcher.start()
    yield dispatcher, bus
    await bus.close()


@pytest.fixture
async def dispatcher(nats_url: str, tmp_path: Path) -> AsyncIterator[tuple[Dispatcher, Bus]]:
    async with dispatching(nats_url, tmp_path) as both:
        yield both
