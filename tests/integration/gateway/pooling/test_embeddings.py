"""Embeddings through a whole gateway, whose workers do what a test says."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from protocol.generation import PoolingCard
from protocol.job import Cancel
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.pooling.inputs import (
    EMBEDDER,
    MATRYOSHKA,
    SCORER,
    embed,
    http,
    ids,
    inputs_of,
    only,
    start_with,
    vector_of,
)
from tests.integration.gateway.scripted_worker import Attempt
from tests.waiting import until


@pytest.mark.parametrize("encoding", [openai.omit, "float", "base64"], ids=["default", "float", "base64"])
async def test_each_input_gets_its_vector(gateway: GatewayUnderTest, encoding: Any) -> None:
    answer = await gateway.client().embeddings.create(model="short", input=["a", "bcd"], encoding_format=encoding)
    expected = [vector_of(ids("a")), vector_of(ids("bcd"))]
    assert [row.index for row in answer.data] == [0, 1]
    if encoding != "base64":
        assert [tuple(row.embedding) for row in answer.data] == expected
    assert (answer.object, answer.model) == ("list", "short")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(ids("a")) + len(ids("bcd"))
    [record] = await gateway.records()
    assert (record.endpoint, record.outcome, record.http_status) == ("embeddings", "ok", 200)
    assert (record.prompt_tokens, record.completion_tokens) == (answer.usage.prompt_tokens, 0)
    assert (record.finish_reason, record.ttft_ms, record.stream) == (None, None, False)


async def test_inputs_of_every_form_travel_as_token_ids(gateway: GatewayUnderTest) -> None:
    forms: list[tuple[Any, list[list[int]]]] = [
        ("abc", [ids("abc")]),
        (["x"], [ids("x")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7, 8, 9]], [[5, 6], [7, 8, 9]]),
    ]
    for given, expected in forms:
        answer = await gateway.client().embeddings.create(model=MODEL, input=given)
        attempt = gateway.workers[0].attempts[-1]
        assert inputs_of(attempt) == expected
        assert attempt.job.prompt_tokens == answer.usage.prompt_tokens == sum(map(len, expected))


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


async def test_a_request_that_makes_progress_outlives_many_workers(start_gateway: Start) -> None:
    gateway = await start_with(start_gateway, EMBEDDER, max_attempts=2)

    async def one_then_die(attempt: Attempt) -> None:
        await attempt.accept()
        answered = {point.index for point in attempt.job.resume}
        [index, *_] = sorted(set(range(5)) - answered)
        await attempt.vector(index, vector_of(inputs_of(attempt)[index]))
        if len(answered) == 4:
            await attempt.finish()
        else:
            await attempt.fail("engine_died", "boom", retryable=True)

    await gateway.add_worker(script=one_then_die)
    answer = await gateway.client().embeddings.create(model=MODEL, input=["a", "b", "c", "d", "e"])
    assert len(answer.data) == 5
    [record] = await gateway.records()
    assert record.attempts == 5


async def test_lost_frames_are_sent_again(share_gateway: Share) -> None:
    gateway = await start_with(share_gateway, EMBEDDER)

    async def lossy(attempt: Attempt) -> None:
        await attempt.accept()
        for index, token_ids in enumerate(inputs_of(attempt)):
            await attempt.vector(index, vector_of(token_ids), lost=index == 1)
        await attempt.finish()

    await gateway.add_worker(script=lossy)
    answer = await gateway.client().embeddings.create(model=MODEL, input=["a", "b", "c"])
    assert [tuple(row.embedding) for row in answer.data] == [vector_of(ids(text)) for text in "abc"]
    [record] = await gateway.records()
    assert record.attempts == 1


async def test_an_answer_to_an_input_never_sent_is_the_workers_failure(share_gateway: Share) -> None:
    gateway = await start_with(share_gateway, EMBEDDER)

    async def lie_first(attempt: Attempt) -> None:
        if attempt.job.attempt > 1:
            await embed(attempt)
            return
        await attempt.accept()
        await attempt.vector(7, (1.0, 2.0, 3.0))

    await gateway.add_worker(script=lie_first)
    answer = await gateway.client().embeddings.create(model=MODEL, input="a")
    assert tuple(answer.data[0].embedding) == vector_of(ids("a"))


async def test_a_caller_who_leaves_cancels_the_job(share_gateway: Share) -> None:
    gateway = await start_with(share_gateway, EMBEDDER)

    async def slow(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.vector(0, vector_of(inputs_of(attempt)[0]))
        await attempt.cancelled.wait()
        await attempt.vector(1, vector_of(inputs_of(attempt)[1]))  # was on its way
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


async def test_the_gateway_holds_only_so_many_vectors(start_gateway: Start) -> None:
    gateway = await start_with(start_gateway, EMBEDDER, limits={"max_vector_bytes": 30}, open_metrics=True)
    waits = asyncio.Event()

    async def when_told(attempt: Attempt) -> None:
        await waits.wait()
        await embed(attempt)

    worker = await gateway.add_worker(script=when_told)
    client = gateway.client()
    first = asyncio.create_task(client.embeddings.create(model=MODEL, input=["a", "b", "c"]))  # alone, it is let in
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


# --- what is refused --------------------------------------------------------------------------------------------------


async def test_what_cannot_be_embedded_is_said_so(gateway: GatewayUnderTest) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"input": ""}, "input", "input 0 is empty"),
        ({"input": []}, "input", "not empty"),
        ({"input": ["a", ""]}, "input", "input 1 is empty"),
        ({"input": [[5], []]}, "input", "input 1 is empty"),
        ({"input": [[5], "a"]}, "input", "input 1 must be"),
        ({"input": ["a", [5]]}, "input", "input 0 must be"),
        ({"input": [1.5]}, "input", "input 0 must be"),
        ({"input": [[-1]]}, "input", "input 0 must be"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a" * 31}, "input.0", "maximum context length is 32"),
        ({"input": [[5], [5] * 33]}, "input.1", "resulted in 33 tokens"),
        ({"input": "a", "dimensions": 2}, "dimensions", "have 3 dimensions"),
        ({"input": "a", "dimensions": 4}, "dimensions", "have 3 dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": "a", "messages": []}, "messages", "not supported"),
        ({"input": "a", "truncate_prompt_tokens": 33}, "truncate_prompt_tokens", "from 1 to 32"),
        ({"input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "special tokens"),
        ({}, "input", "Missing required parameter"),
    ]
    async with http(gateway) as client:
        for fields, param, says in cases:
            answer = await client.post("/v1/embeddings", json={"model": MODEL, **fields})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), fields
            assert says in error["message"]
            assert (error["code"] == "context_length_exceeded") == ("maximum context" in error["message"])
    assert gateway.workers[0].attempts == []


async def test_an_input_too_long_may_be_truncated(gateway: GatewayUnderTest) -> None:
    client = gateway.client()
    await client.embeddings.create(model=MODEL, input="a" * 40, extra_body={"truncate_prompt_tokens": -1})
    await client.embeddings.create(model=MODEL, input=["abcdef", "x"], extra_body={"truncate_prompt_tokens": 5})
    await client.embeddings.create(model=MODEL, input=[[1, 2, 3]], extra_body={"truncate_prompt_tokens": 2})
    whole, cut, token_ids = map(inputs_of, gateway.workers[0].attempts)
    assert whole == [ids("a" * 30)]
    assert cut == [ids("abc"), ids("x")]
    assert token_ids == [[1, 2]]


async def test_dimensions_travel_where_the_model_was_trained_for_fewer(share_gateway: Share) -> None:
    gateway = await start_with(share_gateway, MATRYOSHKA)
    worker = await gateway.add_worker(script=embed)
    client = gateway.client()
    await client.embeddings.create(model=MODEL, input="a", dimensions=2)
    pooling = worker.attempts[0].job.pooling
    assert pooling is not None
    assert pooling.dimensions == 2
    with pytest.raises(openai.BadRequestError, match="from 1 to 3"):
        await client.embeddings.create(model=MODEL, input="a", dimensions=4)


async def test_only_some_dimensions(share_gateway: Share) -> None:
    gateway = await start_with(share_gateway, PoolingCard("embed", 8, is_matryoshka=True, matryoshka_dimensions=(2, 4)))
    with pytest.raises(openai.BadRequestError, match="must be 2, 4 for this model, not 3"):
        await gateway.client().embeddings.create(model=MODEL, input="a", dimensions=3)


TASKS: dict[str, tuple[PoolingCard | None, list[tuple[str, dict[str, Any], str]]]] = {
    "embed": (
        EMBEDDER,
        [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "use /v1/embeddings"),
            ("/v1/completions", {"prompt": "a"}, "makes no text: it makes embeddings"),
        ],
    ),
    "score": (
        SCORER,
        [
            ("/v1/completions", {"prompt": "a"}, "use /v1/score or /v1/rerank"),
            ("/v1/embeddings", {"input": "a"}, "makes no embeddings: it scores pairs"),
        ],
    ),
    "generate": (
        None,
        [
            ("/v1/embeddings", {"input": "a"}, "makes no embeddings: it generates text"),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}, "scores nothing: it generates text"),
        ],
    ),
}


@pytest.mark.parametrize("task", TASKS)
async def test_a_model_is_for_its_task_only(share_gateway: Share, task: str) -> None:
    card, cases = TASKS[task]
    gateway = await start_with(share_gateway, card)
    async with http(gateway) as client:
        for path, fields, says in cases:
            answer = await client.post(path, json={"model": MODEL, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
            assert says in answer.json()["error"]["message"]
