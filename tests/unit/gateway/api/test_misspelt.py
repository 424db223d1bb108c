"""Unknown fields that resemble a known one are named in a header, or refused in strict mode."""

import json
from typing import Any

import pytest

from gateway.api.anthropic_messages import MessagesRequest
from gateway.api.fields import Body
from gateway.api.misspelt import MAX_COMPARED, misspelt_fields
from gateway.api.openai_responses import ResponsesRequest
from gateway.api.schema import ChatCompletionRequest, CompletionRequest
from gateway.api.vectors import EmbeddingRequest, RerankRequest
from tests.integration.gateway.scripted_worker import Attempt
from tests.unit.gateway.api.page import page
from tests.unit.gateway.conftest import Start
from tests.unit.gateway.local_gateway import MODEL

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": HELLO}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/v1/messages": (MessagesRequest, {"messages": HELLO, "max_tokens": 5}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "Hi"}),
    "/v1/rerank": (RerankRequest, {"query": "Hi", "documents": ["a"]}),
}
NEAR = [
    ("/v1/chat/completions", "max_token", "max_tokens"),
    ("/v1/chat/completions", "maxTokens", "max_tokens"),
    ("/v1/chat/completions", "max_new_tokens", "max_tokens"),
    ("/v1/chat/completions", "temprature", "temperature"),
    ("/v1/chat/completions", "top-p", "top_p"),
    ("/v1/completions", "stop_string", None),
    ("/v1/completions", "streams", "stream"),
    ("/v1/messages", "stop_sequence", "stop_sequences"),
    ("/v1/responses", "max_output_token", "max_output_tokens"),
    ("/v1/embeddings", "dimension", "dimensions"),
    ("/v1/rerank", "topN", "top_n"),
    ("/v1/chat/completions", "top_a", None),
    ("/v1/chat/completions", "anything", None),
    ("/v1/chat/completions", "max_token\r\nx: y", None),
]


async def says_a(attempt: Attempt) -> None:
    await attempt.accept()
    await attempt.tokens("a", finish_reason="stop")
    await attempt.finish()


def body_of(path: str, **fields: Any) -> Body:
    kind, body = BODIES[path]
    return kind.model_validate_json(json.dumps({"model": MODEL, **body, **fields}))


@pytest.mark.parametrize(("path", "name", "known"), NEAR)
def test_similar_names(path: str, name: str, known: str | None) -> None:
    assert misspelt_fields(body_of(path, **{name: 1})) == ({} if known is None else {name: known})


def test_a_known_field_that_is_set_is_not_suggested() -> None:
    assert misspelt_fields(body_of("/v1/chat/completions", max_token=1, max_tokens=2)) == {}


def test_comparisons_are_bounded() -> None:
    unknown = {f"unknown_{number}": 1 for number in range(MAX_COMPARED)}
    assert misspelt_fields(body_of("/v1/chat/completions", **unknown, max_token=1)) == {}


def test_no_api_field_counts_as_misspelled() -> None:
    sections = {route.removeprefix("POST "): section for route, section in page.sections().items()}
    for path in BODIES.keys() & sections.keys():
        kind, _ = BODIES[path]
        others = {name: 1 for where, name in sections[path] if not where and name not in kind.model_fields}
        for name in others:
            assert misspelt_fields(body_of(path, **{name: 1})) == {}, (path, name)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_a_misspelled_field_is_named_in_a_header(start_local: Start, path: str) -> None:
    gateway = await start_local()
    await gateway.add_worker(script=says_a)
    _, body = BODIES[path]
    good = await gateway.post(path, **body, anything=1)
    answer = await gateway.post(path, **body, temprature=0.5)
    assert (good.status_code, answer.status_code) == (200, 200), answer.text
    assert "x-spillway-adapted" not in good.headers
    assert answer.headers["x-spillway-adapted"] == "field-ignored:temprature;did-you-mean=temperature"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/embeddings"])
async def test_a_misspelled_field_is_refused_in_strict_mode(start_local: Start, path: str) -> None:
    gateway = await start_local(strict_fields=True)
    known = "dimensions" if path == "/v1/embeddings" else "temperature"
    answer = await gateway.post(path, **BODIES[path][1], anything=1, **{f"{known}s": 1})
    assert answer.status_code == 400
    assert f"Unknown parameter: '{known}s'. Did you mean '{known}'?" in answer.text
    if path != "/v1/messages":
        assert answer.json()["error"]["code"] == "unknown_parameter"
