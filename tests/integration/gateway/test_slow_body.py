"""A body that never arrives holds a connection only for a limited time."""

import asyncio
from urllib.parse import urlsplit

import pytest

from tests.integration.gateway.conftest import GatewayUnderTest, Start
from tests.waiting import HANGS_S


async def half_a_request(gateway: GatewayUnderTest, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection with a body that stalls."""
    address = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\n"
    writer.write(head.encode() + b'Content-Length: 100\r\n\r\n{"model":')
    return reader, writer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_a_body_that_does_not_arrive_is_a_408(start_gateway: Start, path: str) -> None:
    gateway = await start_gateway(timeouts={"body_s": 0.2})
    reader, writer = await half_a_request(gateway, path)
    async with asyncio.timeout(HANGS_S):
        answer = await reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer
    writer.close()
    await writer.wait_closed()
