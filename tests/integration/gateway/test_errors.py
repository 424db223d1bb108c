"""Errors in OpenAI's envelope, as clients receive them."""

import asyncio
import logging
from typing import Any

import httpx
import openai
import pytest

from db.accounts.token import new_token
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start
from tests.integration.gateway.scripted_worker import Attempt, until_cancelled
from tests.integration.queued_jobs import until_queued
from tests.waiting import HANGS_S, until

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
BOUNDS: dict[str, Any] = {"max_body_bytes": 20_000, "max_messages": 3, "max_prompt_logprobs": 200}


async def send(gateway: GatewayUnderTest, path: str = CHAT, **request: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {gateway.key}", **request.pop("headers", {})}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        return await client.request(request.pop("method", "POST"), path, headers=headers, **request)


def error_of(response: httpx.Response) -> tuple[int, str | None, str | None]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "doc_url"}
    assert error["doc_url"] == f"/docs/errors#{error['code'] or 'malformed_json'}"
    assert error["message"]
    assert response.headers["x-request-id"].startswith("req_")
    assert "openai-processing-ms" in response.headers
    return response.status_code, error["code"], error["param"]


async def test_a_key_in_the_wrong_place_is_neither_answered_nor_logged(
    share_gateway: Share, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gateway = await share_gateway(limits=BOUNDS, console={})
    token, name = new_token(), {"authorization": f"Bearer {gateway.key}"}
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO}
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", f"/{token}", {}),
        ("GET", f"/v1/models/{token}", {}),
        ("GET", f"/v1/models/{token.replace('-', '%2D')}", {}),
        ("PUT", f"/v1/models/{token}", {}),
        ("GET", f"/v1/responses/{token}", {}),
        ("GET", f"/v1/files/{token}", {}),
        ("GET", f"/v1/batches/{token}", {}),
        ("GET", f"/v1/batches?limit={token}", {}),
        ("GET", f"/admin/v1/keys/{token}", {}),
        ("GET", f"/dashboard/keys/{token}?a={token}", {"headers": {**name, "accept": "text/html"}}),
        ("GET", f"/login?next=/{token}", {"headers": {"accept": "text/html"}}),
        ("POST", CHAT, {"json": {**body, "model": token}}),
        ("POST", CHAT, {"json": {**body, token: 1, "tool_choice": token}}),
        ("POST", CHAT, {"json": {**body, "messages": [{"role": token, "content": "x"}]}}),
        ("POST", CHAT, {"json": body, "headers": {"authorization": f"Bearer {token}"}}),
        ("POST", "/v1/messages", {"json": {**body, "model": token, "max_tokens": 1}}),
        ("POST", "/v1/responses", {"json": {"model": MODEL, "input": "x", "previous_response_id": token}}),
        ("POST", "/v1/embeddings", {"json": {"model": token, "input": "x"}}),
    ]
    for method, path, rest in asked:
        answer = await send(gateway, path, method=method, **{"headers": name, **rest})
        assert token not in answer.text, (method, path)
        assert token not in str(answer.headers), (method, path)
    refused = [vars(record)["fields"] for record in caplog.records if record.message == "request refused"]
    assert {"/v1/models/sk-sw-***", "/v1/files/sk-sw-***"} <= {fields["path"] for fields in refused}
    assert token not in str(refused)


