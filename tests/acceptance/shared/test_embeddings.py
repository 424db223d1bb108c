"""Embeddings and reranking as users meet them: real engines behind `spillway up`, the official clients."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch

from tests.acceptance.system import System
from tests.unit.engine.pooled_models import (
    reference_embedding,
    reference_logit,
    word_tokenizer,
)

TEXTS = ["the gateway", "a queue of the worker engine", "water", "rain river dam lake water " * 6]


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key=system.api_key, max_retries=3) as client:
        yield client


def reference(models: Path, text: str) -> torch.Tensor:
    return reference_embedding(models / "bert", word_tokenizer()(text)["input_ids"], "mean")


def test_the_official_client(client: openai.OpenAI, models: Path) -> None:
    answer = client.embeddings.create(model="text-embedding-3-small", input=TEXTS)  # as base64, by default
    plain = client.embeddings.create(model="tiny-bert", input=TEXTS, encoding_format="float")
    ids = [word_tokenizer()(text)["input_ids"] for text in TEXTS]
    by_ids = client.embeddings.create(model="tiny-bert", input=ids)
    for text, *rows in zip(TEXTS, answer.data, plain.data, by_ids.data, strict=True):
        for row in rows:
            assert torch.dist(torch.tensor(row.embedding), reference(models, text)) < 1e-5
    assert answer.usage.prompt_tokens == by_ids.usage.prompt_tokens == sum(map(len, ids))


def test_reranking(system: System, models: Path) -> None:
    with system.http() as http:
        body = {"model": "tiny-reranker", "query": TEXTS[0], "documents": TEXTS[1:]}
        answer = http.post("/v1/rerank", json=body).raise_for_status().json()
    expected = []
    for document in TEXTS[1:]:
        encoded = word_tokenizer()(TEXTS[0], document, return_token_type_ids=True)
        first_tokens = encoded["token_type_ids"].count(0)
        assert 0 < first_tokens < len(encoded["input_ids"])
        logit = reference_logit(models / "scorer", encoded["input_ids"], first_tokens)
        expected.append(float(torch.sigmoid(torch.tensor(logit))))
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [row["index"] for row in answer["results"]] == order
    assert [row["relevance_score"] for row in answer["results"]] == pytest.approx(sorted(expected)[::-1], abs=1e-5)


def test_a_worker_dies_in_the_middle_and_nobody_notices(client: openai.OpenAI, system: System) -> None:
    texts = [f"text {i}" for i in range(30)]
    whole = client.embeddings.create(model="fake", input=texts)
    raw = client.embeddings.with_raw_response.create(
        model="fake", input=[*texts[:15], "[[exit after=15]]", *texts[15:]]
    )
    assert raw.headers["x-spillway-attempts"] == "2"
    rows = raw.parse().data
    found = [row.embedding for row in rows[:15] + rows[16:]]
    assert found == [row.embedding for row in whole.data]


def test_many_at_once_are_each_answered_and_counted(client: openai.OpenAI, models: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(
            threads.map(lambda i: client.embeddings.create(model="tiny-bert", input=TEXTS[i % 4 :]), range(40))
        )
    for number, answer in enumerate(answers):
        assert len(answer.data) == 4 - number % 4
        vector = torch.tensor(answer.data[0].embedding)
        assert torch.dist(vector, reference(models, TEXTS[number % 4])) < 1e-5


def test_the_wrong_use_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="is an embedding model; use /v1/embeddings"):
        client.chat.completions.create(model="tiny-bert", messages=[{"role": "user", "content": "hello"}])
