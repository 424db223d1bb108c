"""Embeddings with scripted workers."""

from typing import Any

import openai
import pytest

from protocol.generation import PoolingCard
from tests.integration.gateway.scripted_worker import Attempt
from tests.unit.gateway.api.pooling.conftest import StartEmbedder
from tests.unit.gateway.api.pooling.inputs import EMBEDDER, MATRYOSHKA, SCORER, embed, ids, inputs_of, vector_of
from tests.unit.gateway.local_gateway import MODEL, LocalGateway


@pytest.mark.parametrize("encoding", [openai.omit, "float", "base64"], ids=["default", "float", "base64"])
async def test_each_input_gets_its_vector(gateway: LocalGateway, encoding: Any) -> None:
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


async def test_inputs_of_every_form_travel_as_token_ids(gateway: LocalGateway) -> None:
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


async def test_a_request_that_makes_progress_outlives_many_workers(start_embedder: StartEmbedder) -> None:
    gateway = await start_embedder(EMBEDDER, max_attempts=2)

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


async def test_lost_frames_are_sent_again(start_embedder: StartEmbedder) -> None:
    gateway = await start_embedder(EMBEDDER)

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


async def test_an_answer_to_an_unknown_input_fails_the_worker(start_embedder: StartEmbedder) -> None:
    gateway = await start_embedder(EMBEDDER)

    async def lie_first(attempt: Attempt) -> None:
        if attempt.job.attempt > 1:
            await embed(attempt)
            return
        await attempt.accept()
        await attempt.vector(7, (1.0, 2.0, 3.0))

    await gateway.add_worker(script=lie_first)
    answer = await gateway.client().embeddings.create(model=MODEL, input="a")
    assert tuple(answer.data[0].embedding) == vector_of(ids("a"))


# --- what is refused --------------------------------------------------------------------------------------------------


async def test_invalid_inputs_are_refused(gateway: LocalGateway) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"input": ""}, "input", "input 0 is empty"),
        ({"input": []}, "input", "non-empty"),
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
    for fields, param, says in cases:
        answer = await gateway.post("/v1/embeddings", **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), fields
        assert says in error["message"]
        assert (error["code"] == "context_length_exceeded") == ("maximum context" in error["message"])
    assert gateway.workers[0].attempts == []


async def test_an_input_too_long_may_be_truncated(gateway: LocalGateway) -> None:
    client = gateway.client()
    await client.embeddings.create(model=MODEL, input="a" * 40, extra_body={"truncate_prompt_tokens": -1})
    await client.embeddings.create(model=MODEL, input=["abcdef", "x"], extra_body={"truncate_prompt_tokens": 5})
    await client.embeddings.create(model=MODEL, input=[[1, 2, 3]], extra_body={"truncate_prompt_tokens": 2})
    whole, cut, token_ids = map(inputs_of, gateway.workers[0].attempts)
    assert whole == [ids("a" * 30)]
    assert cut == [ids("abc"), ids("x")]
    assert token_ids == [[1, 2]]


async def test_dimensions_reach_models_trained_for_fewer(start_embedder: StartEmbedder) -> None:
    gateway = await start_embedder(MATRYOSHKA)
    worker = await gateway.add_worker(script=embed)
    client = gateway.client()
    await client.embeddings.create(model=MODEL, input="a", dimensions=2)
    pooling = worker.attempts[0].job.pooling
    assert pooling is not None
    assert pooling.dimensions == 2
    with pytest.raises(openai.BadRequestError, match="from 1 to 3"):
        await client.embeddings.create(model=MODEL, input="a", dimensions=4)


async def test_unsupported_dimensions_are_refused(start_embedder: StartEmbedder) -> None:
    gateway = await start_embedder(PoolingCard("embed", 8, is_matryoshka=True, matryoshka_dimensions=(2, 4)))
    with pytest.raises(openai.BadRequestError, match="must be 2, 4 for this model, not 3"):
        await gateway.client().embeddings.create(model=MODEL, input="a", dimensions=3)


TASKS: dict[str, tuple[PoolingCard | None, list[tuple[str, dict[str, Any], str]]]] = {
    "embed": (
        EMBEDDER,
        [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "use /v1/embeddings"),
            ("/v1/completions", {"prompt": "a"}, "does not support text generation: it is an embedding model"),
        ],
    ),
    "score": (
        SCORER,
        [
            ("/v1/completions", {"prompt": "a"}, "use /v1/score or /v1/rerank"),
            ("/v1/embeddings", {"input": "a"}, "does not support embeddings: it scores pairs"),
        ],
    ),
    "generate": (
        None,
        [
            ("/v1/embeddings", {"input": "a"}, "does not support embeddings: it generates text"),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}, "does not support scoring: it generates text"),
        ],
    ),
}


@pytest.mark.parametrize("task", TASKS)
async def test_a_model_refuses_other_tasks(start_embedder: StartEmbedder, task: str) -> None:
    card, cases = TASKS[task]
    gateway = await start_embedder(card)
    for path, fields, says in cases:
        answer = await gateway.post(path, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert says in answer.json()["error"]["message"]
