"""Direct connections to the gateway, and their limits."""

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import psutil
import pytest

from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, until_cancelled
from tests.waiting import HANGS_S, until

LIVE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Send bytes. Raises ConnectionError."""
        if self.writer.is_closing():  # uvloop would raise a different error
            raise ConnectionError("the connection is closed")
        self.writer.write(data)
        await self.writer.drain()

    async def send_again(self, data: bytes) -> None:
        """Send the same bytes repeatedly, while they are accepted. Raises ConnectionError."""
        async with asyncio.timeout(HANGS_S):
            while True:
                await self.send(data)
                await asyncio.sleep(0.001)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return the next complete answer, without interim responses."""
        async with asyncio.timeout(HANGS_S):
            while True:
                head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                status = int(head[0].split()[1])
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                if status >= 200:
                    break
            if "content-length" in headers:
                return status, headers, await self.reader.readexactly(int(headers["content-length"]))
            body = b""
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
            return status, headers, body

    async def rest(self) -> bytes:
        """Return everything until the gateway closes the connection."""
        async with asyncio.timeout(HANGS_S):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def refusal(self) -> tuple[int, str | None]:
        """Return status and code of an error that closes the connection."""
        status, headers, body = await self.answer()
        assert headers["connection"] == "close"
        assert await self.rest() == b""
        return status, json.loads(body)["error"]["code"]


@asynccontextmanager
async def connect(gateway: GatewayUnderTest) -> AsyncIterator[Client]:
    address = urlsplit(gateway.url)
    client = Client(*await asyncio.open_connection(address.hostname, address.port))
    try:
        yield client
    finally:
        client.writer.transport.abort()


def chat(gateway: GatewayUnderTest, **fields: Any) -> bytes:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def hello(attempt: Attempt) -> None:
    await attempt.accept()
    await attempt.tokens("Hello")
    await attempt.tokens("!", finish_reason="stop")
    await attempt.finish()


# --- idle connections -------------------------------------------------------------------------------------------------


async def test_a_request_in_the_socket_of_an_idle_connection_is_answered(start_gateway: Start) -> None:
    """The loop was busy: when the timer fires, an unread request is in the socket."""
    gateway = await start_gateway(connections={"keep_alive_s": 1.0})
    async with connect(gateway) as client:
        await client.send(LIVE)
        assert (await client.answer())[0] == 200
        os.write(client.writer.get_extra_info("socket").fileno(), LIVE)
        time.sleep(1.5)  # noqa: ASYNC251
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""  # idle: a clean close


# --- heads ------------------------------------------------------------------------------------------------------------


async def test_the_head_has_a_size_limit(start_gateway: Start) -> None:
    gateway = await start_gateway(connections={"max_head_bytes": 10_000, "max_headers": 50})
    heads = {
        "one piece": b"GET /livez HTTP/1.1\r\nHost: x\r\nX: %b\r\n\r\n" % (b"x" * 10_000),
        "a long path": b"GET /livez?%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"x" * 10_000),
        "many headers": b"GET /livez HTTP/1.1\r\nHost: x\r\n%b\r\n" % (b"X: x\r\n" * 50),
    }
    for head in heads.values():
        async with connect(gateway) as client:
            await client.send(head)
            assert await client.refusal() == (431, "head_too_large")
    async with connect(gateway) as client:  # one that never ends
        await client.send(b"GET /livez HTTP/1.1\r\nHost: x\r\nX: ")
        with pytest.raises(ConnectionError):
            await client.send_again(b"x" * 1000)
    async with connect(gateway) as client:  # other connections are unaffected, also with much data in one read
        body = b"x" * 30_000
        long = b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        await client.send(long + LIVE[:20])
        assert (await client.answer())[0] == 405
        await client.send(LIVE[20:])
        assert (await client.answer())[0] == 200


