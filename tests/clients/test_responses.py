"""OpenAI's Responses, by the official Python client."""

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall

from tests.clients.asked import (
    ANSWER,
    ARGUMENTS,
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
from tests.waiting import HANGS_S

TOOL: dict[str, Any] = {
    "type": "function",
    "name": TOOL_NAME,
    "description": TOOL_TEXT,
    "parameters": PARAMETERS,
    "strict": True,
}


@pytest.fixture
def client(spillway: PlayedSystem) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{spillway.url}/v1", api_key=spillway.api_key, max_retries=0) as client:
        yield client


def called(response: Response) -> ResponseFunctionToolCall:
    """The tool call that ends it."""
    call = response.output[-1]
    assert call.type == "function_call"
    return call


def test_a_response_and_its_stream(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    ask: dict[str, Any] = {"model": spillway.model, "input": QUESTION, "instructions": "Be brief."}
    whole = client.responses.create(**ask)
    assert whole.output_text == NO_PLAY
    assert (whole.status, whole.object, whole.error) == ("completed", "response", None)
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == streamed.output_text == NO_PLAY
    assert streamed.usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    chat = client.chat.completions.create(
        model=spillway.model,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
    )
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == whole.usage.input_tokens


def test_a_round_trip_through_a_tool_with_reasoning(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    asked: list[Any] = [{"role": "user", "content": f"{QUESTION} {spillway.play(*PLAY)}"}]
    ask: dict[str, Any] = {"model": spillway.model, "tools": [TOOL], "include": ["reasoning.encrypted_content"]}
    whole = client.responses.create(input=asked, **ask)
    with client.responses.stream(input=asked, **ask) as stream:
        streamed = stream.get_final_response()
    answers: list[Response] = [whole, streamed]
    for response in answers:
        reasoning, message, _ = response.output
        assert reasoning.type == "reasoning"
        assert reasoning.content is not None
        assert reasoning.content[0].text.strip() == THOUGHT
        assert message.type == "message"
        assert message.content[0].type == "output_text"
        assert message.content[0].text.strip() == SAID
        assert (called(response).name, json.loads(called(response).arguments)) == (TOOL_NAME, ARGUMENTS)
    asked += [item.to_dict() for item in streamed.output]
    asked.append({"type": "function_call_output", "call_id": called(streamed).call_id, "output": RESULT})
    assert client.responses.create(input=asked, **ask).output_text == ANSWER


def test_the_round_trip_goes_on_from_what_is_stored(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    """The first answer is made in the background; its call's result alone is sent with the second question."""
    ask: dict[str, Any] = {"model": spillway.model, "tools": [TOOL]}
    asked = client.responses.create(input=f"{QUESTION} {spillway.play(*PLAY)}", background=True, **ask)
    events = list(client.responses.retrieve(asked.id, stream=True))
    assert events[-1].type == "response.completed"
    first = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert list(client.responses.retrieve(asked.id, stream=True, starting_after=7)) == events[8:]
    [call] = [item for item in first.output if item.type == "function_call"]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    second = client.responses.create(input=[result], previous_response_id=until_stored(client, first.id), **ask)
    assert second.output_text == ANSWER
    assert second.previous_response_id == first.id


def until_stored(client: openai.OpenAI, response_id: str) -> str:
    """Return the id once the response has ended, as a client that polls."""
    deadline_s = time.monotonic() + HANGS_S
    while client.responses.retrieve(response_id).status != "completed":
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return response_id


def test_a_structured_answer(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    asked = f"{QUESTION} {spillway.play(READ)}"
    done = client.responses.parse(model=spillway.model, input=asked, text_format=Reading)
    assert done.output_parsed == READING


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    cut = client.responses.create(model=spillway.model, input=QUESTION, max_output_tokens=2)
    assert cut.incomplete_details is not None
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = list(client.responses.create(model=spillway.model, input=QUESTION, max_output_tokens=2, stream=True))
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True, "store": False}, "store"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"max_output_tokens": 10_000_000}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}}, "text.format"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: openai.OpenAI, spillway: PlayedSystem, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": spillway.model, "input": QUESTION, **fields})
    assert refused.value.param is not None
    assert refused.value.param.startswith(param)


def test_a_namespace_of_tools(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    turn = {"calls": [[f"water__{TOOL_NAME}", ARGUMENTS]]}
    tools: list[Any] = [{"type": "namespace", "name": "water", "description": "", "tools": [TOOL]}]
    done = client.responses.create(model=spillway.model, input=f"{QUESTION} {spillway.play(turn)}", tools=tools)
    assert (called(done).name, called(done).namespace) == (TOOL_NAME, "water")


async def test_the_async_client(spillway: PlayedSystem) -> None:
    async with openai.AsyncOpenAI(base_url=f"{spillway.url}/v1", api_key=spillway.api_key) as client:
        stream = await client.responses.create(model=spillway.model, input=QUESTION, stream=True, store=False)
        pieces = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == NO_PLAY


def test_errors_are_of_its_own_types(client: openai.OpenAI, spillway: PlayedSystem) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=spillway.model, input=QUESTION, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model="gpt-9", input=QUESTION)
    assert unknown.value.code == "model_not_found"
