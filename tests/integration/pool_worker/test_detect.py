"""Detection of the server at a URL, from the answers in each one's documentation."""

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.ports import free_port
from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.sidecar import readiness
from pool_worker.engines.sidecar.detect import detect
from pool_worker.settings import ServerEngineSettings
from tests.integration.pool_worker.metadata_server import Answer, MetadataServer


def owned_by(owner: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": owner}]}


ANSWERS: dict[str, dict[str, dict[str, Any]]] = {
    "vllm": {"/v1/models": owned_by("vllm"), "/version": {"version": "0.32.0"}},
    "sglang": {"/v1/models": owned_by("sglang"), "/get_model_info": {"model_path": "m"}},
    "llamacpp": {"/v1/models": owned_by("llamacpp"), "/props": {"total_slots": 4}},
    "lmdeploy": {"/v1/models": owned_by("lmdeploy")},
    "trtllm": {"/v1/models": owned_by("tensorrt_llm")},
    "tgi": {"/v1/models": owned_by("m"), "/info": {"model_id": "m", "max_total_tokens": 4096}},
    "ollama": {"/v1/models": owned_by("library"), "/api/version": {"version": "0.12.0"}},
    "triton": {"/v2": {"name": "triton", "version": "2.51.0", "extensions": []}},
}


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer() as server:
        yield server


def settings(url: str, **more: Any) -> ServerEngineSettings:
    return ServerEngineSettings(kind="auto", url=url, tokenizer="", **{"ready_s": 20.0, **more})


@pytest.mark.parametrize("kind", ANSWERS)
async def test_each_server_kind_is_detected(server: MetadataServer, kind: str) -> None:
    server.answers = {f"GET {path}": Answer(200, json.dumps(answer)) for path, answer in ANSWERS[kind].items()}
    assert await detect(settings(server.url, api_key="secret")) == kind
    assert {question.headers["authorization"] for question in server.questions} == {"Bearer secret"}


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"data": []}', '{"data": [7]}', "x" * 2_000_000])
async def test_an_unidentified_server_is_an_error(server: MetadataServer, body: str) -> None:
    server.answers = {"GET /v1/models": Answer(200, body)}
    with pytest.raises(EngineDiedError, match="--engine-kind"):
        await detect(settings(server.url))


async def test_a_loading_server_is_awaited_and_the_log_says_why(
    server: MetadataServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.answers = {"GET /v1/models": Answer(503, '{"error": {"message": "Loading model"}}')}
    wait = readiness.Readiness(server.url, 20.0, period_s=0.01, first_log_s=0.0)
    detecting = asyncio.create_task(detect(settings(server.url), wait))
    while len(server.questions) < 3:
        await asyncio.sleep(0.01)
    server.answers = {"GET /v1/models": Answer(200, json.dumps(owned_by("llamacpp")))}
    assert await detecting == "llamacpp"
    (line,) = [record.getMessage() for record in caplog.records if record.name == readiness.__name__]  # not each time
    assert "503" in line
    assert "(limit 20 s)" in line


async def test_an_unreachable_server_is_awaited_for_ready_s() -> None:
    with pytest.raises(EngineDiedError, match=r"is not ready after \d+ s: All connection attempts failed"):
        await detect(settings(f"http://127.0.0.1:{free_port()}", ready_s=0.0))