async def test_refused_before_any_worker_is_asked(share_gateway: Share) -> None:
    gateway = await share_gateway(limits=BOUNDS)
    body: dict[str, Any] = {"model": MODEL, "messages": HELLO}

    async def of(change: dict[str, Any], path: str = CHAT) -> tuple[int, str | None, str | None]:
        return error_of(await send(gateway, path, json={**body, **change}))

    no_key = await send(gateway, json=body, headers={"authorization": ""})
    assert error_of(no_key) == (401, "invalid_api_key", None)
    assert no_key.headers["x-should-retry"] == "false"
    wrong_key = await send(gateway, json=body, headers={"authorization": "Bearer sk-wrong"})
    assert error_of(wrong_key) == (401, "invalid_api_key", None)
    assert error_of(await send(gateway, content=b"{")) == (400, None, None)
    assert error_of(await send(gateway, content=b"[]")) == (400, "invalid_type", None)
    assert await of({"model": "nobody"}) == (404, "model_not_found", "model")
    assert await of({"messages": [{"role": 5, "content": "x"}]}) == (400, "invalid_value", "messages.0.role")
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert await of({"messages": [*HELLO, image]}) == (400, "invalid_value", "messages.1.content")
    assert await of({"messages": HELLO * 4}) == (400, "invalid_value", "messages")
    assert await of({"temperature": "hot"}) == (400, "invalid_type", "temperature")
    assert await of({"n": 17}) == (400, "invalid_value", "n")
    unique = {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}
    assert await of(unique) == (400, "unsupported_schema_keyword", "structured_outputs")
    assert await of({"max_tokens": 500}) == (400, "context_length_exceeded", "max_tokens")
    assert await of({"prompt_logprobs": 19}) == (400, "invalid_value", "prompt_logprobs")
    echo = {"prompt": [1] * 101, "echo": True, "logprobs": 1, "max_tokens": 0}
    assert await of(echo, "/v1/completions") == (400, "invalid_value", "logprobs")
    long = [{"role": "user", "content": "x" * 600}]
    assert await of({"messages": long}) == (400, "context_length_exceeded", "messages")
    too_large = await send(gateway, content=b'"' + b"x" * 20_000 + b'"')
    assert error_of(too_large) == (413, "request_too_large", None)
    assert error_of(await send(gateway, method="GET")) == (405, "method_not_allowed", None)
    assert error_of(await send(gateway, "/v1/models", json={})) == (405, "method_not_allowed", None)
    assert error_of(await send(gateway, "/v1/nothing", json={})) == (404, "unknown_url", None)
    assert error_of(await send(gateway, "/v1/models", method="GET", headers={"authorization": ""}))[0] == 401
    assert error_of(await send(gateway, f"/v1/models/{MODEL}x", method="GET"))[:2] == (404, "model_not_found")


async def test_body_too_large_while_reading(share_gateway: Share) -> None:
    """Chunked bodies have no content-length."""
    gateway = await share_gateway(limits=BOUNDS)

    async def pieces() -> Any:
        for _ in range(30):
            yield b"x" * 1000

    assert error_of(await send(gateway, content=pieces())) == (413, "request_too_large", None)


async def test_model_not_ready(start_gateway: Start) -> None:
    gateway = await start_gateway(with_card=False)
    response = await send(gateway, json={"model": MODEL, "messages": HELLO})
    assert error_of(response) == (503, "model_not_ready", None)
    assert "no worker has published its tokenizer and context length. Start a worker of a pool" in response.text
    assert 0 < int(response.headers["retry-after"]) <= 60
    ready = await send(gateway, "/readyz", method="GET")
    assert (ready.status_code, ready.json()["models_not_ready"]) == (200, [MODEL])


