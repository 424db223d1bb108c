"""Counting tokens over HTTP, long prompts included."""

import asyncio
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway.api.values import MAX_BODY_VALUES
from gateway.limits.sizes import MAX_DETOKENIZED_TOKENS
from protocol.nats.objects import MAX_INLINE_PROMPT_BYTES
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, card
from tests.integration.gateway.test_errors import error_of
from tests.small_tokenizer import byte_tokenizer
from tests.waiting import HANGS_S, until

LONG_CONTEXT = 2_000_000


def client_of(gateway: GatewayUnderTest) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_S, headers={"authorization": f"Bearer {gateway.key}"})


async def with_long_context(share_gateway: Share) -> GatewayUnderTest:
    return await share_gateway(model_card=replace(card(), context_length=LONG_CONTEXT))


async def test_tokenize_counts_as_the_engine_will(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker()
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    async with client_of(gateway) as client:

        async def tokenize(**body: Any) -> dict[str, Any]:
            response = await client.post("/tokenize", json={"model": MODEL, **body})
            assert response.status_code == 200
            answer: dict[str, Any] = response.json()
            return answer

        prompt = await tokenize(prompt="abc")
        assert prompt == {"count": 4, "max_model_len": 512, "tokens": byte_tokenizer().encode("abc").ids}
        assert (await tokenize(prompt="abc", add_special_tokens=False))["count"] == 3
        chat = await tokenize(messages=messages)
        assert (await tokenize(messages=messages, add_generation_prompt=False))["count"] < chat["count"]
    await gateway.client().chat.completions.create(model=MODEL, messages=messages)
    assert worker.attempts[0].prompt_ids == chat["tokens"]


async def test_token_ids_become_their_text_again(share_gateway: Share) -> None:
    gateway = await share_gateway()
    async with client_of(gateway) as client:
        ids = (await client.post("/tokenize", json={"prompt": "Grüße", "add_special_tokens": False})).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"prompt": "Grüße"}
        refused = await client.post("/detokenize", json={"model": MODEL, "tokens": [-1]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens.0")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"tokens": [5] * (MAX_DETOKENIZED_TOKENS + 1)}, "tokens", "invalid_value"),
        ({"tokens": [5] * 2_000_000}, "tokens", "invalid_value"),
        ({"tokens": [5], "more": [[]] * (MAX_BODY_VALUES + 1)}, None, "too_many_values"),
    ],
)
async def test_detokenize_has_a_token_limit(share_gateway: Share, body: Any, param: str | None, code: str) -> None:
    """Two million tokens once blocked all other requests for 1.3 s."""
    gateway = await share_gateway()
    async with client_of(gateway) as client:
        assert error_of(await client.post("/detokenize", json=body)) == (400, code, param)
        most = await client.post("/detokenize", json={"tokens": [5] * MAX_DETOKENIZED_TOKENS})
    assert len(most.json()["prompt"]) == MAX_DETOKENIZED_TOKENS


async def test_a_long_prompt_does_not_block_others(share_gateway: Share) -> None:
    """Other requests are answered repeatedly while a megabyte is tokenized."""
    gateway = await with_long_context(share_gateway)
    async with client_of(gateway) as client:
        body = {"model": MODEL, "prompt": "The quick brown fox jumps over the lazy dog. " * 23_000}
        counting = asyncio.create_task(client.post("/tokenize", json=body))
        answered = 0
        while not counting.done():
            assert (await client.get("/livez")).status_code == 200
            answered += 1
        response = await counting
    assert response.json()["count"] > 1_000_000
    assert answered >= 10


async def test_a_large_prompt_travels_by_reference(share_gateway: Share) -> None:
    gateway = await with_long_context(share_gateway)
    worker = await gateway.add_worker()
    prompt = "abcd" * (MAX_INLINE_PROMPT_BYTES // 4 // 4 + 1)
    answer = await gateway.client().completions.create(model=MODEL, prompt=prompt, max_tokens=5)
    assert answer.usage is not None
    job = worker.attempts[0].job
    assert (job.prompt_ids, job.prompt_tokens) == (b"", answer.usage.prompt_tokens)
    assert job.prompt_object is not None
    assert worker.attempts[0].fetched_prompt == byte_tokenizer().encode(prompt).ids

    async def is_deleted() -> bool:
        store = await gateway.bus.client.jetstream().object_store("prompts")
        return await store.list(ignore_deletes=True) == [] if await has_objects(store) else True

    await until(is_deleted)


async def has_objects(store: Any) -> bool:
    from nats.js.errors import NotFoundError

    try:
        await store.list(ignore_deletes=True)
    except NotFoundError:
        return False
    return True
