"""A pool whose server refuses everything at once, beside a healthy one: it must not drain the queue."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from pool_worker.breaker import FAILURES
from pool_worker.probe import MAX_TOKENS, QUESTION
from pool_worker.settings import WorkerSettings
from tests.conformance.chat_replay import ChatReplay, answer_text
from tests.conformance.replay import Fault
from tests.integration.gateway.chat_pools.conftest import settings_of, worker_settings
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.waiting import until

REQUESTS = 40
BROKEN = ("broken-0", "broken-1", "broken-2")
MANY = 10_000  # faults, more than any test asks for


def refused(_: Request) -> Response:
    return JSONResponse({"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}, 401)


def renamed(_: Request) -> Response:
    return JSONResponse({"error": {"message": "The model `replay` does not exist"}}, 404)


def failing(_: Request) -> Response:
    return JSONResponse({"error": {"message": "CUDA error"}}, 500)


def malformed(_: Request) -> Response:
    return Response(b"data: <html>\n\n", media_type="text/event-stream")


@pytest.fixture
def faulty(second_server: ChatReplay) -> ChatReplay:
    second_server.forget()
    return second_server


Begin = Callable[..., Any]


@pytest.fixture
async def begin(start_gateway: Start, replay: ChatReplay, faulty: ChatReplay, tokenizer: Path) -> AsyncIterator[Begin]:
    """Starts a gateway, a healthy pool of two sequences, and a pool whose server does ``fault``."""
    async with AsyncExitStack() as stack:

        async def begin(fault: Fault, *, tier: str = "spot") -> GatewayUnderTest:
            settings = settings_of(tokenizer, tier=tier)
            if tier == "hosted":
                settings["hosted"]["broken"] = settings["hosted"]["api"]
            gateway = await start_gateway(**settings)
            replay.token_s = 0.005
            faulty.faults.extend([fault] * MANY)
            good = with_sequences(worker_settings(gateway, replay, tier=tier), 2)
            bad = with_sequences(worker_settings(gateway, faulty, tier=tier), 8)
            broken = [bad.model_copy(update={"pool": "broken", "worker_id": name}) for name in BROKEN]
            for worker in (good, *broken):
                await stack.enter_async_context(running_worker(worker))
            return gateway

        yield begin


def with_sequences(settings: WorkerSettings, sequences: int) -> WorkerSettings:
    engine = settings.engine.model_copy(update={"max_sequences": sequences})
    return settings.model_copy(update={"engine": engine})


async def ask(gateway: GatewayUnderTest, number: int) -> str:
    messages: list[Any] = [{"role": "user", "content": f"question {number}"}]
    answer = await gateway.client().chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content == answer_text(messages)
    return "ok"


@pytest.mark.parametrize(
    ("fault", "tier"),
    [(refused, "spot"), (renamed, "spot"), (failing, "spot"), (malformed, "spot"), (refused, "hosted")],
)
async def test_a_broken_pool_does_not_drain_the_queue(begin: Begin, fault: Fault, tier: str) -> None:
    gateway = await begin(fault, tier=tier)
    answers = await asyncio.gather(*(ask(gateway, number) for number in range(REQUESTS)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["ok"] * REQUESTS
    for record in await gateway.records(REQUESTS):
        assert record.outcome == "ok"


async def test_a_broken_pool_says_so_and_comes_back(
    start_gateway: Start, faulty: ChatReplay, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = await start_gateway(**settings_of(tokenizer), open_metrics=True)
    faulty.faults.extend([refused] * MANY)
    ready = asyncio.Event()
    async with running_worker(worker_settings(gateway, faulty), ready):
        asking = [asyncio.create_task(ask(gateway, number)) for number in range(FAILURES)]
        await until(lambda: not ready.is_set())
        await until(lambda: says_paused(gateway))
        assert "failed 3 requests in a row" in caplog.text
        assert "Incorrect API key" in caplog.text
        faulty.faults.clear()
        await until(ready.is_set)
        await asyncio.gather(*asking, return_exceptions=True)
        assert await ask(gateway, FAILURES) == "ok"
        probes = [body for body in faulty.bodies if body["messages"][-1]["content"] == QUESTION]
        assert probes
        assert {body["max_completion_tokens"] for body in probes} == {MAX_TOKENS}


async def says_paused(gateway: GatewayUnderTest) -> bool:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return any(line.startswith("spillway_worker_paused{") and 'reason="broken"' in line for line in lines)
