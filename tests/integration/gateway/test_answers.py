"""The public API through the official client, against a scripted worker."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from protocol import subjects
from protocol.nats.bus import Bus
from tests.integration.gateway.conftest import MODEL, Share
from tests.small_tokenizer import byte_tokenizer
from tests.waiting import HANGS_S

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
PROMPT_TEXT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


async def test_chat_whole(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker()
    raw = await gateway.client().chat.completions.with_raw_response.create(
        model="short", messages=HELLO, n=2, max_tokens=5, temperature=0.5, seed=3, stop="END", logit_bias={"5": -10}
    )
    answer = raw.parse()
    assert [choice.message.content for choice in answer.choices] == ["Hello world", "Hello world"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.model == "short"
    prompt_ids = byte_tokenizer().encode(PROMPT_TEXT, add_special_tokens=False).ids
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt_ids), 4)
    assert raw.headers["x-spillway-pool"] == "pool-a"
    assert raw.headers["x-spillway-provider"] == "provider-a"
    assert raw.headers["x-spillway-region"] == "region-a"
    assert raw.headers["x-spillway-attempts"] == "1"
    for name in ("openai-processing-ms", "x-spillway-queue-ms", "x-spillway-overhead-ms"):
        assert float(raw.headers[name]) >= 0
    job = worker.attempts[0].job
    assert worker.attempts[0].prompt_ids == prompt_ids
    sampling = job.sampling
    assert (sampling.n, sampling.max_tokens, sampling.temperature, sampling.seed) == (2, 5, 0.5, 3)
    assert (sampling.stop, sampling.logit_bias) == (("END",), {5: -10.0})
    [record] = await gateway.records()
    assert record.request_id == raw.headers["x-request-id"]
    assert (record.outcome, record.http_status, record.completion_tokens) == ("ok", 200, 4)
    assert (record.model, record.endpoint, record.stream) == (MODEL, "chat.completions", False)
    assert record.prompt_tokens == len(prompt_ids)
    assert record.ttft_ms is not None
    assert record.queue_ms is not None


async def test_chat_streamed_with_usage(share_gateway: Share) -> None:
    gateway = await share_gateway()
    await gateway.add_worker()
    stream = await gateway.client().chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == "Hello world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2
    [record] = await gateway.records()
    assert (record.stream, record.outcome, record.completion_tokens) == (True, "ok", 2)


async def test_sync_client_and_completions(share_gateway: Share) -> None:
    gateway = await share_gateway()
    worker = await gateway.add_worker()

    def ask() -> list[str]:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
            whole = client.completions.create(model=MODEL, prompt="abc", echo=True)
            streamed = client.completions.create(model=MODEL, prompt=[70, 71], stream=True, max_tokens=3)
            text = "".join(chunk.choices[0].text for chunk in streamed)
            chat = client.chat.completions.create(model=MODEL, messages=HELLO)
            return [whole.choices[0].text, text, chat.choices[0].message.content or ""]

    assert await asyncio.to_thread(ask) == ["abcHello world", "Hello world", "Hello world"]
    first, second, third = worker.attempts
    assert first.prompt_ids == byte_tokenizer().encode("abc").ids  # with the beginning token
    assert second.prompt_ids == [70, 71]
    assert first.job.sampling.max_tokens == 16  # OpenAI's default for completions
    assert third.job.sampling.max_tokens == 512 - len(third.prompt_ids)
    assert second.job.sampling.max_tokens == 3


ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": HELLO}, "data: [DONE]"),
    "/v1/completions": ({"prompt": "Hi"}, "data: [DONE]"),
    "/v1/messages": ({"messages": HELLO, "max_tokens": 9}, "event: message_stop"),
    "/v1/responses": ({"input": "Hi"}, "event: response.completed"),
}


@pytest.mark.parametrize("path", ENDS)
async def test_every_api_whole_and_streamed(share_gateway: Share, path: str) -> None:
    """Over the wire; what each says is told in tests/unit/gateway/api."""
    gateway = await share_gateway()
    worker = await gateway.add_worker()
    body, end = ENDS[path]
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        whole, stream = [
            await client.post(path, json={"model": MODEL, **body, "stream": is_stream}) for is_stream in (False, True)
        ]
    assert (whole.status_code, "Hello world" in whole.text) == (200, True), whole.text
    assert (stream.status_code, "Hello" in stream.text, end in stream.text) == (200, True, True), stream.text
    ids = {answer.headers["x-request-id"] for answer in (whole, stream)}
    assert {attempt.job.request_id for attempt in worker.attempts} == ids
    assert {record.request_id for record in await gateway.records(2)} == ids


async def test_models(share_gateway: Share) -> None:
    gateway = await share_gateway()
    models = await gateway.client().models.list()
    [model] = models.data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "spillway")
    assert model.model_dump()["context_length"] == 512
    retrieved = await gateway.client().models.retrieve(MODEL)
    assert retrieved == model


async def test_a_job_answered_before_it_is_known_to_be_stored_is_left_to_its_worker(
    share_gateway: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At load many are; to delete what its worker has acknowledged was a call of the queue server for each."""
    gateway = await share_gateway()
    await gateway.add_worker()
    deleted: list[int] = []
    is_answered, is_known = asyncio.Event(), asyncio.Event()
    publish = Bus.publish_durable

    async def publish_and_hear_late(self: Bus, subject: str, payload: bytes, **options: Any) -> int:
        sequence = await publish(self, subject, payload, **options)
        if subject.startswith(subjects.job_subject(MODEL, "")):
            await is_answered.wait()
            asyncio.get_running_loop().call_soon(is_known.set)
        return sequence

    async def delete(_: Bus, __: str, sequence: int) -> bool:
        deleted.append(sequence)
        return True

    monkeypatch.setattr(Bus, "publish_durable", publish_and_hear_late)
    monkeypatch.setattr(Bus, "delete_message", delete)
    await gateway.client().chat.completions.create(model=MODEL, messages=HELLO)
    is_answered.set()
    await asyncio.wait_for(is_known.wait(), HANGS_S)
    assert deleted == []
