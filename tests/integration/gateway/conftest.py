"""A whole gateway in the test's own loop, with a real nats-server, real SQL and scripted workers."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from nats.aio.msg import Msg
from pydantic import SecretStr

from accounts.keys import create_key
from accounts.principal import Principal
from db.engine import create_engine
from gateway.admission.registry import WorkerRegistry
from gateway.dispatch.dead_letters import newest_dead_letters
from gateway.dispatch.dispatcher import Dispatcher
from gateway.main import run
from gateway.request.admission import Admission
from gateway.settings import GatewaySettings, ModelSettings
from protocol import artifacts, subjects
from protocol import messages as m
from protocol.bus import Bus
from protocol.dead_letters import DeadLetter
from protocol.errors import ApiError, BusTimeout
from protocol.messages import PROTOCOL_VERSION, ModelCard
from protocol.outbox import Outbox
from protocol.usage import RequestRecord, UsageRecord, decode_usage
from tests.integration.gateway.scripted_worker import ScriptedWorker, wait_for_consumer
from tests.nats_server import NatsServer
from tests.small_tokenizer import BOS, CHATML, EOS, byte_tokenizer_json
from tests.waiting import HANGS_S, until

MODEL = "test/model-1"
PEPPER = SecretStr("p" * 64)
NO_MESSAGE_FOUND = 10037

QUICK = {"headers_grace_s": 0.3, "queued_comment_s": 0.3, "leave_s": 0.0, "shutdown_s": 0.5}


async def restart(server: NatsServer, bus: Bus) -> None:
    """Kill the server and start it again; returns when ``bus`` has noticed and is back."""
    reconnects = bus.client.stats["reconnects"]
    server.kill()
    server.start()
    await until(lambda: bus.client.stats["reconnects"] > reconnects and bus.connected)


def admission(request_id: str) -> Admission:
    now_s = time.monotonic()
    sampling = m.Sampling(max_tokens=9)
    prompt = m.pack_token_ids([1])
    return Admission(
        request_id,
        "chat.completions",
        "m",
        Principal("k", "k", "t", "t", "o"),
        True,
        prompt,
        1,
        "messages",
        sampling,
        now_s,
        0,
        now_s,
        600.0,
    )


class GatewayUnderTest:
    """The running gateway and what surrounds it."""

    def __init__(self, settings: GatewaySettings, key: str, bus: Bus) -> None:
        self.settings = settings
        self.key = key
        self.bus = bus
        self.port = 0
        self.stop = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.workers: list[ScriptedWorker] = []
        self._clients: list[openai.AsyncOpenAI] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        ready = asyncio.Event()

        def on_ready(port: int) -> None:
            self.port = port
            ready.set()

        self.task = asyncio.create_task(run(self.settings, on_ready, self.stop))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({self.task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=HANGS_S)
        waiting.cancel()
        if self.task.done():
            await self.task
        assert ready.is_set()

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
        options = {"base_url": f"{self.url}/v1", "max_retries": 0, "timeout": 30.0, "api_key": self.key, **rest}
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
        """All that the usage stream holds now, of gateways and workers; nothing while it cannot be asked."""
        records: list[UsageRecord] = []
        messages: list[Msg] = []
        try:
            info = await self.bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}")
        except (ApiError, BusTimeout):
            return []
        inbox = self.bus.client.new_inbox()
        wanted = int(info["state"]["messages"])

        async def on_message(message: Msg) -> None:
            records.extend(decode_usage(message.data))
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
        tokenizer_object=artifacts.tokenizer_object_name(byte_tokenizer_json()),
        chat_template=CHATML,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
    )


Start = Callable[..., Awaitable[GatewayUnderTest]]


@pytest.fixture
async def start_gateway(nats_url: str, bus: Bus, sqlite_url: str, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts a gateway with the settings given; ends it, and its workers, after the test."""
    started: list[GatewayUnderTest] = []

    async def start(
        *, with_card: bool = True, timeouts: dict[str, float] | None = None, **rest: Any
    ) -> GatewayUnderTest:
        database_url = rest.setdefault("database_url", sqlite_url)
        engine = create_engine(database_url)
        _, key = await create_key(engine, f"test {len(started)}", PEPPER)
        await engine.dispose()
        settings = GatewaySettings.model_validate(
            {
                "gateway_id": f"g{len(started)}",
                "port": 0,
                "nats_urls": (nats_url,),
                "data_dir": tmp_path / "data",
                "key_pepper": PEPPER,
                "models": {MODEL: ModelSettings(aliases=("short",))},
                "timeouts": {**QUICK, **(timeouts or {})},
                **rest,
            }
        )
        gateway = GatewayUnderTest(settings, key, bus)
        started.append(gateway)
        await gateway.start()
        if with_card:
            await artifacts.publish_model_card(bus, card(), byte_tokenizer_json())
            client = gateway.client()
            await until(lambda: has_context_length(client))
        return gateway

    yield start
    for gateway in started:
        await gateway.close_clients()
        for worker in gateway.workers:
            await worker.stop()
        if gateway.task is not None and not gateway.task.done():
            await gateway.end()


async def has_context_length(client: openai.AsyncOpenAI) -> bool:
    model = await client.models.retrieve("short")
    return model.model_dump()["context_length"] is not None


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
