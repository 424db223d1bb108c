"""Anthropic's official Python client."""

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.clients.asked import (
    ANSWER,
    ARGUMENTS,
    HELD,
    PARAMETERS,
    PLAY,
    QUESTION,
    READ,
    READING,
    RESULT,
    SAID,
    THOUGHT,
    TOOL_NAME,
    TOOL_TEXT,
    Reading,
)
from tests.player.engine import NO_PLAY
from tests.player.system import PlayedSystem

# A gateway that could not reach its limits' counts in time: the client tries again by itself.
BUSY = httpx.codes.SERVICE_UNAVAILABLE
TOOL: anthropic.types.ToolParam = {"name": TOOL_NAME, "description": TOOL_TEXT, "input_schema": PARAMETERS}


def user(content: Any) -> anthropic.types.MessageParam:
    return {"role": "user", "content": content}


@pytest.fixture
def client(spillway: PlayedSystem) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=spillway.url, api_key=spillway.api_key, max_retries=0) as client:
        yield client


@pytest.fixture
def ask(spillway: PlayedSystem) -> dict[str, Any]:
    return {"model": spillway.model, "max_tokens": 500}


def said(message: anthropic.types.Message) -> list[str]:
    """What is text and no thinking."""
    return [block.text for block in message.content if block.type == "text"]


def called(message: anthropic.types.Message) -> anthropic.types.ToolUseBlock:
    """The tool call that ends it."""
    call = message.content[-1]
    assert call.type == "tool_use"
    return call


def error_of(error: anthropic.APIStatusError) -> dict[str, str]:
    assert isinstance(error.body, dict)
    inner: dict[str, str] = error.body["error"]
    return inner


def counting(spillway: PlayedSystem, tenant: str, on_answer: Any) -> anthropic.Anthropic:
    """A client that tells of each answer it gets, those before a retry included."""
    http = anthropic.DefaultHttpxClient(event_hooks={"response": [on_answer]})
    key = spillway.system.tenant_keys[tenant]
    return anthropic.Anthropic(base_url=spillway.url, api_key=key, http_client=http, max_retries=2)


