"""A body that never arrives holds a connection for a while, not for ever."""

import asyncio
from urllib.parse import urlsplit

from tests.integration.gateway.conftest import Start


async def test_a_body_that_does_not_arrive_is_a_408(start_gateway: Start) -> None:
    gateway = await start_gateway(timeouts={"body_s": 0.2})
    address = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\n"
    writer.write(head.encode() + b'Content-Length: 100\r\n\r\n{"model":')
    async with asyncio.timeout(20):
        answer = await reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer
    writer.close()
    await writer.wait_closed()