async def test_wrong_key_in_the_official_client(share_gateway: Share) -> None:
    gateway = await share_gateway()
    with pytest.raises(openai.AuthenticationError) as caught:
        await gateway.client(api_key="sk-wrong").models.list()
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", ["invalid_request", "grammar_too_complex"])
async def test_refusal_by_the_worker_is_a_400(share_gateway: Share, stream: bool, code: str) -> None:
    gateway = await share_gateway(timeouts={"headers_grace_s": 20})

    async def refuse(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.fail(code, "no such token", retryable=False, param="logit_bias")

    await gateway.add_worker(script=refuse)
    response = await send(gateway, json={"model": MODEL, "messages": HELLO, "stream": stream})
    assert error_of(response) == (400, code, "logit_bias")
    [record] = await gateway.records()
    assert (record.outcome, record.http_status, record.error_code) == ("failed", 400, code)


async def read_lines(response: httpx.Response, into: list[str]) -> None:
    async for line in response.aiter_lines():
        into.append(line)  # noqa: PERF401  # what came before the error counts


async def test_error_after_the_first_byte_breaks_the_stream_off(share_gateway: Share) -> None:
    gateway, begun = await share_gateway(), asyncio.Event()

    async def die(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("Hel")
        await begun.wait()
        await attempt.fail("engine_error", "out of luck", retryable=False)

    await gateway.add_worker(script=die)
    lines: list[str] = []
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        body = {"model": MODEL, "messages": HELLO, "stream": True}
        headers = {"authorization": f"Bearer {gateway.key}"}
        async with client.stream("POST", CHAT, json=body, headers=headers) as response:
            assert response.status_code == 200
            begun.set()
            with pytest.raises(httpx.RemoteProtocolError):
                await read_lines(response, lines)
    events = [line for line in lines if line]
    assert '"code":"engine_error"' in events[-1]
    assert not any("[DONE]" in event for event in events)
    begun.clear()
    stream = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    begun.set()
    with pytest.raises(openai.APIError, match="out of luck"):
        async for _ in stream:
            pass
    records = await gateway.records(2)
    assert [(r.outcome, r.http_status, r.completion_tokens) for r in records] == [("failed", 200, 1)] * 2


async def test_queue_wait_timeout(start_gateway: Start) -> None:
    gateway = await start_gateway(timeouts={"queue_wait_s": 0.5})
    response = await send(gateway, json={"model": MODEL, "messages": HELLO})
    assert error_of(response) == (503, "queue_wait_timeout", None)
    assert response.headers["retry-after"]
    await until_queued(gateway.bus, 0)  # otherwise the worker may still take it
    await gateway.add_worker()
    [record] = await gateway.records()
    assert (record.outcome, record.error_code, record.completion_tokens) == ("failed", "queue_wait_timeout", 0)
    assert gateway.workers[0].attempts == []


@pytest.mark.parametrize("header", ["x-stainless-read-timeout", "x-stainless-timeout"])  # Python and Node.js
async def test_the_clients_own_timeout_bounds_the_wait(share_gateway: Share, header: str) -> None:
    gateway = await share_gateway()
    response = await send(gateway, json={"model": MODEL, "messages": HELLO}, headers={header: "0.4"})
    assert error_of(response) == (503, "queue_wait_timeout", None)


@pytest.mark.parametrize(
    ("limits", "code", "tokens"),
    [
        ({"first_token_s": 0.4}, "first_token_timeout", 0),
        ({"inter_token_s": 0.4}, "inter_token_timeout", 1),
        ({"total_s": 0.6}, "total_timeout", 1),
    ],
)
async def test_running_timeouts(start_gateway: Start, limits: dict[str, float], code: str, tokens: int) -> None:
    gateway = await start_gateway(timeouts=limits)

    async def stall(attempt: Attempt) -> None:
        await attempt.accept()
        if tokens:
            await attempt.tokens("x")
        await attempt.cancelled.wait()
        await attempt.finish(cancelled=True)

    worker = await gateway.add_worker(script=stall)
    response = await send(gateway, json={"model": MODEL, "messages": HELLO})
    assert error_of(response) == (504, code, None)
    await until(worker.attempts[0].cancelled.is_set)
    [record] = await gateway.records()
    assert (record.outcome, record.error_code, record.completion_tokens) == ("failed", code, tokens)


async def test_queue_full(start_gateway: Start) -> None:
    gateway = await start_gateway(queue={"max_jobs": 1}, timeouts={"queue_wait_s": 5.0})
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        headers = {"authorization": f"Bearer {gateway.key}"}
        async with client.stream("POST", CHAT, json=body, headers=headers) as first:
            assert first.status_code == 200  # waits in the queue
            second = await send(gateway, json=body)
            assert error_of(second) == (503, "queue_full", None)
            assert 0 < int(second.headers["retry-after"]) <= 60


async def test_in_flight_limit(start_gateway: Start) -> None:
    gateway = await start_gateway(limits={"max_in_flight": 1})
    worker = await gateway.add_worker(script=until_cancelled)
    stream = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    response = await send(gateway, json={"model": MODEL, "messages": HELLO})
    assert error_of(response) == (503, "overloaded", None)
    assert response.headers["retry-after"]
    ready = await send(gateway, "/readyz", method="GET")  # still ready: it refuses what it cannot hold
    assert (ready.status_code, ready.json()["status"], ready.json()["missing"]) == (200, "degraded", ["overloaded"])
    await stream.close()
    await until(worker.attempts[0].cancelled.is_set)
