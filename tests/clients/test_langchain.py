"""LangChain's chat models and embeddings."""

from typing import TYPE_CHECKING, Any

import openai
import pytest
from pydantic import SecretStr

from tests.clients.asked import (
    ANSWER,
    ARGUMENTS,
    PLAY,
    QUESTION,
    READ,
    READING,
    RESULT,
    SAID,
    Reading,
)
from tests.player.engine import NO_PLAY
from tests.player.system import PlayedSystem

if TYPE_CHECKING:  # each takes seconds, of every process that collects this file
    from langchain_openai import ChatOpenAI

# These clients leave their connections open, and say not how to close them.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


def read_gauge(river: str, days: int) -> str:
    """Read the height of a river's water."""
    assert {"river": river, "days": days} == ARGUMENTS
    return RESULT


def chat(spillway: PlayedSystem, **rest: Any) -> "ChatOpenAI":
    from langchain_openai import ChatOpenAI

    options = {"model": spillway.model, "base_url": f"{spillway.url}/v1", "api_key": spillway.api_key, **rest}
    return ChatOpenAI(**options)


def test_chat_stream_and_logprobs(spillway: PlayedSystem) -> None:
    model = chat(spillway)
    message = model.bind(logprobs=True).invoke(QUESTION)
    assert message.content == NO_PLAY
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] > 0
    assert len(message.response_metadata["logprobs"]["content"]) == message.usage_metadata["output_tokens"]
    parts = [str(part.content) for part in model.stream(QUESTION)]
    assert "".join(parts) == NO_PLAY


async def test_a_round_trip_through_a_tool(spillway: PlayedSystem) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat(spillway).bind_tools([read_gauge])
    messages: list[Any] = [HumanMessage(f"{QUESTION} {spillway.play(*PLAY)}")]
    called = await model.ainvoke(messages)
    [call] = called.tool_calls
    assert (called.content, call["name"], call["args"]) == (SAID, "read_gauge", ARGUMENTS)
    messages += [called, ToolMessage(read_gauge(**call["args"]), tool_call_id=call["id"])]
    assert "".join([str(part.content) async for part in model.astream(messages)]) == ANSWER


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer(spillway: PlayedSystem, method: Any) -> None:
    turn = READ if method == "json_schema" else {"calls": [["Reading", READING.model_dump()]]}
    model = chat(spillway).with_structured_output(Reading, method=method)
    assert model.invoke(spillway.play(turn)) == READING


def test_embeddings(spillway: PlayedSystem) -> None:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        model=spillway.vectors,
        base_url=f"{spillway.url}/v1",
        api_key=SecretStr(spillway.api_key),
        check_embedding_ctx_length=False,  # else it sends tokens of OpenAI's vocabulary
    )
    one, two, three = embeddings.embed_documents(["high", "low", "high"])
    assert one == three != two
    assert embeddings.embed_query("high") == one
    with openai.OpenAI(base_url=f"{spillway.url}/v1", api_key=spillway.api_key) as client:
        plain = client.embeddings.create(model=spillway.vectors, input="high", encoding_format="float")
    assert one == pytest.approx(plain.data[0].embedding)


def test_errors_are_of_the_clients_types(spillway: PlayedSystem) -> None:
    with pytest.raises(openai.NotFoundError):
        chat(spillway, model="gpt-9").invoke(QUESTION)