async def test_trailers_are_dropped(share_gateway: Share) -> None:
    gateway = await share_gateway()
    async with connect(gateway) as client:
        chunked = b"POST /livez HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
        await client.send(chunked + b"X: y\r\n" * 10_000 + b"\r\n")
        assert (await client.answer())[0] == 405
        await client.send(LIVE)
        assert (await client.answer())[0] == 200


async def test_the_head_has_a_time_limit(start_gateway: Start) -> None:
    gateway = await start_gateway(connections={"head_s": 0.3})
    async with connect(gateway) as half, connect(gateway) as silent, connect(gateway) as empty_lines:
        await half.send(LIVE[:20])
        assert await half.refusal() == (408, "request_timeout")
        assert await silent.rest() == b""
        with pytest.raises(ConnectionError):
            await empty_lines.send_again(b"\r\n")
    async with connect(gateway) as later:
        await later.send(LIVE)
        assert (await later.answer())[0] == 200
        await later.send(LIVE[:20])
        assert await later.refusal() == (408, "request_timeout")
    async with connect(gateway) as refused:  # a discarded body is not read forever
        await refused.send(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nx")
        assert (await refused.answer())[0] == 404
        assert await refused.rest() == b""


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + 2 * b"Transfer-Encoding: chunked\r\n" + b"\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Api-Key: a\r\nX-Api-Key: b\r\n\r\n",
        b"GET /livez\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
)
async def test_ambiguous_requests_are_refused(share_gateway: Share, head: bytes) -> None:
    gateway = await share_gateway()
    async with connect(gateway) as client:
        await client.send(head)
        assert await client.refusal() == (400, "malformed_http")


# --- HTTP/1.0 ---------------------------------------------------------------------------------------------------------


def as_http_1_0(request: bytes, *headers: bytes) -> bytes:
    return request.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n" + b"".join(header + b"\r\n" for header in headers), 1)


async def says_much(attempt: Attempt) -> None:
    await attempt.accept()
    for _ in range(40):
        await attempt.tokens("x" * 10_000)
    await attempt.tokens("!", finish_reason="stop")
    await attempt.finish()


@pytest.mark.parametrize("headers", [(), (b"Connection: keep-alive",), (b"Expect: 100-continue",)])
@pytest.mark.parametrize("script", [hello, says_much])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_to_http_1_0_has_no_chunks_and_ends_with_the_connection(
    share_gateway: Share, stream: bool, script: Any, headers: tuple[bytes, ...]
) -> None:
    gateway = await share_gateway()
    await gateway.add_worker(script=script)
    async with connect(gateway) as client:
        await client.send(as_http_1_0(chat(gateway, stream=stream, max_tokens=200), *headers))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head.split(b"\r\n")
    if stream:
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
        assert all(line.startswith((b"data: ", b": ")) for line in body.split(b"\n") if line)
    else:
        assert json.loads(body)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [b"/livez", b"/v1/models", b"/nowhere", b"/metrics", b"/docs", b"/openapi.json"])
async def test_so_has_each_other_page(share_gateway: Share, path: bytes) -> None:
    gateway = await share_gateway(console={})
    async with connect(gateway) as client:
        await client.send(b"GET %b HTTP/1.0\r\n\r\n" % path)
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head.split(b"\r\n")
    [length] = [int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")] or [
        len(body)
    ]
    assert len(body) == length > 0


