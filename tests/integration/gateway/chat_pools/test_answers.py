"""Models that pools serve which take messages: the real gateway and worker before a replay of OpenAI's API.

The answers are read by OpenAI's own client. What the API has counted is what callers and the ledger are told.
"""

from typing import Any

import openai
import pytest
from fastapi.responses import JSONResponse
from nats.aio.msg import Msg

from protocol import subjects
from protocol.errors import BusError
from protocol.job import Job, decode_job
from protocol.nats.objects import get_object
from tests.conformance.chat_replay import ARGUMENTS, REASONING, ChatReplay, answer_text
from tests.integration.gateway.chat_pools.pools import (
    ASKED,
    SCHEMA,
    TOOLS,
    WHOLE,
    StartPool,
    ask,
    is_provider,
    rows,
    stream,
)
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest
from tests.waiting import until


async def test_a_whole_answer_and_its_rows(gateway: GatewayUnderTest, replay: ChatReplay) -> None:
    answer = await ask(gateway)
    assert answer.choices[0].message.content == WHOLE
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (22, 30, 52)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    record, [attempt] = await rows(gateway)
    assert is_provider(record, 22, 4, 30)
    assert is_provider(attempt, 22, 4, 30)
    assert (record.outcome, record.provider, record.finish_reason) == ("ok", "openai", "stop")
    assert (attempt.engine, attempt.rescue) == ("openai_chat", None)
    assert replay.bodies[0]["messages"] == ASKED


async def test_a_stream_and_its_usage(gateway: GatewayUnderTest) -> None:
    told = await stream(gateway)
    assert (told.text, told.finish_reason, told.roles, told.error) == (WHOLE, "stop", 1, None)
    assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (22, 30)
    record, _ = await rows(gateway)
    assert is_provider(record, 22, 4, 30)


async def test_several_choices_each_pay_for_the_prompt(gateway: GatewayUnderTest, replay: ChatReplay) -> None:
    answer = await ask(gateway, n=2, max_tokens=5)
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert {choice.message.content for choice in answer.choices} == {" ".join(WHOLE.split(" ")[:5])}
    record, _ = await rows(gateway)
    assert is_provider(record, 44, 8, 10)
    assert [body["max_completion_tokens"] for body in replay.bodies] == [5, 5]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tools_and_reasoning(gateway: GatewayUnderTest, replay: ChatReplay, is_stream: bool) -> None:
    rest = {"tools": TOOLS, "tool_choice": "required"}
    if is_stream:
        told = await stream(gateway, "think, then call", **rest)
        calls, reasoning, reason, usage = told.calls, told.reasoning, told.finish_reason, told.usage
    else:
        answer = await ask(gateway, "think, then call", **rest)
        message = answer.choices[0].message
        calls = [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls]
        reasoning, reason, usage = message.reasoning_content, answer.choices[0].finish_reason, answer.usage
        assert message.content is None
    assert calls == [["call_0", "weather", ARGUMENTS], ["call_1", "time", ARGUMENTS]]
    assert (reasoning, reason) == (REASONING, "tool_calls")
    assert usage.completion_tokens_details.reasoning_tokens == 2
    assert replay.bodies[0]["tool_choice"] == "required"
    assert replay.bodies[0]["tools"] == TOOLS


async def test_a_schema_is_the_apis_to_follow(gateway: GatewayUnderTest, replay: ChatReplay) -> None:
    """Also where it says what no grammar of ours could enforce."""
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    assert (await ask(gateway, response_format=response_format)).choices[0].message.content == WHOLE
    assert replay.bodies[0]["response_format"] == response_format


async def test_refusals_and_filters(gateway: GatewayUnderTest) -> None:
    answer = await ask(gateway, "refuse")
    assert answer.choices[0].message.refusal == "I cannot help with that."
    assert (await stream(gateway, "refuse")).refusal == "I cannot help with that."
    assert (await ask(gateway, "filter")).choices[0].finish_reason == "content_filter"
    assert (await stream(gateway, "filter")).finish_reason == "content_filter"


async def test_the_conversation_of_tools_is_sent_as_it_was(gateway: GatewayUnderTest, replay: ChatReplay) -> None:
    function = {"name": "weather", "arguments": '{"city":"Rome"}'}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    await ask(gateway, messages=messages, tools=TOOLS)
    messages[1] = {"role": "user", "content": "weather?"}
    assert replay.bodies[0]["messages"] == messages


async def test_a_conversation_too_large_for_a_message(gateway: GatewayUnderTest, replay: ChatReplay) -> None:
    jobs: list[Job] = []

    async def on_job(message: Msg) -> None:
        jobs.append(decode_job(message.data))

    subscription = await gateway.bus.subscribe("rq.>", on_job)
    content = "many words " * 30_000
    answer = await ask(gateway, content)
    assert answer.choices[0].message.content == answer_text([ASKED[0], {"role": "user", "content": content}])
    assert replay.bodies[0]["messages"][1]["content"] == content
    await until(lambda: jobs)
    assert (jobs[0].chat, jobs[0].prompt_ids) == (None, b"")
    assert jobs[0].chat_object is not None
    bucket, name = subjects.PROMPTS_BUCKET, jobs[0].chat_object

    async def is_gone() -> bool:
        try:
            await get_object(gateway.bus, bucket, name)
        except BusError:
            return True
        return False

    await until(is_gone)  # nothing of it stays
    await subscription.unsubscribe()


# --- what cannot be -------------------------------------------------------------------------------------------------


async def test_the_apis_own_refusal_is_the_callers_at_once(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool(workers=2)
    replay.faults += [lambda _: JSONResponse({"error": {"message": "content is not allowed"}}, 400)] * 3
    for attempt in (ask(gateway), ask(gateway, stream=True)):
        with pytest.raises(openai.BadRequestError, match="content is not allowed"):
            await attempt
    assert len(replay.bodies) == 2
    replay.faults.clear()
    assert (await ask(gateway)).choices[0].message.content == WHOLE


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("top_k", {"extra_body": {"top_k": 5}}),
        ("logprobs", {"logprobs": True}),
        ("structured_outputs", {"extra_body": {"structured_outputs": {"regex": "a+"}}}),
        ("return_token_ids", {"extra_body": {"return_token_ids": True}}),
        ("chat_template_kwargs", {"extra_body": {"chat_template_kwargs": {"x": 1}}}),
        ("continue_final_message", {"extra_body": {"continue_final_message": True}}),
    ],
)
async def test_what_the_api_cannot_honour_is_refused_by_name(
    gateway: GatewayUnderTest, replay: ChatReplay, field: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await ask(gateway, **fields)
    assert refusal.value.param == field
    assert replay.bodies == []


async def test_a_plain_prompt_has_no_place_there(gateway: GatewayUnderTest) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/chat/completions") as refusal:
        await gateway.client().completions.create(model=MODEL, prompt="Hi")
    assert refusal.value.param == "model"


async def test_a_prompt_too_long_is_refused_by_our_count(gateway: GatewayUnderTest, replay: ChatReplay) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        await ask(gateway, "x" * 1_000_001)
    assert refusal.value.code == "context_length_exceeded"
    assert replay.bodies == []
