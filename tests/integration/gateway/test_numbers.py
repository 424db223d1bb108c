"""NaN, infinity and 1e400 are no JSON: every API says so, and names the field."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from db.accounts.principal import ADMIN, INFERENCE
from tests.integration.gateway.conftest import MODEL, Share
from tests.waiting import HANGS_S

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["Hi"]},
    "/v1/score": {"text_1": "Hi", "text_2": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
}
NUMBERS = ("NaN", "-Infinity", "1e400")


@pytest_asyncio.fixture(loop_scope="module")
async def client(share_gateway: Share) -> AsyncIterator[httpx.AsyncClient]:
    gateway = await share_gateway(console={})
    _, token = await gateway.make_key(scopes=(ADMIN, INFERENCE))
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        yield client


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("path", BODIES)
async def test_every_api_refuses_it_by_name(client: httpx.AsyncClient, path: str, number: str) -> None:
    body = json.dumps({"model": MODEL, **BODIES[path], "junk": {"x": "?"}}).replace('"?"', number)
    answer = await client.post(path, content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "'junk.x'" in error["message"]
    assert error.get("param", "junk.x") == "junk.x"


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("path", ["/admin/v1/teams", "/admin/v1/keys"])
async def test_the_admin_api_refuses_it_by_name(client: httpx.AsyncClient, path: str, number: str) -> None:
    answer = await client.post(path, content=f'{{"name": "blue", "weight": {number}}}')
    assert answer.status_code == 400
    assert "'weight'" in answer.text


@pytest.mark.parametrize("number", NUMBERS)
async def test_a_batch_of_messages_refuses_it(client: httpx.AsyncClient, number: str) -> None:
    params = json.dumps({"model": MODEL, **BODIES["/v1/messages"], "junk": "?"}).replace('"?"', number)
    answer = await client.post(
        "/v1/messages/batches", content=f'{{"requests": [{{"custom_id": "a", "params": {params}}}]}}'
    )
    assert answer.status_code == 400


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("size", [1, 20_000])
async def test_a_conversation_that_goes_on_refuses_it(client: httpx.AsyncClient, number: str, size: int) -> None:
    """Also where the body is read before the stored conversation is."""
    body = json.dumps({"model": MODEL, "input": "x" * size, "previous_response_id": "resp_1", "junk": "?"})
    answer = await client.post("/v1/responses", content=body.replace('"?"', number))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "junk")
