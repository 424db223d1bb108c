"""A gateway without sockets, queue server and SQL: its application, core and dispatcher on an in-process bus.

Requests and the frames of scripted workers take the whole path, in milliseconds. Sockets, the queue server and SQL are
covered by ``tests/integration/gateway``, whose shared gateway has the same interface.
"""

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import openai
from fastapi import FastAPI

from db.accounts.principal import Principal
from gateway.admission.control import AdmissionControl
from gateway.admission.registry import WorkerRegistry
from gateway.app import GatewayApp, hot_endpoints, make_operations
from gateway.core import Core
from gateway.dispatch.dispatcher import Dispatcher
from gateway.endpoints.endpoint import Edge, GenerationEndpoint
from gateway.endpoints.routes import models_router, tokenize_router
from gateway.endpoints.services import Services
from gateway.http.body import BodyReader
from gateway.http.pages import add_error_answers
from gateway.limits.leases import Quotas
from gateway.payloads import PayloadPublisher
from gateway.settings import ModelSettings
from gateway.telemetry.metrics import RequestSeries
from gateway.telemetry.refusal_records import RefusalRecords
from gateway.telemetry.refusals import RefusalLog
from gateway.tokenizing.catalog import ModelCatalog
from protocol import subjects
from protocol.job import PROTOCOL_VERSION, ModelCard
from protocol.nats import objects
from protocol.nats.outbox import Outbox
from protocol.nats.pull import Delivery
from protocol.usage import RequestRecord, decode_usage
from tests.integration.gateway.scripted_worker import Attempt, ScriptedWorker
from tests.small_tokenizer import BOS, CHATML, EOS, byte_tokenizer_json
from tests.unit.gateway.admission.controls import gateway_settings, principal
from tests.waiting import HANGS_S, until

MODEL: Final = "test/model-1"
JOBS: Final = "rq."


class Message(NamedTuple):
    subject: str
    data: bytes
    reply: str = ""


class LocalBus:
    """Stores durable messages, and delivers all messages to subscribers."""

    connected = True
    api_prefix = "$JS.API"

    def __init__(self) -> None:
        self.stored: list[Message] = []
        self.client = self
        self.is_closed = False
        self.clock = self
        self._handlers: list[tuple[str, Callable[[Any], Any]]] = []

    def now_s(self) -> float:
        return time.time()

    def new_inbox(self) -> str:
        return "_INBOX"

    async def subscribe(self, subject: str, handler: Callable[[Any], Any]) -> "LocalBus":
        self._handlers.append((subject.removesuffix(">"), handler))
        return self

    def on_reconnect(self, _: Callable[[], Any]) -> None:
        """Do nothing: always connected."""

    async def unsubscribe(self) -> None:
        """Do nothing: the bus ends with the test."""

    async def publish(self, subject: str, payload: bytes = b"", **_: Any) -> None:
        for begin, handler in self._handlers:
            if subject == begin or (begin.endswith(".") and subject.startswith(begin)):
                handled = handler(Message(subject, payload))
                if handled is not None:
                    await handled

    async def publish_durable(self, subject: str, payload: bytes, **_: Any) -> int:
        self.stored.append(Message(subject, payload))
        number = len(self.stored)
        await self.publish(subject, payload)
        return number

    async def request(self, subject: str, payload: bytes, **_: Any) -> Message:
        await self.publish_durable(subject, payload)
        return Message("", b"{}")

    async def api(self, call: str, _: Mapping[str, Any] | None = None) -> dict[str, Any]:
        assert call.startswith("STREAM.PURGE.")
        return {}

    async def get_message(
        self, _: str, *, last_by_subj: str = "", next_by_subj: str = "", seq: int = 1
    ) -> dict[str, Any] | None:
        wanted = last_by_subj or next_by_subj
        found = [number for number, one in enumerate(self.stored, 1) if one.subject == wanted and number >= seq]
        if not found:
            return None
        number = found[-1 if last_by_subj else 0]
        return {"seq": number, "data": base64.b64encode(self.stored[number - 1].data)}

    async def delete_message(self, *_: Any) -> bool:
        return True


class LocalWorker(ScriptedWorker):
    """A worker that receives jobs as they are published."""

    async def start(self) -> None:
        await self.bus.subscribe(subjects.control_subject(self.worker_id), self._on_control)
        await self.bus.subscribe(f"{JOBS}>", self._on_job)

    async def _on_job(self, message: Any) -> None:
        await self._on_delivery(Delivery(message.data, message.subject, "ack", 1, 1, 0, 0))

    async def _run(self, attempt: Attempt) -> None:
        try:
            await super()._run(attempt)
        except BaseException as error:  # otherwise the test would wait for the rest
            await attempt.fail("engine_error", f"the script failed: {error!r}", retryable=False)
            raise


class _Keys:
    """A key ring with one key."""

    may_be_old = False

    def __init__(self, who: Principal) -> None:
        self._who = who

    def authenticate(self, token: str) -> Principal | None:
        return self._who if token == LocalGateway.key else None

    def is_revoked(self, _: str) -> bool:
        return False


