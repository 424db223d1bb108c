"""Unread and incomplete answers are limited in bytes, per tenant and in total."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from protocol.generation import TokenLogprob
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start
from tests.integration.gateway.scripted_worker import Attempt
from tests.waiting import HANGS_S, until

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
TOP = tuple((number, f"word {number}", -1.5 * number, b"word") for number in range(20))
TOKENS = 400
CHOICES = 8  # about 2 MB of log-probabilities, and 5 MB of JSON


def logprob(number: int) -> TokenLogprob:
    return TokenLogprob(number, "é", -0.001 * number, "é".encode(), TOP)


async def describe(attempt: Attempt) -> None:
    """Generate this many tokens per choice, with all log-probabilities."""
    await attempt.accept()
    for index in range(attempt.job.sampling.n):
        for number in range(TOKENS):
            end = "stop" if number == TOKENS - 1 else None
            await attempt.tokens("é", (number,), index=index, logprobs=(logprob(number),), finish_reason=end)
    await attempt.finish()


async def describe_for_ever(attempt: Attempt) -> None:
    await attempt.accept()
    while not attempt.cancelled.is_set():
        for _ in range(50):
            await attempt.tokens("é", (1,) if attempt.made_tokens < TOKENS else (), logprobs=(logprob(1),))
        await asyncio.sleep(0)
    await attempt.finish(cancelled=True)


def ask(gateway: GatewayUnderTest, **rest: Any) -> Any:
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": TOKENS, "logprobs": 20, **rest}
    return gateway.client().completions.with_raw_response.create(**body)


async def test_a_large_answer_is_sent_in_parts(start_gateway: Start) -> None:
    gateway = await start_gateway()
    await gateway.add_worker(script=describe)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S) as client:
        headers = {"authorization": f"Bearer {gateway.key}"}
        body = {
            "model": MODEL,
            "messages": HELLO,
            "max_tokens": TOKENS,
            "n": CHOICES,
            "logprobs": True,
            "top_logprobs": 20,
        }
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status_code == 200
            assert "content-length" not in response.headers
            told = json.loads(await response.aread())
    for choice in told["choices"]:
        assert choice["message"]["content"] == "é" * TOKENS
        content = choice["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == [-0.001 * number for number in range(TOKENS)]
        assert all(len(entry["top_logprobs"]) == 20 for entry in content)
    assert told["usage"]["completion_tokens"] == CHOICES * TOKENS


async def test_an_answer_beyond_a_tenants_share_ends_in_an_error(start_gateway: Start) -> None:
    gateway = await start_gateway(limits={"max_unread_bytes": 1_000_000})
    worker = await gateway.add_worker(script=describe_for_ever)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(gateway)
    assert caught.value.code == "answer_too_large"
    [record] = await gateway.records()
    assert (record.outcome, record.error_code, record.http_status) == ("failed", "answer_too_large", 400)
    assert record.completion_tokens == worker.attempts[0].made_tokens


async def test_unread_streams_stay_within_their_share(start_gateway: Start) -> None:
    """40 streams once took 1.2 GB within a minute."""
    gateway = await start_gateway(limits={"max_unread_bytes": 8_000_000})
    worker = await gateway.add_worker(script=describe_for_ever)
    body = {"model": MODEL, "messages": HELLO, "stream": True, "logprobs": True, "top_logprobs": 20}
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.key}\r\n"
    payload = json.dumps(body).encode()
    writers = []
    for _ in range(4):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
        writers.append(writer)
    await until(lambda: len(worker.attempts) == 4 and all(attempt.cancelled.is_set() for attempt in worker.attempts))
    records = await gateway.records(4)
    assert {record.error_code for record in records} == {"slow_client"}
    for writer in writers:
        writer.close()
