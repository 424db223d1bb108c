"""The official Python client, sync and async."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionToolParam,
    ChatCompletionUserMessageParam,
)

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
    TOOL_NAME,
    TOOL_TEXT,
    Reading,
)
from tests.player.engine import NO_PLAY
from tests.player.system import PlayedSystem

TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": TOOL_TEXT, "parameters": PARAMETERS, "strict": True},
}


def user(text: str) -> ChatCompletionUserMessageParam:
    return {"role": "user", "content": text}


def called(message: ChatCompletionMessage) -> ChatCompletionMessageFunctionToolCall:
    """Its only tool call."""
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function"
    return call


@pytest.fixture
def client(spillway: PlayedSystem) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{spillway.url}/v1", api_key=spillway.api_key, max_retries=0) as client:
        yield client


def counting(spillway: PlayedSystem, tenant: str, answers: list[httpx.Response], **rest: Any) -> openai.OpenAI:
    """A client that notes each answer it gets, those before a retry included."""
    http = openai.DefaultHttpxClient(event_hooks={"response": [answers.append]})
    key = spillway.system.tenant_keys[tenant]
    return openai.OpenAI(base_url=f"{spillway.url}/v1", api_key=key, http_client=http, **rest)


def test_chat_with_logprobs(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    done = client.chat.completions.create(
        model=spillway.model, messages=[user(QUESTION)], logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.message.content for choice in done.choices] == [NO_PLAY] * 2
    for choice in done.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(token.token for token in choice.logprobs.content).endswith(NO_PLAY)
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_a_stream_and_its_usage(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    ask: dict[str, Any] = {"model": spillway.model, "messages": [user(QUESTION)]}
    with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert len(pieces) > 1
    assert "".join(pieces) == whole.choices[0].message.content == NO_PLAY
    assert whole.usage == client.chat.completions.create(**ask).usage


def test_a_round_trip_through_a_tool(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    messages: list[Any] = [user(f"{QUESTION} {spillway.play(*PLAY)}")]
    ask: dict[str, Any] = {"model": spillway.model, "tools": [TOOL]}
    first = client.chat.completions.create(messages=messages, **ask).choices[0]
    with client.chat.completions.stream(messages=messages, **ask) as stream:
        streamed = stream.get_final_completion().choices[0]
    for choice in (first, streamed):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == SAID
        call = called(choice.message)
        assert (call.function.name, json.loads(call.function.arguments)) == (TOOL_NAME, ARGUMENTS)
    messages += [first.message, {"role": "tool", "tool_call_id": called(first.message).id, "content": RESULT}]
    assert client.chat.completions.create(messages=messages, **ask).choices[0].message.content == ANSWER


def test_a_structured_answer(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    parsed = client.chat.completions.parse(
        model=spillway.model, messages=[user(spillway.play(READ))], response_format=Reading
    )
    assert parsed.choices[0].message.parsed == READING


def test_embeddings(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    texts = ["high", "low", "high"]
    whole = client.embeddings.create(model=spillway.vectors, input=texts, encoding_format="float")
    packed = client.embeddings.create(model=spillway.vectors, input=texts)  # base64, which the client unpacks
    one, two, three = (one.embedding for one in whole.data)
    assert one == three != two
    assert packed.data[1].embedding == pytest.approx(two)


async def test_the_async_client(spillway: PlayedSystem) -> None:
    async with openai.AsyncOpenAI(base_url=f"{spillway.url}/v1", api_key=spillway.api_key) as client:
        ask: dict[str, Any] = {"model": spillway.model, "messages": [user(QUESTION)]}
        answers = await asyncio.gather(*(client.chat.completions.create(**ask) for _ in range(8)))
        assert {answer.choices[0].message.content for answer in answers} == {NO_PLAY}
        stream = await client.chat.completions.create(**ask, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == NO_PLAY
        vectors = await client.embeddings.create(model=spillway.vectors, input="high")
        assert vectors.data[0].embedding


async def test_the_async_client_calls_tools(spillway: PlayedSystem) -> None:
    messages: list[Any] = [user(f"{QUESTION} {spillway.play(*PLAY)}")]
    ask: dict[str, Any] = {"model": spillway.model, "tools": [TOOL]}
    async with openai.AsyncOpenAI(base_url=f"{spillway.url}/v1", api_key=spillway.api_key) as client:
        async with client.chat.completions.stream(messages=messages, **ask) as stream:
            first = (await stream.get_final_completion()).choices[0].message
        call = called(first)
        assert (first.content, call.function.name, json.loads(call.function.arguments)) == (SAID, TOOL_NAME, ARGUMENTS)
        messages += [first, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
        answer = await client.chat.completions.create(messages=messages, **ask)
        assert answer.choices[0].message.content == ANSWER


async def test_the_async_client_parses_answers_and_tells_logprobs(spillway: PlayedSystem) -> None:
    async with openai.AsyncOpenAI(base_url=f"{spillway.url}/v1", api_key=spillway.api_key) as client:
        ask: dict[str, Any] = {"model": spillway.model, "messages": [user(spillway.play(READ))]}
        parsed = await client.chat.completions.parse(**ask, response_format=Reading)
        assert parsed.choices[0].message.parsed == READING
        stream = await client.chat.completions.create(
            model=spillway.model, messages=[user(QUESTION)], logprobs=True, stream=True
        )
        told = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices[0].logprobs is not None]
        assert "".join(token.token for one in told for token in one.content or []).endswith(NO_PLAY)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(**{**ask, "model": "gpt-9"})
        assert unknown.value.code == "model_not_found"


def test_errors_are_of_its_own_types(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    ask: dict[str, Any] = {"model": spillway.model, "messages": [user(QUESTION)]}
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**ask, temperature=3)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**ask, "model": "gpt-9"})
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as stranger:
        client.with_options(api_key="sk-wrong").chat.completions.create(**ask)
    assert stranger.value.code == "invalid_api_key"
    assert stranger.value.request_id


def test_what_may_work_later_is_tried_again(spillway: PlayedSystem) -> None:
    answers: list[httpx.Response] = []
    with counting(spillway, "one at a time", answers, max_retries=2) as client:
        ask: dict[str, Any] = {"model": spillway.model, "messages": [user(QUESTION)]}
        held = client.chat.completions.create(model=spillway.model, messages=[user(HELD)], stream=True)
        next(iter(held))

        def release(response: httpx.Response) -> None:
            if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
                held.close()

        client._client.event_hooks = {"response": [answers.append, release]}
        assert client.chat.completions.create(**ask).choices[0].message.content == NO_PLAY
    assert [answer.status_code for answer in answers][:2] == [200, 429]
    assert answers[-1].status_code == httpx.codes.OK
    assert "retry-after" in answers[1].headers


def test_what_will_not_work_later_is_not(spillway: PlayedSystem) -> None:
    answers: list[httpx.Response] = []
    with counting(spillway, "spent", answers) as client, pytest.raises(openai.RateLimitError) as spent:
        client.chat.completions.create(model=spillway.model, messages=[user(QUESTION)])
    assert spent.value.code == "insufficient_quota"
    assert len(answers) == 1
