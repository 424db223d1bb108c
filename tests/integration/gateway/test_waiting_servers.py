"""All servers of a model ask to wait for longer than a request may: each API's 429, with Retry-After; batches wait."""

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from gateway.settings import HostedPoolSettings, TenantSettings
from protocol.generation import PoolingCard
from protocol.job import Paused
from tests.integration.gateway.batches.test_batches import QUICK, line, over, results, submit
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start
from tests.integration.gateway.scripted_worker import ScriptedWorker
from tests.unit.gateway.api.pooling.inputs import EMBEDDER, SCORER, with_card
from tests.waiting import HANGS_S, until

ASKED = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": ASKED, "max_tokens": 4},
}
SAYS = {  # whole, streamed
    "/v1/chat/completions": ('"code":"wait_too_long"', '"code":"wait_too_long"'),
    "/v1/completions": ('"code":"wait_too_long"', '"code":"wait_too_long"'),
    "/v1/responses": ('"code":"wait_too_long"', '"code":"rate_limit_exceeded"'),
    "/v1/messages": ('"type":"rate_limit_error"', '"type":"overloaded_error"'),
}
VECTORS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hi"},
    "/v1/score": {"text_1": "Hi", "text_2": "Ho"},
    "/v1/rerank": {"query": "Hi", "documents": ["Ho"]},
}
LONG = Paused("429: slow down", 3_600_000)
TIERS: dict[str, dict[str, Any]] = {
    "spot": {},
    "hosted": {
        "hosted": {"api": HostedPoolSettings(provider="openai", models=(MODEL,))},
        "tenants": {"test 0": TenantSettings(allow_hosted=("openai",))},
        "only_hosted": frozenset({MODEL}),
    },
}


async def add_waiting_worker(gateway: GatewayUnderTest, tier: str = "spot") -> ScriptedWorker:
    worker = await gateway.add_worker(place=("api", "openai", "r", tier), takes_jobs=False)
    worker.paused = LONG
    await until(lambda: has_series(gateway, "spillway_worker_paused{", 'reason="asked_to_wait"'))
    return worker


async def has_series(gateway: GatewayUnderTest, name: str, label: str) -> bool:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return any(one.startswith(name) and label in one for one in lines)


async def has_jobs(gateway: GatewayUnderTest, count: int) -> bool:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        return f"\nspillway_requests_in_flight {count}.0\n" in (await client.get("/metrics")).text


def check_refusal(path: str, answer: httpx.Response) -> None:
    assert answer.status_code == 429, answer.text
    assert 40 <= int(answer.headers["retry-after"]) <= 60  # clients ignore what is longer
    assert answer.headers["x-should-retry"] == "true"
    error = answer.json()["error"]
    assert error["type"] == "rate_limit_error"
    assert "The servers of this model ask to wait 3600 s" in error["message"]
    if path == "/v1/messages":
        assert answer.json()["type"] == "error"
    else:
        assert error["code"] == "wait_too_long"


@pytest.mark.parametrize("tier", TIERS)
async def test_each_api_says_when_to_come_back(start_gateway: Start, tier: str) -> None:
    gateway = await start_gateway(open_metrics=True, **TIERS[tier])
    await add_waiting_worker(gateway, tier)
    async with gateway_client(gateway) as client:
        for path, body in BODIES.items():
            for stream in (False, True):
                answer = await client.post(path, json={"model": MODEL, "stream": stream, **body})
                check_refusal(path, answer)


@pytest.mark.parametrize("card", [EMBEDDER, SCORER], ids=["embedder", "scorer"])
async def test_vectors_and_scores_say_when_to_come_back(start_gateway: Start, card: PoolingCard) -> None:
    gateway = await start_gateway(**with_card(card), open_metrics=True)
    await add_waiting_worker(gateway)
    async with gateway_client(gateway) as client:
        for path in ("/v1/embeddings",) if card is EMBEDDER else ("/v1/score", "/v1/rerank"):
            check_refusal(path, await client.post(path, json={"model": MODEL, **VECTORS[path]}))


async def test_who_waits_already_is_told_as_well(start_gateway: Start) -> None:
    """A stream whose head is out gets an event instead of a status."""
    gateway = await start_gateway(open_metrics=True, timeouts={"headers_grace_s": 0.01})
    worker = await gateway.add_worker(place=("api", "openai", "r", "spot"), takes_jobs=False)
    asked = [(path, stream) for path in BODIES for stream in (False, True)]
    async with gateway_client(gateway) as client, asyncio.TaskGroup() as group:
        asking = [group.create_task(ask(client, path, stream=stream)) for path, stream in asked]
        await until(lambda: has_jobs(gateway, len(asked)))
        worker.paused = LONG
        answers = await asyncio.gather(*asking)
    for (path, stream), (status, text) in zip(asked, answers, strict=True):
        assert status == (200 if stream else 429), path
        assert "ask to wait 3600 s" in text
        assert SAYS[path][stream] in text


async def ask(client: httpx.AsyncClient, path: str, *, stream: bool) -> tuple[int, str]:
    """A stream that fails is cut behind its event."""
    text = ""
    body = {"model": MODEL, "stream": stream, **BODIES[path]}
    async with client.stream("POST", path, json=body) as answer:
        with contextlib.suppress(httpx.RemoteProtocolError):
            async for piece in answer.aiter_text():
                text += piece
    return answer.status_code, text


async def test_a_line_of_a_batch_waits(start_gateway: Start) -> None:
    gateway = await start_gateway(open_metrics=True, batches=QUICK, timeouts={"queue_wait_s": 1.0})
    worker = await add_waiting_worker(gateway)
    worker.paused = Paused("429: slow down", 1_200)  # at every heartbeat
    client = gateway.client()
    batch = await submit(client, [line("a")])
    await until(lambda: has_series(gateway, "spillway_refusals_total{", 'code="wait_too_long"'))
    worker.paused, worker.takes_jobs, worker.free_sequences = None, True, 64
    done = await over(client, batch)
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 1, "completed": 1, "failed": 0}
    assert set(await results(client, done.output_file_id)) == {"a"}


def gateway_client(gateway: GatewayUnderTest) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {gateway.key}"}
    return httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S)
