"""Scores and reranking through a complete gateway."""

from typing import Any

import pytest

from protocol.job import unpack_token_ids
from tests.unit.gateway.api.pooling.conftest import StartEmbedder
from tests.unit.gateway.api.pooling.inputs import CONTEXT, SCORER, ids, inputs_of, score_by_second, vector_of
from tests.unit.gateway.local_gateway import LocalGateway


@pytest.fixture
async def scorer(start_embedder: StartEmbedder) -> LocalGateway:
    gateway = await start_embedder(SCORER)
    await gateway.add_worker(script=score_by_second)
    return gateway


async def test_a_cross_encoder_scores_pairs(scorer: LocalGateway) -> None:
    one = (await scorer.post("/v1/score", text_1="q", text_2=["abc", "a"])).json()
    each = (await scorer.post("/score", text_1=["q", "r"], text_2=["ab", "b"])).json()
    wrong = await scorer.post("/score", text_1=["q", "r"], text_2=["a", "b", "c"])
    assert [row["score"] for row in one["data"]] == pytest.approx([0.03, 0.01])
    assert one["data"][0].keys() == {"index", "object", "score"}
    assert [row["score"] for row in each["data"]] == pytest.approx([0.02, 0.01])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text_1")
    first, second = scorer.workers[0].attempts
    assert inputs_of(first)[0] == ids("q") + ids("abc")[1:]
    assert first.job.pooling is not None
    assert unpack_token_ids(first.job.pooling.first_lengths) == [3, 3]
    assert one["usage"]["prompt_tokens"] == sum(map(len, inputs_of(first)))
    records = await scorer.records(2)
    assert [(record.endpoint, record.prompt_tokens) for record in records] == [
        ("score", first.job.prompt_tokens),
        ("score", second.job.prompt_tokens),
    ]


async def test_reranking_sorts_by_relevance(scorer: LocalGateway) -> None:
    body = {"query": "q", "documents": ["ab", {"text": "abcd"}, "a", "abc"], "top_n": 3}
    answers = [(await scorer.post(path, **body)).json() for path in ("/v1/rerank", "/v2/rerank", "/rerank")]
    bare = (await scorer.post("/rerank", **{**body, "return_documents": False, "top_n": 0})).json()
    for answer in answers:
        assert [row["index"] for row in answer["results"]] == [1, 3, 0]
        assert [row["document"]["text"] for row in answer["results"]] == ["abcd", "abc", "ab"]
        assert [row["relevance_score"] for row in answer["results"]] == pytest.approx([0.04, 0.03, 0.02])
        assert answer["usage"]["total_tokens"] == scorer.workers[0].attempts[0].job.prompt_tokens
    assert [row.keys() for row in bare["results"]] == [{"index", "relevance_score"}] * 4
    assert [record.endpoint for record in await scorer.records(4)] == ["rerank"] * 4


async def test_an_embedding_model_scores_by_cosine(gateway: LocalGateway) -> None:
    scores = {"text_1": "a", "text_2": ["a", "bcd"]}
    answer = (await gateway.post("/v1/score", **scores)).json()
    ranks = {"query": "a", "documents": ["bcd", "a"]}
    ranked = (await gateway.post("/v1/rerank", **ranks)).json()
    one, other = vector_of(ids("a")), vector_of(ids("bcd"))
    dot = sum(x * y for x, y in zip(one, other, strict=True))
    cosine = dot / (sum(x * x for x in one) * sum(x * x for x in other)) ** 0.5
    assert [row["score"] for row in answer["data"]] == pytest.approx([1.0, cosine])
    assert [row["index"] for row in ranked["results"]] == [1, 0]
    assert inputs_of(gateway.workers[0].attempts[0]) == [ids("a"), ids("a"), ids("bcd")]
    assert answer["usage"]["prompt_tokens"] == 2 * len(ids("a")) + len(ids("bcd"))


async def test_a_long_pair_is_truncated_at_its_longer_text(scorer: LocalGateway) -> None:
    body = {"query": "query", "documents": ["d" * 60]}
    refused = await scorer.post("/v1/rerank", **body)
    cut = await scorer.post("/v1/rerank", **body, truncate_prompt_tokens=-1)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "documents.0")
    assert cut.status_code == 200
    [[pair]] = map(inputs_of, scorer.workers[0].attempts)
    assert len(pair) == CONTEXT
    assert pair[: len(ids("query"))] == ids("query")


async def test_an_invalid_field_is_named(scorer: LocalGateway) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/rerank", {"query": "q", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "q", "documents": [5]}, "documents.0"),
        ("/v1/rerank", {"query": "q", "documents": ["a"], "max_tokens_per_doc": 9}, "max_tokens_per_doc"),
        ("/v1/score", {"text_1": [], "text_2": ["a"]}, "text_1"),
        ("/v1/score", {"text_1": "q"}, "text_2"),
        ("/v1/score", {"text_1": "q", "text_2": "a", "use_activation": False}, "use_activation"),
    ]
    for path, fields, param in cases:
        answer = await scorer.post(path, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
