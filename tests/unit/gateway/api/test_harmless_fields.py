"""Fields that popular clients send with values that have no effect. They were once refused."""

from typing import Any

import openai
import pytest

from gateway.settings import ModelSettings
from tests.integration.gateway.scripted_worker import Attempt
from tests.small_tokenizer import byte_tokenizer
from tests.unit.gateway.conftest import Start
from tests.unit.gateway.local_gateway import MODEL

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
HARMLESS: dict[str, Any] = {
    "reasoning_effort": "low",
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "verbosity": "low",
    "store": True,
    "top_logprobs": 0,
    "max_tokens": -1,
}


async def answers(attempt: Attempt) -> None:
    await attempt.accept()
    for text in ("a", "b"):
        await attempt.tokens(text)
    await attempt.tokens("", finish_reason="stop")
    await attempt.finish()


async def test_harmless_fields_are_accepted(start_local: Start) -> None:
    gateway = await start_local(models={MODEL: ModelSettings(default_max_tokens=7, aliases=("short",))})
    worker = await gateway.add_worker(script=answers)
    answer = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, extra_body=HARMLESS)
    assert answer.choices[0].message.content == "ab"
    job = worker.attempts[0].job
    assert job.sampling.max_tokens == 512 - len(worker.attempts[0].prompt_ids)  # the rest of the context
    await gateway.client().completions.create(model=MODEL, prompt="Hi", max_tokens=-1)
    assert worker.attempts[1].job.sampling.max_tokens == 512 - len(worker.attempts[1].prompt_ids)


async def test_truncation_side(start_local: Start) -> None:
    gateway = await start_local()
    worker = await gateway.add_worker(script=answers)
    for side, kept in (("left", "def"), ("right", "abc"), (None, "def")):
        body: dict[str, Any] = {"truncate_prompt_tokens": 3, "add_special_tokens": False, "truncation_side": side}
        await gateway.client().completions.create(model=MODEL, prompt="abcdef", extra_body=body)
        assert byte_tokenizer().decode(worker.attempts[-1].prompt_ids) == kept


async def test_usage_in_every_chunk(start_local: Start) -> None:
    gateway = await start_local()
    await gateway.add_worker(script=answers)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    for extra in ({}, {"return_token_ids": True}):
        stream = await gateway.client().chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options=options, extra_body=extra
        )
        chunks = [chunk async for chunk in stream]
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
        assert len(counts) == len(chunks)
        assert counts == sorted(counts)
        assert counts[-1] == 3
        last = chunks[-1].usage
        assert last is not None
        assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage} == {last.prompt_tokens}
    quiet = await gateway.client().chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    assert [chunk.usage is None for chunk in [chunk async for chunk in quiet]][:2] == [True, True]


async def test_texts_of_tokens(start_local: Start) -> None:
    gateway = await start_local()
    told = (await gateway.post("/tokenize", prompt="a b", return_token_strs=True)).json()
    assert told["token_strs"] == ["<s>", "a", "Ġ", "b"]


async def test_unsupported_fields_are_named(start_local: Start) -> None:
    gateway = await start_local()
    with pytest.raises(openai.BadRequestError) as refused:
        await gateway.client().chat.completions.create(
            model=MODEL, messages=HELLO, logprobs=True, extra_body={"logprob_token_ids": [5]}
        )
    assert refused.value.param == "logprob_token_ids"
