"""Embeddings through a complete gateway with scripted workers. The formats of requests and answers are tested in
tests/unit/gateway/api/pooling."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from protocol.generation import PoolingCard
from protocol.job import Cancel
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt
from tests.unit.gateway.api.pooling.inputs import (
    EMBEDDER,
    SCORER,
    embed,
    ids,
    inputs_of,
    only,
    score_by_second,
    vector_of,
    with_card,
)
from tests.waiting import HANGS_S, until


async def start_with(start: Start | Share, card: PoolingCard, **settings: Any) -> GatewayUnderTest:
    return await start(**with_card(card), **settings)


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(share_gateway: Share) -> GatewayUnderTest:
    gateway = await start_with(share_gateway, EMBEDDER)
    await gateway.add_worker(script=embed)
    return gateway


def http(gateway: GatewayUnderTest, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=gateway.url, headers={"Authorization": f"Bearer {gateway.key}", **headers}, timeout=HANGS_S
    )


async def test_each_input_gets_its_vector(gateway: GatewayUnderTest) -> None:
    answer = await gateway.client().embeddings.create(model="short", input=["a", "bcd"])
    expected = [vector_of(ids("a")), vector_of(ids("bcd"))]
    assert [row.index for row in answer.data] == [0, 1]
    assert [tuple(row.embedding) for row in answer.data] == expected
    assert (answer.object, answer.model) == ("list", "short")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(ids("a")) + len(ids("bcd"))
    [record] = await gateway.records()
    assert (record.endpoint, record.outcome, record.http_status) == ("embeddings", "ok", 200)
    assert (record.prompt_tokens, record.completion_tokens) == (answer.usage.prompt_tokens, 0)
    assert (record.finish_reason, record.ttft_ms, record.stream) == (None, None, False)


async def test_a_lost_worker_costs_only_the_inputs_it_has_not_answered(share_gateway: Share) -> None:
    gateway = await start_with(share_gateway, EMBEDDER)

    async def half_then_leave(attempt: Attempt) -> None:
        if attempt.job.attempt > 1:
            await embed(attempt)
            return
        await attempt.accept()
        inputs = inputs_of(attempt)
        await attempt.vector(2, vector_of(inputs[2]))
        await attempt.vector(0, vector_of(inputs[0]))
        await attempt.fail("worker_draining", "bye", retryable=True)

    worker = await gateway.add_worker(script=half_then_leave)
    texts = ["one", "two two", "three", "four"]
    answer = await gateway.client().embeddings.create(model=MODEL, input=texts)
    assert [tuple(row.embedding) for row in answer.data] == [vector_of(ids(text)) for text in texts]
    assert [only(attempt) for attempt in worker.attempts] == [[0, 2], [1, 3]]
    [record] = await gateway.records()
    assert (record.attempts, record.outcome, record.prompt_tokens) == (2, "ok", answer.usage.prompt_tokens)


async def test_a_disconnect_cancels_the_job(share_gateway: Share) -> None:
    gateway = await start_with(share_gateway, EMBEDDER)

    async def slow(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.vector(0, vector_of(inputs_of(attempt)[0]))
        await attempt.cancelled.wait()
        await attempt.vector(1, vector_of(inputs_of(attempt)[1]))  # was in flight
        await attempt.finish(cancelled=True)

    worker = await gateway.add_worker(script=slow)
    asking = asyncio.create_task(gateway.client().embeddings.create(model=MODEL, input=["a", "b", "c"]))
    await until(lambda: worker.attempts and worker.attempts[0].frames[1:])
    asking.cancel()
    [record] = await gateway.records()
    assert (record.outcome, record.http_status) == ("cancelled", 499)
    assert any(isinstance(control, Cancel) for control in worker.controls)


async def test_an_idempotency_key_replays_the_answer(gateway: GatewayUnderTest) -> None:
    body = {"model": MODEL, "input": ["a", "b"]}
    async with http(gateway, **{"Idempotency-Key": "k1"}) as client:
        first, second = [await client.post("/v1/embeddings", json=body) for _ in range(2)]
    assert first.json() == second.json()
    assert second.headers["x-spillway-idempotent"] == "replayed"
    assert len(await gateway.records()) == 1


async def test_a_large_answer_is_written_piece_by_piece(share_gateway: Share) -> None:
    gateway = await start_with(share_gateway, PoolingCard("embed", 4096))

    async def large(attempt: Attempt) -> None:
        await attempt.accept()
        for index in range(attempt.job.answers):
            await attempt.vector(index, [index + 0.25] * 4096)
        await attempt.finish()

    await gateway.add_worker(script=large)
    async with http(gateway) as client:
        raw = await client.post("/v1/embeddings", json={"model": MODEL, "input": [[5]] * 64})
    assert "content-length" not in raw.headers
    assert raw.headers["x-request-id"]
    rows = raw.json()["data"]
    assert [(row["index"], row["embedding"][0], len(row["embedding"])) for row in rows] == [
        (index, index + 0.25, 4096) for index in range(64)
    ]
    assert raw.json()["usage"] == {"prompt_tokens": 64, "total_tokens": 64}


async def test_the_gateway_limits_the_memory_of_vectors(start_gateway: Start) -> None:
    gateway = await start_with(start_gateway, EMBEDDER, limits={"max_vector_bytes": 30}, open_metrics=True)
    waits = asyncio.Event()

    async def when_told(attempt: Attempt) -> None:
        await waits.wait()
        await embed(attempt)

    worker = await gateway.add_worker(script=when_told)
    client = gateway.client()
    first = asyncio.create_task(
        client.embeddings.create(model=MODEL, input=["a", "b", "c"])
    )  # accepted, because nothing else is reserved
    await until(lambda: worker.attempts)
    with pytest.raises(openai.InternalServerError) as refused:
        await client.embeddings.create(model=MODEL, input="a")
    assert (refused.value.status_code, refused.value.code) == (503, "overloaded")
    async with httpx.AsyncClient(base_url=gateway.url) as client_of_metrics:
        metrics = (await client_of_metrics.get("/metrics")).text
    refusals = [line for line in metrics.splitlines() if line.startswith("spillway_refusals_total{")]
    assert ['endpoint="embeddings"' in line and line.endswith(" 1.0") for line in refusals] == [True]
    waits.set()
    await first
    await client.embeddings.create(model=MODEL, input="a")


async def test_a_cross_encoder_ranks(share_gateway: Share) -> None:
    gateway = await start_with(share_gateway, SCORER)
    await gateway.add_worker(script=score_by_second)
    async with http(gateway) as client:
        body = {"model": MODEL, "query": "q", "documents": ["ab", "abcd", "a"]}
        answer = (await client.post("/v1/rerank", json=body)).json()
        described = (await client.get("/openapi.json")).json()
    assert [row["index"] for row in answer["results"]] == [1, 0, 2]
    [record] = await gateway.records()
    assert (record.endpoint, record.prompt_tokens) == ("rerank", answer["usage"]["total_tokens"])
    assert {"/v1/embeddings", "/v1/score", "/v1/rerank"} <= set(described["paths"])
    assert {"EmbeddingRequest", "ScoreRequest", "RerankRequest"} <= set(described["components"]["schemas"])
