"""NaN, infinity, and 1e400 are not JSON: every API refuses them by field."""

import json
from typing import Any

import pytest

from tests.unit.gateway.conftest import Start
from tests.unit.gateway.local_gateway import MODEL

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
}
NUMBERS = ("NaN", "-Infinity", "1e400")


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_refuses_invalid_numbers_by_field(start_local: Start, path: str) -> None:
    http = (await start_local()).http()
    for number in NUMBERS:
        body = json.dumps({"model": MODEL, **BODIES[path], "junk": {"x": "?"}}).replace('"?"', number)
        answer = await http.post(path, content=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert "'junk.x'" in error["message"]
        assert error.get("param", "junk.x") == "junk.x"


@pytest.mark.parametrize("size", [1, 20_000])
async def test_a_continued_conversation_refuses_invalid_numbers(start_local: Start, size: int) -> None:
    """The body is read before the stored conversation."""
    http = (await start_local()).http()
    for number in NUMBERS:
        body = json.dumps({"model": MODEL, "input": "x" * size, "previous_response_id": "resp_1", "junk": "?"})
        answer = await http.post("/v1/responses", content=body.replace('"?"', number))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "junk")
