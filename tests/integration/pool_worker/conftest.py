from collections.abc import AsyncIterator

import pytest

from protocol.nats.bus import Bus
from tests.integration.pool_worker.playing_gateway import PlayingGateway


@pytest.fixture
async def gateway(nats_url: str) -> AsyncIterator[PlayingGateway]:
    bus = await Bus.connect(nats_url, name="gateway")
    gateway = PlayingGateway(bus)
    await gateway.start()
    yield gateway
    await bus.close()
