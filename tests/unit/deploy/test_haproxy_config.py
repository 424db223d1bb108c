"""deploy/haproxy/haproxy.cfg, run by a real HAProxy where one is installed (`apt-get install haproxy`)."""

import asyncio
import contextlib
import json
import re
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.ports import free_port
from db.accounts.token import new_token
from tests.certificates import certified
from tests.shipped import HAPROXY_CONFIG, HAProxy, haproxy_program
from tests.unit.deploy.description import services
from tests.waiting import HANGS_S

CHECK_PERIOD = "20ms"
MANY = 12  # requests in a row, among which each gateway that is in question would have had some

needs_haproxy = pytest.mark.skipif(not Path(haproxy_program()).exists(), reason="haproxy is not installed")


def test_servers_are_the_gateways_of_the_compose_file() -> None:
    text = HAPROXY_CONFIG.read_text()
    for name in ("gateway-1", "gateway-2"):
        assert name in services()
        assert text.count(f"server {name} {name}:8000") == 3  # in health, not shutting down, listening
    assert "bind 127.0.0.1:8404" in text
    assert "http://127.0.0.1:8404/ready" in services()["load-balancer"]["healthcheck"]["test"]


def test_no_token_waits_for_the_next_one() -> None:
    """Without it the median first token of a stream came 200 ms later; a delay is nothing that a test can judge."""
    defaults = HAPROXY_CONFIG.read_text().partition("\ndefaults\n")[2].partition("\nresolvers ")[0]
    assert "\n    option http-no-delay\n" in defaults


