"""Receivers of webhooks on loopback, and what delivers to them: real sockets, queue server and databases."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import create_engine
from ledger.settings import LedgerSettings
from ledger.webhooks import main
from ledger.webhooks.endpoints import Endpoints
from ledger.webhooks.secrets import SecretBox
from ledger.webhooks.settings import WebhookSettings
from protocol.nats import topology
from protocol.nats.bus import Bus
from tests.forks import Process
from tests.integration.ledger.webhooks.ledger_process import start_ledger_process
from tests.waiting import HANGS_S

PEPPER = SecretStr("pepper" * 8)
TEAM = "team_default"
ACTOR = "cli:test"
# A time after which tests' retries come; none of them judges it.
SOON_S = 0.05


def settings(**changes: Any) -> WebhookSettings:
    values = {
        "allowed_networks": ["127.0.0.0/8", "::1/128"],
        "allow_http": True,
        "retries_s": [SOON_S] * 5,
        "poll_s": 0.05,
        "lease_s": 0.5,
        "budget_check_s": 0.1,
        "state_s": 0.05,
    }
    return WebhookSettings.model_validate({**values, **changes})


@dataclass
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Receiver:
    """A server that keeps what it gets, and answers by ``answer``: raw bytes, or an awaitable of such."""

    received: list[Received] = field(default_factory=list)
    answer: Callable[[Received], bytes | Awaitable[bytes]] = lambda _request: status(200)
    connections: int = 0
    server_names: list[str | None] = field(default_factory=list)
    port: int = 0
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/hook?a=b"

    def ids(self) -> list[str]:
        return [request.headers["webhook-id"] for request in self.received]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            request = Received(head[0].split()[1], headers, body)
            self.received.append(request)
            answer = self.answer(request)
            writer.write(answer if isinstance(answer, bytes) else await answer)
            await writer.drain()
        except (OSError, EOFError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def status(code: int, headers: str = "", body: bytes = b"") -> bytes:
    return f"HTTP/1.1 {code} x\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


StartReceiver = Callable[..., Awaitable[Receiver]]


@pytest.fixture
async def start_receiver() -> AsyncIterator[StartReceiver]:
    async with contextlib.AsyncExitStack() as stack:

        async def start(tls: ssl.SSLContext | None = None) -> Receiver:
            receiver = Receiver(scheme="http" if tls is None else "https")
            if tls is not None:
                tls.sni_callback = lambda _socket, name, _context: receiver.server_names.append(name)
            server = await asyncio.start_server(receiver.handle, "127.0.0.1", 0, ssl=tls)
            stack.callback(server.close)
            receiver.port = server.sockets[0].getsockname()[1]
            return receiver

        yield start


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="test")
    await topology.apply(bus, [], topology.QueueBounds(), limit_s=HANGS_S)
    yield bus
    await bus.close()


def endpoints_of(engine: AsyncEngine, chosen: WebhookSettings | None = None) -> Endpoints:
    return Endpoints(engine, chosen or settings(), SecretBox(PEPPER))


Run = Callable[..., contextlib.AbstractAsyncContextManager[None]]


@pytest.fixture
def running(bus: Bus, engine: AsyncEngine) -> Run:
    """Webhooks that run in this process, as beside the ledger writer."""

    @contextlib.asynccontextmanager
    async def run(**changes: Any) -> AsyncIterator[None]:
        stopping = asyncio.Event()
        task = asyncio.create_task(main.run(bus, engine, stopping, settings(**changes), PEPPER))
        try:
            yield
        finally:
            stopping.set()
            await task

    return run


@pytest.fixture
def start_ledger(nats_url: str, database_url: str, tmp_path: Path):
    with contextlib.ExitStack() as stack:

        def start(chosen: WebhookSettings) -> Process:
            settings = LedgerSettings(nats_urls=(nats_url,), database_url=database_url)
            ledger = start_ledger_process(tmp_path / "ledger.log", settings, chosen, PEPPER)
            stack.callback(ledger.kill)
            return ledger

        yield partial(start)
