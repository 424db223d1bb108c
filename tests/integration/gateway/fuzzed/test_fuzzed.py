"""The whole OpenAPI document, asked of a running gateway, in all the ways that schemathesis finds.

`make fuzz-api` runs it for longer: FUZZ_EXAMPLES for each operation, from FUZZ_SEED on. It also tries the bounds of
every field where these are many: of requests for text (messages alone take schemathesis most of a minute; Responses
stands for them), and of the paths that are other names of a path.
"""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from db.accounts.keys import Grant, create_key
from db.accounts.principal import SCOPES
from db.engine import create_engine
from gateway.settings import ModelSettings
from pool_worker.settings import ScriptedEngineSettings, Task, WorkerSettings
from tests.integration.gateway.conftest import MODEL, PEPPER, GatewayUnderTest, Start
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.unit.gateway.api.nasty import NASTY
from tests.unit.gateway.api.test_nasty_bodies import MODELS as MODELS_OF
from tests.waiting import HANGS_S, until

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "response_headers_conformance", "unsupported_method", "allow_header_conformance",
)  # fmt: skip
EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "2")
WITHOUT_BOUNDS = """
[[operations]]
include-path-regex = "^/v1/(messages|chat|completions)|^/tokenize|^/(v2/)?rerank|^/score"
phases.coverage.enabled = false
"""
CONFIG = "" if "FUZZ_EXAMPLES" in os.environ else WITHOUT_BOUNDS
MODEL_OF = {
    **dict.fromkeys(
        ("ChatCompletionRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest", "CountTokensRequest",
         "TokenizeRequest", "DetokenizeRequest"),
        MODEL,
    ),
    "EmbeddingRequest": "vectors", "ScoreRequest": "scores", "RerankRequest": "scores",
}  # fmt: skip
SEED = os.environ.get("FUZZ_SEED", "1")
MODELS: dict[str, Task] = {MODEL: "generate", "vectors": "embed", "scores": "score"}
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "Hi"}}


@pytest.fixture
async def token(sqlite_url: str) -> str:
    """A key that may do everything."""
    engine = create_engine(sqlite_url)
    _, token = await create_key(engine, "fuzz", PEPPER, Grant(scopes=tuple(SCOPES)))
    await engine.dispose()
    return token


@pytest.fixture
async def gateway(start_gateway: Start, token: str, nats_url: str) -> AsyncIterator[GatewayUnderTest]:
    """With a worker of the scripted engine for each kind of model."""
    models = {name: ModelSettings() for name in MODELS}
    gateway = await start_gateway(with_card=False, models=models, console={})
    async with contextlib.AsyncExitStack() as workers:
        for name, task in MODELS.items():
            settings = WorkerSettings(
                worker_id=f"{task}.0",
                pool=task,
                models=(name,),
                nats_urls=(nats_url,),
                engine=ScriptedEngineSettings(task=task),
            )
            await workers.enter_async_context(running_worker(settings))
        client = gateway.client()
        for name in MODELS:
            await until(partial(_is_ready, client, name))
        yield gateway


async def _is_ready(client: openai.AsyncOpenAI, name: str) -> bool:
    return (await client.models.retrieve(name)).model_dump()["context_length"] is not None