class _Prices:
    def of(self, *_: Any) -> None:
        return None


class LocalGateway:
    """The gateway of one test."""

    key = "sk-test"

    def __init__(self, bus: LocalBus, app: Any) -> None:
        self.bus: Any = bus
        self.workers: list[LocalWorker] = []
        self._transport = httpx.ASGITransport(app)
        self._http: Any = self.http()

    async def add_worker(self, **rest: Any) -> LocalWorker:
        worker = LocalWorker(self.bus, MODEL, "w1", **rest)
        await worker.start()
        self.workers.append(worker)
        return worker

    def http(self, **headers: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.key}", **headers}
        return httpx.AsyncClient(transport=self._transport, base_url="http://gateway", headers=headers, timeout=HANGS_S)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """Post a body, with the default model unless it names one; return the response."""
        answer: httpx.Response = await self._http.post(path, json={"model": MODEL, **body})
        return answer

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            api_key=self.key, base_url="http://gateway/v1", max_retries=0, http_client=self._http, timeout=HANGS_S
        )

    async def records(self, count: int = 1) -> list[RequestRecord]:
        """Wait for ``count`` request records; return them."""
        found: list[RequestRecord] = []

        def are_there() -> bool:
            stored = [one.data for one in self.bus.stored if one.subject == subjects.REQUEST_USAGE_SUBJECT]
            found[:] = [record for data in stored for record in decode_usage(data) if isinstance(record, RequestRecord)]
            return len(found) >= count

        await until(are_there)
        return found


def card(**changes: Any) -> ModelCard:
    fields = {
        "context_length": 512,
        "chat_template": CHATML,
        "special_tokens": {"bos_token": BOS, "eos_token": EOS},
        "tokenizer_object": objects.tokenizer_object_name(byte_tokenizer_json()),
        **changes,
    }
    return ModelCard(v=PROTOCOL_VERSION, model=MODEL, **fields)


@contextlib.asynccontextmanager
async def local_gateway(
    data_dir: Path, *, model_card: ModelCard | None = None, tokenizer: bytes = b"", **settings: Any
) -> AsyncIterator[LocalGateway]:
    """Start a gateway with these settings, and a model with this card and tokenizer."""
    local = LocalBus()
    bus: Any = local
    await objects.publish_model_card(bus, model_card or card(), tokenizer or byte_tokenizer_json())
    models = {"models": {MODEL: ModelSettings(aliases=("short",))}, "data_dir": data_dir}
    all_settings = gateway_settings(MODEL, **{**models, **settings})
    prices: Any = _Prices()
    keys: Any = _Keys(principal())
    nothing: Any = None
    outboxes = [Outbox(bus, name, 99) for name in (subjects.REQUEST_USAGE_SUBJECT, subjects.INTENT_USAGE_SUBJECT)]
    registry = WorkerRegistry(bus)
    admission_control = AdmissionControl(bus, all_settings, registry)
    series = RequestSeries(prices)
    dispatcher = Dispatcher(bus, all_settings, registry, outboxes[0], intents=outboxes[1], observers=[series])
    await bus.subscribe(f"{subjects.frames_subject(all_settings.gateway_id)}.>", dispatcher._on_step)
    await bus.subscribe(subjects.frames_subject(all_settings.gateway_id), dispatcher._on_step)
    catalog = ModelCatalog(bus, all_settings.models, data_dir, by_messages=all_settings.by_messages)
    await catalog.start()
    quotas = Quotas(bus, all_settings.gateway_id, nothing)
    core = Core(all_settings, keys, catalog, dispatcher, admission_control, quotas, prices)
    refusals = RefusalLog(series, RefusalRecords(outboxes[0].put, all_settings.gateway_id, catalog.known_name))
    edge = Edge(all_settings.timeouts, keys, BodyReader(all_settings.limits, all_settings.timeouts.body_s), refusals)
    payloads = PayloadPublisher(bus, all_settings.payloads)
    operations = make_operations(core, catalog.pool, payloads, nothing)
    services = Services(
        all_settings,
        bus,
        keys,
        catalog,
        core,
        dispatcher,
        admission_control,
        edge.bodies,
        series,
        quotas,
        payloads,
        nothing,
        0,
        (),
    )

    @cache
    def slow() -> FastAPI:
        app = FastAPI()
        app.include_router(models_router(services))
        app.include_router(tokenize_router(services))
        add_error_answers(app, hot)
        return app

    async def serve_slowly(*asgi: Any) -> None:
        await slow()(*asgi)  # created only if needed: it is slower than everything else

    further: Any = serve_slowly

    hot = hot_endpoints(edge, operations, GenerationEndpoint(edge, operations.responses))
    running = [asyncio.create_task(outbox.run()) for outbox in outboxes]
    gateway = LocalGateway(local, GatewayApp(hot, nothing, further, edge.refusals, all_settings.timeouts))
    try:
        yield gateway
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for worker in gateway.workers:
            await asyncio.gather(*worker._tasks)
        await gateway._http.aclose()
        await catalog.close()
