"""A client may repeat a request only after the connection of a killed gateway breaks."""

import asyncio
import contextlib
import json
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator

import pytest

from tests.chaos.load import Load
from tests.chaos.mix import Question

QUESTION = Question(1, "/v1/chat/completions", {"messages": []})
NEVER = float("-inf")
CHOICE = {"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
WHOLE = json.dumps({"choices": [CHOICE], "usage": USAGE}).encode()


class Gateway:
    """Breaks off, or answers as a load balancer does for one that did, and then answers well."""

    def __init__(self) -> None:
        self.first = b""  # what comes before the first connection ends
        self.asked = 0
        self.port = 0

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.asked += 1
            good = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(WHOLE), WHOLE)
            writer.write(self.first if self.asked == 1 else good)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    server = await asyncio.start_server(gateway.serve, "127.0.0.1", 0)
    gateway.port = server.sockets[0].getsockname()[1]
    yield gateway
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"], ids=["cut", "502"])
async def test_only_a_killed_gateway_is_an_excuse(gateway: Gateway, first: bytes) -> None:
    gateway.first = first
    call = await Load(gateway.port, "key", lambda: NEVER).ask(QUESTION)
    assert (call.answer, gateway.asked) == (None, 1)
    assert call.error
    gateway.asked = 0
    call = await Load(gateway.port, "key", time.monotonic).ask(QUESTION)
    assert (call.error, gateway.asked) == (None, 2)
    assert len(call.replies) == 2


async def test_what_a_gateway_itself_refuses_is_never_excused(gateway: Gateway) -> None:
    gateway.first = b"HTTP/1.1 503 Service Unavailable\r\nx-request-id: req_1\r\ncontent-length: 0\r\n\r\n"
    call = await Load(gateway.port, "key", time.monotonic).ask(QUESTION)
    assert (call.answer, gateway.asked) == (None, 1)
