"""A gateway, and workers before a replay of OpenAI's API."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import HostedPoolSettings, ModelSettings, TenantSettings
from pool_worker.settings import OpenAIChatSettings, WorkerSettings
from pool_worker.stopping import Stop
from tests.conformance.chat_replay import ChatReplay
from tests.conformance.server_replay import running
from tests.integration.gateway.chat_pools.pools import StartPool
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.small_tokenizer import byte_tokenizer_json


@pytest.fixture(scope="module")
def server() -> Iterator[ChatReplay]:
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


@pytest.fixture
async def start_pool(
    start_gateway: Start, replay: ChatReplay, nats_url: str, tmp_path: Path, stops: list[Stop]
) -> AsyncIterator[StartPool]:
    """Starts a gateway and workers for the replay; ``is_mixed``: the model has workers of its own, too."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(byte_tokenizer_json())
    async with AsyncExitStack() as stack:

        async def start(
            profile: str = "openai", *, is_mixed: bool = False, workers: int = 1, tier: str = "spot"
        ) -> GatewayUnderTest:
            hosted: dict[str, Any] = {}
            if tier == "hosted":
                hosted["hosted"] = {"api": HostedPoolSettings(provider="openai", models=(MODEL,))}
                hosted["tenants"] = {"test 0": TenantSettings(allow_hosted=("openai",))}
                hosted["only_hosted"] = frozenset() if is_mixed else frozenset({MODEL})
            model = ModelSettings() if is_mixed else ModelSettings(tokenizer=str(tokenizer), context_length=1_000_000)
            names = frozenset({MODEL})
            gateway = await start_gateway(
                with_card=is_mixed,
                models={MODEL: model.model_copy(update={"aliases": ("short",)})},
                by_messages=names,
                only_by_messages=frozenset() if is_mixed else names,
                **hosted,
            )
            engine = OpenAIChatSettings.model_validate(
                {
                    "kind": "openai_chat",
                    "profile": profile,
                    "url": replay.url,
                    "model": "replay",
                    "max_model_len": 1_000_000,
                }
            )
            for number in range(workers):
                names_of: dict[str, Any] = {"worker_id": f"api-{number}", "pool": "api", "provider": "openai"}
                names_of["tier"] = tier
                settings = WorkerSettings(nats_urls=(nats_url,), engine=engine, models=(MODEL,), **names_of)
                stops.append(await stack.enter_async_context(running_worker(settings)))
            return gateway

        yield start
