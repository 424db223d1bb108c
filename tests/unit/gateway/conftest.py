"""A gateway in the test's own process."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.local_gateway import LocalGateway, local_gateway

Start = Callable[..., Awaitable[LocalGateway]]


@pytest.fixture
async def start_local(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a gateway with the given settings."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(**options: Any) -> LocalGateway:
            return await stack.enter_async_context(local_gateway(tmp_path, **options))

        yield start
