"""deploy/haproxy/haproxy.cfg, run by a real HAProxy where one is installed (`apt-get install haproxy`)."""

import asyncio
import contextlib
import json
import shutil
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.nats_server import free_port
from tests.unit.deploy.description import ROOT, services

CONFIG = ROOT / "deploy/haproxy/haproxy.cfg"
LIMIT_S = 15.0

needs_haproxy = pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")


def test_servers_are_the_gateways_of_the_compose_file() -> None:
    text = CONFIG.read_text()
    for name in ("gateway-1", "gateway-2"):
        assert name in services()
        assert f"server {name} {name}:8000" in text
    assert "bind 127.0.0.1:8404" in text
    assert "http://127.0.0.1:8404/ready" in services()["load-balancer"]["healthcheck"]["test"]


class Gateway:
    """Stands in for a gateway: ready, streams one event and then falls silent, and notices when its caller has gone."""

    def __init__(self) -> None:
        self.caller_gone = asyncio.Event()
        self.port = 0

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET /readyz"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        elif head.startswith("GET /stream"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"9\r\ndata: 1\n\n\r\n")
        if not head.startswith("GET /readyz"):
            await writer.drain()
            with contextlib.suppress(ConnectionResetError):  # HAProxy resets where the response was cut short
                await reader.read()  # until the other side closes
            self.caller_gone.set()
        writer.close()


@asynccontextmanager
async def running_gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    server = await asyncio.start_server(gateway.serve, "127.0.0.1", 0)
    gateway.port = server.sockets[0].getsockname()[1]
    yield gateway
    server.close()
    await server.wait_closed()


@asynccontextmanager
async def running_haproxy(folder: Path, gateway_port: int) -> AsyncIterator[int]:
    """HAProxy with the real configuration in front of one stand-in; the other gateway is down. Yields the port."""
    port, health_port, text = free_port(), free_port(), CONFIG.read_text()
    for theirs, ours in (
        ("bind :8000", f"bind 127.0.0.1:{port}"),
        ("bind 127.0.0.1:8404", f"bind 127.0.0.1:{health_port}"),
        ("gateway-1:8000", f"127.0.0.1:{gateway_port}"),
        ("gateway-2:8000", f"127.0.0.1:{free_port()}"),
        ("    parse-resolv-conf\n", ""),  # addresses need no name server
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    config = folder / "haproxy.cfg"
    config.write_text(text)
    # -n: fewer connections than in production, so that any machine's limit on open files will do.
    process = await asyncio.create_subprocess_exec("haproxy", "-n", "100", "-db", "-f", str(config))
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await is_healthy(health_port):
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def is_healthy(port: int) -> bool:
    """Whether HAProxy's own health page answers at all: 200, or 503 while no gateway is up."""
    try:
        return (await ask(port, "/ready")).startswith(b"HTTP/1.")
    except OSError:
        return False


async def ask(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@needs_haproxy
@pytest.mark.parametrize("path", ["/stream", "/silent"], ids=["while streaming", "before the first byte"])
async def test_streams_pass_at_once_and_a_leaving_caller_is_reported(tmp_path: Path, path: str) -> None:
    async with running_gateway() as gateway, running_haproxy(tmp_path, gateway.port) as port, asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        if path == "/stream":
            await reader.readuntil(b"data: 1\n\n")  # the response is not over, yet its first event is here
        writer.close()
        await writer.wait_closed()
        await gateway.caller_gone.wait()


@needs_haproxy
async def test_no_gateway_is_an_error_in_the_shape_of_openai(tmp_path: Path) -> None:
    async with running_haproxy(tmp_path, free_port()) as port, asyncio.timeout(LIMIT_S):
        head, _, body = (await ask(port, "/v1/models")).partition(b"\r\n\r\n")
        assert b" 503 " in head.splitlines()[0]
        assert b"retry-after: " in head.lower()
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