def test_a_message_and_its_stream(client: anthropic.Anthropic, ask: dict[str, Any]) -> None:
    whole = client.messages.create(messages=[user(QUESTION)], system="Be brief.", **ask)
    assert said(whole) == [NO_PLAY]
    assert (whole.stop_reason, whole.role, whole.type) == ("end_turn", "assistant", "message")
    with client.messages.stream(messages=[user(QUESTION)], system="Be brief.", **ask) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == NO_PLAY
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    cached = whole.usage.cache_read_input_tokens or 0
    counted = client.messages.count_tokens(model=ask["model"], messages=[user(QUESTION)], system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens + cached


def test_a_round_trip_through_a_tool_with_thinking(
    client: anthropic.Anthropic, spillway: PlayedSystem, ask: dict[str, Any]
) -> None:
    messages: list[Any] = [user(f"{QUESTION} {spillway.play(*PLAY)}")]
    more: dict[str, Any] = {"tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 100}}
    whole = client.messages.create(messages=messages, **ask, **more)
    with client.messages.stream(messages=messages, **ask, **more) as stream:
        streamed = stream.get_final_message()
    answers: list[anthropic.types.Message] = [whole, streamed]
    for message in answers:
        thinking, text, _ = message.content
        assert thinking.type == "thinking"
        assert thinking.thinking.strip() == THOUGHT
        assert text.type == "text"
        assert text.text.strip() == SAID
        assert (called(message).name, called(message).input) == (TOOL_NAME, ARGUMENTS)
        assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": called(streamed).id, "content": [{"type": "text", "text": RESULT}]}
    messages += [{"role": "assistant", "content": streamed.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=messages, **ask, **more)
    assert said(last) == [ANSWER]


def test_a_stop_sequence_is_told_and_left_out(client: anthropic.Anthropic, ask: dict[str, Any]) -> None:
    more: dict[str, Any] = {"messages": [user(QUESTION)], "stop_sequences": [" Spill", "xyz"]}
    whole = client.messages.create(**ask, **more)
    with client.messages.stream(**ask, **more) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " Spill")
        assert said(message)[-1] == "Hello from"
    cut = client.messages.create(messages=[user(QUESTION)], model=ask["model"], max_tokens=2)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


def test_a_structured_answer(client: anthropic.Anthropic, spillway: PlayedSystem, ask: dict[str, Any]) -> None:
    schema: dict[str, Any] = {**Reading.model_json_schema(), "additionalProperties": False}
    done = client.messages.create(
        messages=[user(f"{QUESTION} {spillway.play(READ)}")],
        output_config={"format": {"type": "json_schema", "schema": schema}},
        **ask,
    )
    assert Reading.model_validate_json(said(done)[-1]) == READING


def test_errors_are_of_the_clients_own_types(
    client: anthropic.Anthropic, spillway: PlayedSystem, ask: dict[str, Any]
) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(messages=[user(QUESTION)], model="nobody", max_tokens=5)
    assert error_of(caught.value)["type"] == "not_found_error"
    assert caught.value.request_id
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(messages=[user([image])], **ask)
    assert "messages.0.content.0" in error_of(refused.value)["message"]
    with pytest.raises(anthropic.BadRequestError) as invalid:
        client.messages.create(messages=[user(QUESTION)], stop_sequences=[""], **ask)
    assert "stop_sequences" in error_of(invalid.value)["message"]
    with anthropic.Anthropic(base_url=spillway.url, api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            stranger.messages.create(messages=[user(QUESTION)], **ask)
        with pytest.raises(anthropic.AuthenticationError) as counting:
            stranger.messages.count_tokens(messages=[user(QUESTION)], model=ask["model"])
        assert error_of(counting.value)["type"] == "authentication_error"
    key = spillway.system.tenant_keys["one at a time"]
    with (
        anthropic.Anthropic(base_url=spillway.url, api_key=key, max_retries=0) as limited,
        limited.messages.stream(messages=[user(f"{QUESTION} {HELD}")], **ask) as stream,
    ):
        next(iter(stream))
        with pytest.raises(anthropic.RateLimitError):
            limited.messages.create(messages=[user(QUESTION)], **ask)


def test_models_are_listed(client: anthropic.Anthropic, spillway: PlayedSystem) -> None:
    page = client.models.list()
    assert spillway.model in [model.id for model in page.data]
    assert client.models.retrieve(spillway.model).display_name == spillway.model


def test_a_call_that_must_be_made(client: anthropic.Anthropic, spillway: PlayedSystem, ask: dict[str, Any]) -> None:
    messages = [user(spillway.play({"calls": [[TOOL_NAME, ARGUMENTS]]}))]
    choice: anthropic.types.ToolChoiceParam = {"type": "tool", "name": TOOL_NAME}
    call = called(client.messages.create(messages=messages, tools=[TOOL], tool_choice=choice, **ask))
    assert (call.name, call.input) == (TOOL_NAME, ARGUMENTS)


async def test_the_async_client(spillway: PlayedSystem, ask: dict[str, Any]) -> None:
    async with anthropic.AsyncAnthropic(base_url=spillway.url, api_key=spillway.api_key) as client:
        answers = await asyncio.gather(*(client.messages.create(messages=[user(QUESTION)], **ask) for _ in range(8)))
        assert [said(answer) for answer in answers] == [[NO_PLAY]] * 8
        async with client.messages.stream(messages=[user(QUESTION)], **ask) as stream:
            assert "".join([text async for text in stream.text_stream]) == NO_PLAY


async def test_the_async_client_calls_tools(spillway: PlayedSystem, ask: dict[str, Any]) -> None:
    messages: list[Any] = [user(f"{QUESTION} {spillway.play(*PLAY)}")]
    async with anthropic.AsyncAnthropic(base_url=spillway.url, api_key=spillway.api_key, max_retries=0) as client:
        async with client.messages.stream(messages=messages, tools=[TOOL], **ask) as stream:
            first = await stream.get_final_message()
        call = called(first)
        assert (call.name, call.input) == (TOOL_NAME, ARGUMENTS)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
        messages += [{"role": "assistant", "content": first.content}, user([result])]
        assert said(await client.messages.create(messages=messages, tools=[TOOL], **ask)) == [ANSWER]
        parsed = await client.messages.parse(messages=[user(spillway.play(READ))], output_format=Reading, **ask)
        assert parsed.parsed_output == READING
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(messages=messages, model="claude-9", max_tokens=5)


def test_a_bearer_token_is_a_key(spillway: PlayedSystem, ask: dict[str, Any]) -> None:
    with anthropic.Anthropic(base_url=spillway.url, auth_token=spillway.api_key, max_retries=0) as client:
        assert said(client.messages.create(messages=[user(QUESTION)], **ask)) == [NO_PLAY]


def test_what_may_work_later_is_tried_again(spillway: PlayedSystem, ask: dict[str, Any]) -> None:
    statuses: list[int] = []

    def release(response: Any) -> None:
        statuses.append(response.status_code)
        if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
            held.close()

    with counting(spillway, "one at a time", release) as client:
        held = client.messages.create(messages=[user(HELD)], stream=True, **ask)
        next(iter(held))
        assert said(client.messages.create(messages=[user(QUESTION)], **ask)) == [NO_PLAY]
    answered = [status for status in statuses if status != BUSY]
    assert (answered[0], answered[1], answered[-1]) == (200, 429, 200)


def test_what_will_not_work_later_is_not(spillway: PlayedSystem, ask: dict[str, Any]) -> None:
    statuses: list[int] = []
    client = counting(spillway, "spent", lambda response: statuses.append(response.status_code))
    with client, pytest.raises(anthropic.APIStatusError, match="budget|quota"):
        client.messages.create(messages=[user(QUESTION)], **ask)
    assert [status for status in statuses if status != BUSY] == [httpx.codes.TOO_MANY_REQUESTS]


def test_an_answer_parsed_into_a_class(
    client: anthropic.Anthropic, spillway: PlayedSystem, ask: dict[str, Any]
) -> None:
    parsed = client.messages.parse(messages=[user(spillway.play(READ))], output_format=Reading, **ask)
    assert parsed.parsed_output == READING
