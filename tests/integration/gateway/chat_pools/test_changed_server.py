"""Two pools, of which one's server is started anew as another model: callers notice nothing."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from pool_worker.settings import WorkerSettings
from tests.conformance.chat_replay import ChatReplay, answer_text
from tests.integration.gateway.chat_pools.conftest import settings_of, worker_settings
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.waiting import HANGS_S, until

REQUESTS = 16
PATH = "/v1/models"
REASON = "the server has changed: weights: /old before, /new now"


def models(root: str, length: int = 4096) -> dict[str, Any]:
    return {"data": [{"id": "replay", "root": root, "max_model_len": length}]}


@pytest.fixture
def changing(second_server: ChatReplay) -> ChatReplay:
    second_server.forget()
    second_server.facts[PATH] = models("/old")
    return second_server


def worker(gateway: GatewayUnderTest, server: ChatReplay, name: str, **more: Any) -> WorkerSettings:
    settings = worker_settings(gateway, server, "vllm")
    engine = settings.engine.model_copy(update={"max_sequences": 4, "facts_period_s": 1.0, **more})
    return settings.model_copy(update={"engine": engine, "worker_id": name, "pool": name})


async def ask(gateway: GatewayUnderTest, number: int) -> str:
    """Ask for a stream with every second number; return what is wrong."""
    messages: list[Any] = [{"role": "user", "content": f"question {number}"}]
    create = gateway.client(timeout=HANGS_S).chat.completions.create
    if number % 2:
        answer = await create(model=MODEL, messages=messages)
        said = answer.choices[0].message.content or ""
    else:
        chunks = await create(model=MODEL, messages=messages, stream=True)
        said = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
    return "" if said == answer_text(messages) else said


async def test_callers_get_no_error_and_no_answer_of_another_model(
    start_gateway: Start,
    replay: ChatReplay,
    changing: ChatReplay,
    tokenizer: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gateway = await start_gateway(**settings_of(tokenizer), open_metrics=True)
    replay.facts[PATH] = models("/old")
    replay.token_s = changing.token_s = 0.01
    ready = asyncio.Event()
    async with running_worker(worker(gateway, replay, "same")), running_worker(worker(gateway, changing, "new"), ready):
        asking = [asyncio.create_task(ask(gateway, number)) for number in range(REQUESTS)]
        await until(lambda: changing.streams > 1)
        changing.facts[PATH] = models("/new")
        changing.is_another = True  # breaks its streams off, as a restart does
        later = [asyncio.create_task(ask(gateway, REQUESTS + number)) for number in range(REQUESTS)]
        assert await asyncio.gather(*asking, *later) == [""] * 2 * REQUESTS
        await until(lambda: not ready.is_set())
        assert REASON in caplog.text
        await until(lambda: says(gateway, "spillway_worker_paused{", 'pool="new"', 'reason="changed"'))
        taken = len(changing.bodies)
        assert await ask(gateway, 1) == ""
        assert len(changing.bodies) == taken  # it is out
        changing.facts[PATH] = models("/old")
        changing.is_another = False
        await until(ready.is_set)
        answers = await asyncio.gather(*(ask(gateway, number) for number in range(REQUESTS)))
        assert answers == [""] * REQUESTS
        assert len(changing.bodies) > taken


async def test_a_worker_whose_server_has_a_shorter_context_leaves(
    start_gateway: Start, replay: ChatReplay, changing: ChatReplay, tokenizer: Path
) -> None:
    gateway = await start_gateway(**settings_of(tokenizer))
    replay.facts[PATH] = models("/old")
    async with running_worker(worker(gateway, replay, "same")):
        with pytest.raises(ExceptionGroup) as raised:
            await until_it_leaves(gateway, changing)
        assert raised.group_contains(Exception, match="context length: 4096 before, 1024 now")


async def until_it_leaves(gateway: GatewayUnderTest, server: ChatReplay) -> None:
    async with running_worker(worker(gateway, server, "shorter")) as stop:
        server.facts[PATH] = models("/old", 1024)
        answers = await asyncio.gather(*(ask(gateway, number) for number in range(REQUESTS)))
        assert answers == [""] * REQUESTS
        await stop.requested.wait()


async def says(gateway: GatewayUnderTest, *words: str) -> bool:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return any(all(word in line for word in words) for line in lines)
