"""Two gateways on the queue server's shipped configuration, behind the load balancer's."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start, restart
from tests.shipped import HAProxy, ShippedNats, haproxy_program
from tests.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
CHECK_PERIOD = "50ms"
SHIPPED_MEMORY_BYTES = 10**9  # what one set of the memory streams may reserve: half of what the file allows
DURING = 10  # requests in each part of an outage

needs_haproxy = pytest.mark.skipif(not Path(haproxy_program()).exists(), reason="haproxy is not installed")


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[ShippedNats]:
    folder = tmp_path / "nats-server"
    folder.mkdir()
    server = ShippedNats(folder)
    server.start()
    yield server
    server.stop()


async def answer(client: openai.AsyncOpenAI) -> str | None:
    done = await client.chat.completions.create(model=MODEL, messages=HELLO)
    return done.choices[0].message.content


async def test_two_gateways_restarts_and_reconnects_fit(
    start_gateway: Start, nats_server: ShippedNats, bus: Bus
) -> None:
    one, two = await start_gateway(), await start_gateway()
    await two.end()
    three = await start_gateway()
    clients = one.client(), three.client()
    asking = [asyncio.create_task(answer(client)) for client in clients]
    await until(lambda: hold([one, three], len(asking)))
    await restart(nats_server, bus)  # what lay in memory is gone, and both make it again at once
    await one.add_worker()
    assert all(await asyncio.gather(*asking))
    assert (await bus.api("INFO"))["reserved_memory"] < SHIPPED_MEMORY_BYTES


@pytest.fixture
async def behind_haproxy(start_gateway: Start, tmp_path: Path) -> AsyncIterator[tuple[HAProxy, list[GatewayUnderTest]]]:
    gateways = [await start_gateway(), await start_gateway()]
    haproxy = HAProxy(tmp_path, [gateway.port for gateway in gateways], CHECK_PERIOD)
    try:
        await haproxy.start()
        yield haproxy, gateways
    finally:
        await haproxy.stop()


@needs_haproxy
async def test_an_outage_of_the_queue_is_a_wait(
    behind_haproxy: tuple[HAProxy, list[GatewayUnderTest]], nats_server: ShippedNats
) -> None:
    """Also once the load balancer has seen that no gateway has the queue, and when it has come back."""
    haproxy, gateways = behind_haproxy
    await gateways[0].add_worker()
    client = gateways[0].client(base_url=f"http://127.0.0.1:{haproxy.port}/v1", timeout=120.0)
    assert await answer(client)
    nats_server.kill()
    said = len(haproxy.log())
    asking = [asyncio.create_task(answer(client)) for _ in range(DURING)]
    for name in ("gateway-1", "gateway-2"):
        await until(partial(has_said, haproxy, f"gateways-in-health/{name} is DOWN", said))
    asking += [asyncio.create_task(answer(client)) for _ in range(DURING)]
    await until(lambda: hold(gateways, 2 * DURING))
    said = len(haproxy.log())
    nats_server.start()
    assert all(await asyncio.gather(*asking))
    for name in ("gateway-1", "gateway-2"):
        await until(partial(has_said, haproxy, f"gateways-in-health/{name} is UP", said))
    assert await answer(client)


def has_said(haproxy: HAProxy, line: str, since: int) -> bool:
    return line in haproxy.log()[since:]


async def hold(gateways: list[GatewayUnderTest], count: int) -> bool:
    async with httpx.AsyncClient() as client:
        ready = [(await client.get(f"{gateway.url}/readyz")).json() for gateway in gateways]
    return bool(sum(one["in_flight"] for one in ready) == count)