async def test_an_aborted_http_1_0_stream_does_not_end_cleanly(share_gateway: Share) -> None:
    gateway = await share_gateway()
    has_begun = asyncio.Event()

    async def breaks(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("Hel")
        await has_begun.wait()
        await attempt.fail("internal_error", "no", retryable=False)

    await gateway.add_worker(script=breaks)
    address = urlsplit(gateway.url)
    # Without uvloop's streams: they take a reset that comes right behind data for an end.
    with socket.create_connection((address.hostname, address.port)) as client:
        client.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(client, as_http_1_0(chat(gateway, stream=True)))
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(_read_all(client, has_begun), HANGS_S)


async def _read_all(client: socket.socket, has_begun: asyncio.Event) -> None:
    while await asyncio.get_running_loop().sock_recv(client, 65_536):
        has_begun.set()


# --- how many ---------------------------------------------------------------------------------------------------------


async def test_connections_are_counted(start_gateway: Start) -> None:
    bounds = {"max_per_address": 2, "trusted_proxies": ("192.0.2.1",)}  # this client is not a proxy
    gateway = await start_gateway(with_card=False, connections=bounds)
    async with connect(gateway) as first, connect(gateway), connect(gateway) as third:
        assert await third.refusal() == (429, "too_many_connections")
        await first.send(LIVE)
        assert (await first.answer())[0] == 200

    async def is_let_in() -> bool:
        async with connect(gateway) as later:
            await later.send(LIVE)
            return (await later.answer())[0] == 200

    await until(is_let_in)


async def test_trusted_proxies_have_no_limit_per_address(start_gateway: Start) -> None:
    gateway = await start_gateway(with_card=False, connections={"max_per_address": 1, "max_total": 2})
    async with connect(gateway) as idle, connect(gateway) as busy, connect(gateway) as refused:
        assert await refused.refusal() == (503, "overloaded")
        await idle.send(LIVE)
        assert (await idle.answer())[0] == 200
        async with connect(gateway) as new:  # replaces the idle connection
            await new.send(LIVE)
            assert (await new.answer())[0] == 200
            assert await idle.rest() == b""
            await busy.send(LIVE)
            assert (await busy.answer())[0] == 200


# --- clients that leave, and those that do not ------------------------------------------------------------------------


async def test_disconnecting_with_a_pipelined_request(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker(script=until_cancelled)
    async with connect(gateway) as client:
        await client.send(chat(gateway) + LIVE)
        await until(lambda: worker.attempts and worker.attempts[0].made_tokens > 3)
    [record] = await gateway.records()
    assert record.outcome == "cancelled"
    assert worker.attempts[0].cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_half_closed_connection_is_answered(share_gateway: Share, stream: bool) -> None:
    gateway = await share_gateway(timeouts={"headers_grace_s": 20})
    may_begin = asyncio.Event()

    async def late(attempt: Attempt) -> None:
        await may_begin.wait()
        await hello(attempt)

    worker = await gateway.add_worker(script=late)
    async with connect(gateway) as client:
        await client.send(chat(gateway, stream=stream) + LIVE)
        client.writer.write_eof()
        await until(lambda: worker.attempts)
        assert b"100 Continue" in await client.reader.readuntil(b"\r\n\r\n")
        may_begin.set()
        status, _, body = await client.answer()
        assert status == 200
        assert b"Hello" in body
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""
    [record] = await gateway.records()
    assert record.outcome == "ok"


async def test_half_closing_and_then_disconnecting(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker(script=until_cancelled)
    async with connect(gateway) as client:
        await client.send(chat(gateway))
        client.writer.write_eof()
        await until(lambda: worker.attempts and worker.attempts[0].made_tokens > 3)
        assert not worker.attempts[0].cancelled.is_set()
    [record] = await gateway.records()
    assert record.outcome == "cancelled"


async def test_a_bad_second_request_does_not_spoil_the_first_answer(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker(script=hello)
    async with connect(gateway) as client:
        await client.send(chat(gateway, stream=True) + b"GET /livez HTTP/1.1\r\n\r\n")
        status, _, body = await client.answer()
        assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert await client.rest() == b""


async def test_pipelined_requests_are_limited(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker(script=hello)
    async with connect(gateway) as client:
        await client.send(chat(gateway) + LIVE * 1000)
        whole = await client.rest()
        assert 1 < whole.count(b"HTTP/1.1 200") <= 102


UPGRADE = LIVE.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")


@pytest.mark.parametrize("piece_bytes", [1, 7, len(UPGRADE), len(UPGRADE) + 1, 10_000])
async def test_requests_after_an_upgrade_request_are_answered(share_gateway: Share, piece_bytes: int) -> None:
    gateway = await share_gateway()
    sent = UPGRADE + UPGRADE + LIVE
    async with connect(gateway) as client:
        for start in range(0, len(sent), piece_bytes):
            await client.send(sent[start : start + piece_bytes])
        for _ in range(3):
            assert (await client.answer())[0] == 200


MANY = 60  # documents: more than the socket buffers hold


async def small_window(gateway: GatewayUnderTest) -> Client:
    """Return a client with a small receive window."""
    address = urlsplit(gateway.url)
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.setblocking(False)
    await asyncio.get_running_loop().sock_connect(wire, (address.hostname, address.port))
    return Client(*await asyncio.open_connection(sock=wire, limit=1024))


def is_gone(peer: Any) -> bool:
    return peer not in {found.raddr for found in psutil.Process().net_connections("tcp")}


async def test_unread_answers_are_dropped_after_a_timeout(start_gateway: Start) -> None:
    gateway = await start_gateway(connections={"keep_alive_s": 0.3}, timeouts={"unread_s": 0.2}, console={})
    many = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * MANY
    body = json.dumps({"model": MODEL, "prompt": "x" * 2_000_000}).encode()
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\nConnection: close\r\n"
    one = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body

    for requests in (many, one):
        client = await small_window(gateway)
        await client.send(requests)
        cast("asyncio.Transport", client.writer.transport).pause_reading()
        mine = client.writer.get_extra_info("sockname")
        await until(partial(is_gone, mine))
        client.writer.transport.abort()


# --- what is left of them ---------------------------------------------------------------------------------------------


def refusals(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name == "gateway.telemetry.refusals"]  # type: ignore[attr-defined]


async def test_every_refusal_leaves_a_line(start_gateway: Start, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await start_gateway()
    caplog.set_level(logging.INFO, "gateway.telemetry.refusals")
    asked: list[tuple[bytes, str, str]] = [
        (b"GET / HTTP/1.1\r\n\r\n", "malformed_http", "http"),
        (b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n", "unknown_url", "other"),
        (chat(gateway, model="nobody"), "model_not_found", "chat.completions"),
        (chat(gateway, n=0), "invalid_value", "chat.completions"),
    ]
    for request, _, _ in asked:
        async with connect(gateway) as client:
            await client.send(request)
            await client.answer()
    await until(lambda: len(refusals(caplog)) == len(asked))
    assert [(line["reason"], line["endpoint"]) for line in refusals(caplog)] == [(code, end) for _, code, end in asked]
    assert all(line["count"] == 1 and line["client"] == "127.0.0.1" for line in refusals(caplog))
    caplog.clear()
    async with connect(gateway) as client:
        await client.send(chat(gateway)[:-5])
    await until(lambda: [line["reason"] for line in refusals(caplog)] == ["client_left"])


async def test_a_flood_of_refusals_is_a_few_lines(start_gateway: Start, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await start_gateway(with_card=False)
    caplog.set_level(logging.INFO, "gateway.telemetry.refusals")
    async with connect(gateway) as client:
        for _ in range(200):
            await client.send(b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await client.answer())[0] == 404

    def told() -> int:
        return sum(line.get("more", 1) for line in refusals(caplog))

    await until(lambda: told() == 200)
    assert refusals(caplog)[-1]["count"] == 200
    assert any("more" in line for line in refusals(caplog))


async def test_a_stopping_gateway_closes_connections_after_the_next_answer(start_gateway: Start) -> None:
    gateway = await start_gateway(timeouts={"shutdown_s": 20})
    worker = await gateway.add_worker(script=until_cancelled)
    async with connect(gateway) as busy, connect(gateway) as idle:
        await busy.send(chat(gateway))
        await until(lambda: worker.attempts)
        await idle.send(LIVE)
        assert "connection" not in (await idle.answer())[1]
        gateway.stop.set()
        await asyncio.sleep(0)

        await idle.send(LIVE)
        status, headers, _ = await idle.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await idle.rest() == b""
