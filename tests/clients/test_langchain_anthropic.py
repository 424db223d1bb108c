"""LangChain's chat model for Anthropic, at /v1/messages."""

from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from tests.clients.asked import ANSWER, ARGUMENTS, PLAY, QUESTION, READ, READING, SAID, THOUGHT, Reading
from tests.clients.test_langchain import read_gauge
from tests.player.engine import NO_PLAY
from tests.player.system import PlayedSystem

if TYPE_CHECKING:  # takes seconds, of every process that collects this file
    from langchain_anthropic import ChatAnthropic

# These clients leave their connections open, and say not how to close them.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


def chat(spillway: PlayedSystem, **rest: Any) -> "ChatAnthropic":
    from langchain_anthropic import ChatAnthropic

    options = {
        "base_url": spillway.url,
        "api_key": spillway.api_key,
        "model": spillway.model,
        "max_tokens": 2048,
        **rest,
    }
    return ChatAnthropic(**options)


def test_chat_and_stream(spillway: PlayedSystem) -> None:
    message = chat(spillway).invoke(QUESTION)
    assert message.text == NO_PLAY
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] > 0
    assert "".join(part.text for part in chat(spillway).stream(QUESTION)) == NO_PLAY


async def test_a_round_trip_through_a_tool(spillway: PlayedSystem) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat(spillway, thinking={"type": "enabled", "budget_tokens": 1024}).bind_tools([read_gauge])
    messages: list[Any] = [HumanMessage(f"{QUESTION} {spillway.play(*PLAY)}")]
    called = await model.ainvoke(messages)
    [call] = called.tool_calls
    blocks: list[Any] = list(called.content)
    assert [block["thinking"].strip() for block in blocks if block["type"] == "thinking"] == [THOUGHT]
    assert (called.text, call["name"], call["args"]) == (SAID, "read_gauge", ARGUMENTS)
    messages += [called, ToolMessage(read_gauge(**call["args"]), tool_call_id=call["id"])]
    assert "".join([part.text async for part in model.astream(messages)]) == ANSWER


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer(spillway: PlayedSystem, method: Any) -> None:
    turn = READ if method == "json_schema" else {"calls": [["Reading", READING.model_dump()]]}
    model = chat(spillway).with_structured_output(Reading, method=method)
    assert model.invoke(spillway.play(turn)) == READING


def test_errors_are_of_the_clients_types(spillway: PlayedSystem) -> None:
    with pytest.raises(anthropic.NotFoundError):
        chat(spillway, model="claude-9").invoke(QUESTION)
