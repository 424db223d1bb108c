"""Embeddings and reranking as users meet them: real engines behind `spillway up`, the official clients."""

import json
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from pydantic import SecretStr

from tests.acceptance.system import System, run_system
from tests.unit.engine.pooled_models import (
    reference_embedding,
    reference_logit,
    save_embedder,
    save_scorer,
    word_tokenizer,
)
from tests.waiting import HANGS_S

TEXTS = ["the gateway", "a queue of the worker engine", "water", "rain river dam lake water " * 6]
CONFIG = """
[models.tiny-bert]
aliases = ["text-embedding-3-small"]
[models.tiny-reranker]
[models.fake]

[pools.fake]
models = ["fake"]
workers = 2
[pools.fake.engine]
kind = "scripted"
task = "embed"
dimensions = 4
max_sequences = 1
inter_token_s = 0.02
faults_from_prompt = true

[pools.embeddings]
models = ["tiny-bert"]
engine = { kind = "spillway", path = "BERT", threads = 1 }

[pools.reranker]
models = ["tiny-reranker"]
engine = { kind = "spillway", path = "SCORER", task = "score", threads = 1 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_embedder(folder / "bert", "bert", pooling="pooling_mode_mean_tokens")
    save_scorer(folder / "scorer", "bert")
    return folder


@pytest.fixture(scope="module")
def system(folder: Path) -> Iterator[System]:
    config = CONFIG.replace("BERT", str(folder / "bert")).replace("SCORER", str(folder / "scorer"))
    (folder / "spillway.toml").write_text(config)
    yield from run_system(folder / "data", ["--config", str(folder / "spillway.toml")])


@pytest.fixture
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key=system.api_key, max_retries=3) as client:
        yield client


def reference(folder: Path, text: str) -> torch.Tensor:
    return reference_embedding(folder / "bert", word_tokenizer()(text)["input_ids"], "mean")


def test_the_official_client(client: openai.OpenAI, folder: Path) -> None:
    answer = client.embeddings.create(model="text-embedding-3-small", input=TEXTS)  # as base64, by default
    plain = client.embeddings.create(model="tiny-bert", input=TEXTS, encoding_format="float")
    ids = [word_tokenizer()(text)["input_ids"] for text in TEXTS]
    by_ids = client.embeddings.create(model="tiny-bert", input=ids)
    for text, *rows in zip(TEXTS, answer.data, plain.data, by_ids.data, strict=True):
        for row in rows:
            assert torch.dist(torch.tensor(row.embedding), reference(folder, text)) < 1e-5
    assert answer.usage.prompt_tokens == by_ids.usage.prompt_tokens == sum(map(len, ids))


def test_langchain(system: System, folder: Path) -> None:
    from langchain_openai import OpenAIEmbeddings  # takes seconds, of each process that imports this file

    embeddings = OpenAIEmbeddings(
        model="tiny-bert",
        base_url=f"{system.base_url}/v1",
        api_key=SecretStr(system.api_key),
        check_embedding_ctx_length=False,  # or it would send OpenAI's own token ids
    )
    found = embeddings.embed_documents(TEXTS)
    assert torch.dist(torch.tensor(found[1]), reference(folder, TEXTS[1])) < 1e-5
    assert torch.dist(torch.tensor(embeddings.embed_query(TEXTS[2])), reference(folder, TEXTS[2])) < 1e-5


def test_reranking(system: System, folder: Path) -> None:
    with system.http() as http:
        body = {"model": "tiny-reranker", "query": TEXTS[0], "documents": TEXTS[1:]}
        answer = http.post("/v1/rerank", json=body).raise_for_status().json()
    expected = []
    for document in TEXTS[1:]:
        encoded = word_tokenizer()(TEXTS[0], document, return_token_type_ids=True)
        first_tokens = encoded["token_type_ids"].count(0)
        assert 0 < first_tokens < len(encoded["input_ids"])
        logit = reference_logit(folder / "scorer", encoded["input_ids"], first_tokens)
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


def test_many_at_once_are_each_answered_and_counted(client: openai.OpenAI, folder: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(
            threads.map(lambda i: client.embeddings.create(model="tiny-bert", input=TEXTS[i % 4 :]), range(40))
        )
    for number, answer in enumerate(answers):
        assert len(answer.data) == 4 - number % 4
        vector = torch.tensor(answer.data[0].embedding)
        assert torch.dist(vector, reference(folder, TEXTS[number % 4])) < 1e-5


def test_the_wrong_use_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="makes embeddings; use /v1/embeddings"):
        client.chat.completions.create(model="tiny-bert", messages=[{"role": "user", "content": "hello"}])


def test_the_printed_curl_asks_for_what_the_model_can_do(system: System) -> None:
    printed = system.output[system.output.index("curl -N") :]
    assert "/v1/embeddings" in printed
    arguments = shlex.split(printed.strip().replace("\\\n", " "))
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=HANGS_S)
    assert len(json.loads(done.stdout)["data"]) == 2