class Gateway:
    """A fake gateway: streams one event, stays silent, and notices when its client disconnects."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status = "ok"  # as GET /readyz says it
        self.caller_gone = asyncio.Event()
        self.last_head = ""
        self.port = 0

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        # HAProxy may end a check before it has asked. Python 3.11.2 then leaves the connection open.
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._answer(reader, writer)

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if not head.startswith("GET /readyz"):
            self.last_head = head
        if head.startswith("GET /readyz"):
            code = "503 Service Unavailable" if self.status == "leaving" else "200 OK"
            write_answer(writer, code, json.dumps({"status": self.status}, separators=(",", ":")))
        elif not head.startswith(("GET /stream", "GET /silent")):
            write_answer(writer, "200 OK", self.name)
        else:
            if head.startswith("GET /stream"):
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                writer.write(b"9\r\ndata: 1\n\n\r\n")
            await writer.drain()
            with contextlib.suppress(ConnectionResetError):  # HAProxy resets where the response was cut short
                await reader.read()  # until the other side closes
            self.caller_gone.set()


def write_answer(writer: StreamWriter, status: str, body: str) -> None:
    writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())


@asynccontextmanager
async def running_gateway(name: str = "one") -> AsyncIterator[Gateway]:
    gateway = Gateway(name)
    server = await asyncio.start_server(gateway.serve, "127.0.0.1", 0)
    gateway.port = server.sockets[0].getsockname()[1]
    yield gateway
    server.close()
    await server.wait_closed()


@asynccontextmanager
async def running_haproxy(folder: Path, *gateway_ports: int) -> AsyncIterator[HAProxy]:
    """HAProxy with the real configuration in front of these."""
    haproxy = HAProxy(folder, gateway_ports, CHECK_PERIOD)
    try:
        await haproxy.start()
        yield haproxy
    finally:
        await haproxy.stop()


async def ask(
    port: int,
    path: str,
    header: str = "accept: */*",
    address: str = "127.0.0.1",
    tls: ssl.SSLContext | None = None,
) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0), ssl=tls)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n{header}\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def until_answered_by(haproxy: HAProxy, names: set[str]) -> None:
    """Wait until this many requests in a row were answered only by these gateways; no request may fail."""
    answered: list[str] = []
    while set(answered[-MANY:]) != names or len(answered) < MANY:
        head, _, body = (await ask(haproxy.port, "/name")).partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], head
        answered.append(body.decode())
        await asyncio.sleep(0.005)


@needs_haproxy
@pytest.mark.parametrize("path", ["/stream", "/silent"], ids=["while streaming", "before the first byte"])
@pytest.mark.servers
async def test_streams_pass_at_once_and_a_leaving_caller_is_reported(tmp_path: Path, path: str) -> None:
    async with (
        running_gateway() as gateway,
        running_haproxy(tmp_path, gateway.port) as haproxy,
        asyncio.timeout(HANGS_S),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", haproxy.port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        if path == "/stream":
            await reader.readuntil(b"data: 1\n\n")  # the response is not over, yet its first event is here
        writer.close()
        await writer.wait_closed()
        await gateway.caller_gone.wait()


@needs_haproxy
@pytest.mark.servers
async def test_a_key_in_a_url_is_not_logged(tmp_path: Path) -> None:
    token, coded = new_token(), new_token().replace("-", "%2D")
    async with (
        running_gateway() as gateway,
        running_haproxy(tmp_path, gateway.port) as haproxy,
        asyncio.timeout(HANGS_S),
    ):
        for path in (f"/v1/models/{token}?a={token}", f"/v1/keys/{coded}/rotate", f"/name?a={token}"):
            await ask(haproxy.port, path)
        while "GET /name" not in haproxy.log():
            await asyncio.sleep(0.01)
    log = haproxy.log()
    assert "GET /v1/models/sk-***\n" in log
    assert "GET /v1/keys/sk-***/rotate\n" in log
    assert "GET /name\n" in log
    assert token not in log
    assert coded not in log


@needs_haproxy
@pytest.mark.servers
async def test_no_gateway_is_an_error_in_the_shape_of_openai(tmp_path: Path) -> None:
    async with running_haproxy(tmp_path, free_port()) as haproxy, asyncio.timeout(HANGS_S):
        while await haproxy.health() != 503:
            await asyncio.sleep(0.01)
        head, _, body = (await ask(haproxy.port, "/v1/models")).partition(b"\r\n\r\n")
        assert b" 503 " in head.splitlines()[0]
        assert b"retry-after: " in head.lower()
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@needs_haproxy
@pytest.mark.servers
async def test_a_degraded_gateway_comes_second_and_a_leaving_one_gets_nothing(tmp_path: Path) -> None:
    async with (
        running_gateway("one") as one,
        running_gateway("two") as two,
        running_haproxy(tmp_path, one.port, two.port) as haproxy,
        asyncio.timeout(HANGS_S),
    ):
        await until_answered_by(haproxy, {"one", "two"})
        one.status = "degraded"
        await until_answered_by(haproxy, {"two"})
        two.status = "degraded"
        await until_answered_by(haproxy, {"one", "two"})
        one.status = "leaving"
        await until_answered_by(haproxy, {"two"})
        assert await haproxy.health() == 200


@needs_haproxy
@pytest.mark.servers
async def test_gateways_that_fail_all_checks_are_asked_as_long_as_they_listen(tmp_path: Path) -> None:
    """Overloaded gateways answer their checks late. A late answer is better than an error."""
    async with (
        running_gateway("one") as one,
        running_gateway("two") as two,
        running_haproxy(tmp_path, one.port, two.port) as haproxy,
        asyncio.timeout(HANGS_S),
    ):
        one.status = two.status = "leaving"
        while await haproxy.health() != 503:
            await asyncio.sleep(0.01)
        await until_answered_by(haproxy, {"one", "two"})


PAGES = ["/admin/v1/keys", "/dashboard", "/dashboard/live", "/login", "/login/oidc/callback?code=1", "/logout"]
DISGUISED = ["/%61dmin/v1/keys", "/l%6fgin", "http://x/dashboard"]


@needs_haproxy
@pytest.mark.servers
async def test_the_pages_are_not_where_the_api_is(tmp_path: Path) -> None:
    async with (
        running_gateway() as gateway,
        running_haproxy(tmp_path, gateway.port) as haproxy,
        asyncio.timeout(HANGS_S),
    ):
        for path in (*PAGES, *DISGUISED):
            head, _, body = (await ask(haproxy.port, path)).partition(b"\r\n\r\n")
            assert b" 404 " in head.splitlines()[0], path
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
            assert (await ask(haproxy.pages_port, path)).endswith(b"one")
        for path in ("/v1/chat/completions", "/v1/models", "/livez", "/"):
            assert (await ask(haproxy.port, path)).endswith(b"one")
            assert (await ask(haproxy.pages_port, path)).endswith(b"one")


@needs_haproxy
@pytest.mark.servers
async def test_only_a_named_proxy_says_whom_a_request_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRONT_PROXY", "127.0.0.8")
    claims = "x-forwarded-for: 192.0.2.1\r\nx-forwarded-proto: https"
    async with (
        running_gateway() as gateway,
        running_haproxy(tmp_path, gateway.port) as haproxy,
        asyncio.timeout(HANGS_S),
    ):
        for port in (haproxy.port, haproxy.pages_port):
            await ask(port, "/name", claims, address="127.0.0.9")
            assert forwarded(gateway, "for") == ["127.0.0.9"]
            assert forwarded(gateway, "proto") == ["http"]
            await ask(port, "/name", claims, address="127.0.0.8")
            assert forwarded(gateway, "for") == ["192.0.2.1", "127.0.0.8"]
            assert forwarded(gateway, "proto") == ["https"]


@needs_haproxy
@pytest.mark.servers
async def test_tls_is_there_where_a_certificate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certified(tmp_path, "127.0.0.1")
    monkeypatch.setenv("TLS_CERTIFICATE", str(tmp_path / "127.0.0.1.pem"))
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    async with (
        running_gateway() as gateway,
        running_haproxy(tmp_path, gateway.port) as haproxy,
        asyncio.timeout(HANGS_S),
    ):
        for port in (haproxy.tls_port, haproxy.pages_tls_port):
            assert (await ask(port, "/name", "x-forwarded-proto: http", tls=trusting)).endswith(b"one")
            assert forwarded(gateway, "proto") == ["https"]
        head, _, _ = (await ask(haproxy.tls_port, "/login", tls=trusting)).partition(b"\r\n\r\n")
        assert b" 404 " in head.splitlines()[0]
        await ask(haproxy.port, "/name", "x-forwarded-proto: https")
        assert forwarded(gateway, "proto") == ["http"]


def forwarded(gateway: Gateway, what: str) -> list[str]:
    """Return the ``X-Forwarded-…`` headers that a gateway receives."""
    return re.findall(rf"^x-forwarded-{what}: (.*?)\r$", gateway.last_head, re.MULTILINE | re.IGNORECASE)
