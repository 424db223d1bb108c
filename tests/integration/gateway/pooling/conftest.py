"""A gateway whose model makes vectors."""

import pytest_asyncio

from tests.integration.gateway.conftest import GatewayUnderTest, Share
from tests.integration.gateway.pooling.inputs import EMBEDDER, embed, start_with


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(share_gateway: Share) -> GatewayUnderTest:
    gateway = await start_with(share_gateway, EMBEDDER)
    await gateway.add_worker(script=embed)
    return gateway
