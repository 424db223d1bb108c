"""A gateway whose model makes vectors."""

import pytest

from tests.integration.gateway.conftest import GatewayUnderTest, Start
from tests.integration.gateway.pooling.inputs import EMBEDDER, embed, start_with


@pytest.fixture
async def gateway(start_gateway: Start) -> GatewayUnderTest:
    gateway = await start_with(start_gateway, EMBEDDER)
    await gateway.add_worker(script=embed)
    return gateway
