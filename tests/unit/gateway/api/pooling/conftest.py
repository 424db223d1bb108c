"""A gateway with an embedding model."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from protocol.generation import PoolingCard
from tests.unit.gateway.api.pooling.inputs import EMBEDDER, embed, with_card
from tests.unit.gateway.conftest import Start
from tests.unit.gateway.local_gateway import LocalGateway

StartEmbedder = Callable[..., Awaitable[LocalGateway]]


@pytest.fixture
def start_embedder(start_local: Start) -> StartEmbedder:
    async def start(card: PoolingCard | None, **settings: Any) -> LocalGateway:
        return await start_local(**with_card(card), **settings)

    return start


@pytest.fixture
async def gateway(start_embedder: StartEmbedder) -> LocalGateway:
    gateway = await start_embedder(EMBEDDER)
    await gateway.add_worker(script=embed)
    return gateway
