"""A gateway, and workers before a replay of OpenAI's API."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.settings import HostedPoolSettings, ModelSettings, TenantSettings
from pool_worker.drain import Stop
from pool_worker.settings import OpenAIChatSettings, WorkerSettings
from tests.conformance.chat_replay import ChatReplay
from tests.conformance.replay import running
from tests.integration.gateway.chat_pools.pools import StartPool
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start, SystemWith
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.small_tokenizer import byte_tokenizer_json


@pytest.fixture(scope="module")
def server() -> Iterator[ChatReplay]:
    with running(ChatReplay()) as replay:
        yield replay


@pytest.fixture(scope="module")
def second_server() -> Iterator[ChatReplay]:
    with running(ChatReplay()) as replay:
        yield replay


@pytest.fixture
def replay(server: ChatReplay) -> ChatReplay:
    server.forget()
    return server


@pytest.fixture
def stops() -> list[Stop]:
    """Signals that make the workers leave."""
    return []


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(byte_tokenizer_json())
    return path


def settings_of(tokenizer: Path, *, is_mixed: bool = False, tier: str = "spot") -> dict[str, Any]:
    """Of a gateway whose model takes messages; ``is_mixed``: the model has workers of its own, too."""
    hosted: dict[str, Any] = {}
    if tier == "hosted":
        hosted["hosted"] = {"api": HostedPoolSettings(provider="openai", models=(MODEL,))}
        hosted["tenants"] = {"test 0": TenantSettings(allow_hosted=("openai",))}
        hosted["only_hosted"] = frozenset() if is_mixed else frozenset({MODEL})
    model = ModelSettings() if is_mixed else ModelSettings(tokenizer=str(tokenizer), context_length=1_000_000)
    names = frozenset({MODEL})
    return {
        "with_card": is_mixed,
        "models": {MODEL: model.model_copy(update={"aliases": ("short",)})},
        "by_messages": names,
        "only_by_messages": frozenset() if is_mixed else names,
        **hosted,
    }


def worker_settings(
    gateway: GatewayUnderTest,
    server: ChatReplay,
    profile: str = "openai",
    *,
    number: int = 0,
    tier: str = "spot",
    **more: Any,
) -> WorkerSettings:
    known = {"kind": "openai_chat", "profile": profile, "url": server.url, "model": "replay"}
    engine = OpenAIChatSettings.model_validate({**known, "max_model_len": 1_000_000, **more})
    names: dict[str, Any] = {"worker_id": f"api-{number}", "pool": "api", "provider": "openai", "tier": tier}
    return WorkerSettings(nats_urls=gateway.settings.nats_urls, engine=engine, models=(MODEL,), **names)


@pytest.fixture
async def start_pool(
    start_gateway: Start, replay: ChatReplay, tokenizer: Path, stops: list[Stop]
) -> AsyncIterator[StartPool]:
    """Starts a gateway and workers for the replay."""
    async with AsyncExitStack() as stack:

        async def start(
            profile: str = "openai", *, is_mixed: bool = False, workers: int = 1, tier: str = "spot", **more: Any
        ) -> GatewayUnderTest:
            gateway = await start_gateway(**settings_of(tokenizer, is_mixed=is_mixed, tier=tier))
            for number in range(workers):
                settings = worker_settings(gateway, replay, profile, number=number, tier=tier, **more)
                stops.append(await stack.enter_async_context(running_worker(settings)))
            return gateway

        yield start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(shared_systems: SystemWith, server: ChatReplay, tokenizer: Path) -> AsyncIterator[None]:
    """A worker for the replay at the module's gateway."""
    system = await shared_systems(**settings_of(tokenizer))
    async with running_worker(worker_settings(system.gateway, server)):
        yield


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(share_gateway: Share, pool: None, replay: ChatReplay, tokenizer: Path) -> GatewayUnderTest:
    """The module's gateway, with its worker for the replay."""
    return await share_gateway(**settings_of(tokenizer))