@pytest.fixture
async def http(gateway: GatewayUnderTest, token: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        yield client


async def _document(http: httpx.AsyncClient) -> dict[str, Any]:
    """The gateway's own, with the names of what there is where any name would be a 404."""
    document: dict[str, Any] = (await http.get("/openapi.json")).json()
    lines = {"file": ("lines.jsonl", json.dumps(LINE).encode())}
    file = (await http.post("/v1/files", files=lines, data={"purpose": "batch"})).json()
    wanted = {"input_file_id": file["id"], "endpoint": LINE["url"]}
    batch = (await http.post("/v1/batches", json=wanted)).json()
    kept = (await http.post("/v1/responses", json={"model": MODEL, "input": "Hi", "background": True})).json()
    key = (await http.post("/admin/v1/keys", json={"name": "spare"})).json()
    known = {
        "name": [MODEL, "nobody"],
        "file_id": [file["id"], "file-no"],
        "batch_id": [batch["id"], "batch_no"],
        "response_id": [kept["id"], "resp_no"],
        "reference": [key["id"], "nobody"],
    }
    for operation in _operations(document):
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "path" and parameter["name"] in known:
                parameter["schema"] = {"type": "string", "enum": known[parameter["name"]]}
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        for example in body.get("examples", {}).values():
            model = MODEL_OF.get(body["schema"]["$ref"].rpartition("/")[2])
            example["value"] |= wanted if model is None and "endpoint" in example["value"] else {}
            example["value"] |= {} if model is None else {"model": model}
    schemas = document["components"]["schemas"]
    for name, model in MODEL_OF.items():
        schemas[name]["properties"]["model"] = {"type": "string", "enum": [model, "nobody"]}
    return document


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for operations in document["paths"].values():
        yield from operations.values()


async def _found(document: Path, url: str, token: str) -> str:
    """What schemathesis has found; empty if nothing."""
    config = document.with_name("schemathesis.toml")
    config.write_text(CONFIG)
    command = [
        str(Path(sys.executable).with_name("st")), "--config-file", str(config), "run", str(document), "--url", url,
        "--header", f"Authorization: Bearer {token}", "--seed", SEED, "--phases", "examples,coverage,fuzzing",
        "--max-examples", EXAMPLES, "--checks", ",".join(CHECKS), "--continue-on-failure", "--warnings", "off",
        "--request-timeout", str(HANGS_S), "--suppress-health-check", "all",
    ]  # fmt: skip
    run = await asyncio.to_thread(
        subprocess.run, command, cwd=document.parent, capture_output=True, text=True, check=False
    )
    return "" if run.returncode == 0 else run.stdout + run.stderr


async def test_every_operation(http: httpx.AsyncClient, token: str, tmp_path: Path) -> None:
    document = tmp_path / "openapi.json"
    document.write_text(json.dumps(await _document(http)))
    assert not await _found(document, str(http.base_url), token)


@pytest.fixture
async def paths(start_gateway: Start, token: str) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, Any]]]:
    """A client without a key of a gateway without models, and what its document says."""
    gateway = await start_gateway(with_card=False)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        yield client, (await client.get("/openapi.json")).json()["paths"]


async def test_without_a_key(paths: tuple[httpx.AsyncClient, dict[str, Any]]) -> None:
    stranger, documented = paths
    faults = []
    for path, operations in documented.items():
        for method, operation in operations.items():
            for headers in ({}, {"authorization": "Bearer sk-no"}):
                answer = await stranger.request(method, re.sub(r"{\w+}", "x", path), headers=headers)
                expected = httpx.codes.OK if operation.get("security") == [] else httpx.codes.UNAUTHORIZED
                if answer.status_code != expected:
                    faults.append(f"{method} {path} {headers}: {answer.status_code} {answer.text}")
    assert not faults, "\n".join(faults)


async def test_nasty_bodies(paths: tuple[httpx.AsyncClient, dict[str, Any]], token: str) -> None:
    """What no schema suggests, at every further route that takes JSON (tests/unit/gateway/api/test_nasty_bodies.py)."""
    client, documented = paths
    faults = []
    for path, operations in documented.items():
        operation = operations.get("post", {})
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        for content in NASTY if body and path not in MODELS_OF else ():
            answer = await client.post(path, content=content, headers={"authorization": f"Bearer {token}"})
            if answer.status_code >= 500 or str(answer.status_code) not in operation["responses"]:
                faults.append(f"{path} {content[:200]!r}: {answer.status_code} {answer.text[:200]}")
    assert not faults, "\n".join(faults)
