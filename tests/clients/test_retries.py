"""What each Python client does when its first request stumbles, and which of its own errors it raises for it."""

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from tests.clients.asked import QUESTION, READ, READING, Reading
from tests.clients.stumbling import StumblingWay
from tests.player.engine import NO_PLAY
from tests.player.system import PlayedSystem

# These clients leave their connections open, and say not how to close them.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")

ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
Ask = Callable[[PlayedSystem, str, int], Any]  # of a base URL, with so many retries


def openai_sync(spillway: PlayedSystem, url: str, retries: int) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=spillway.api_key, max_retries=retries) as client:
        return client.chat.completions.create(model=spillway.model, messages=ASKED).choices[0].message.content


async def openai_async(spillway: PlayedSystem, url: str, retries: int) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=spillway.api_key, max_retries=retries) as client:
        stream = await client.chat.completions.create(model=spillway.model, messages=ASKED, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def openai_responses(spillway: PlayedSystem, url: str, retries: int) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=spillway.api_key, max_retries=retries) as client:
        return client.responses.create(model=spillway.model, input=QUESTION).output_text


def anthropic_sync(spillway: PlayedSystem, url: str, retries: int) -> Any:
    with anthropic.Anthropic(base_url=url, api_key=spillway.api_key, max_retries=retries) as client:
        last = client.messages.create(model=spillway.model, messages=ASKED, max_tokens=500).content[-1]
        return last.text if last.type == "text" else last


async def anthropic_async(spillway: PlayedSystem, url: str, retries: int) -> Any:
    ask: dict[str, Any] = {"model": spillway.model, "messages": ASKED, "max_tokens": 500}
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key=spillway.api_key, max_retries=retries) as client,
        client.messages.stream(**ask) as stream,
    ):
        return await stream.get_final_text()


def langchain_openai(spillway: PlayedSystem, url: str, retries: int) -> Any:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": spillway.api_key, "max_retries": retries}
    return ChatOpenAI(model=spillway.model, **options).invoke(QUESTION).content


def langchain_anthropic(spillway: PlayedSystem, url: str, retries: int) -> Any:
    from langchain_anthropic import ChatAnthropic

    options: dict[str, Any] = {"base_url": url, "api_key": spillway.api_key, "max_retries": retries}
    return ChatAnthropic(model_name=spillway.model, max_tokens_to_sample=500, **options).invoke(QUESTION).text


def instructor_client(spillway: PlayedSystem, url: str, retries: int) -> Any:
    import instructor

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=spillway.api_key, max_retries=retries)
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    messages: list[Any] = [{"role": "user", "content": spillway.play(READ)}]
    answer = patched.create(model=spillway.model, messages=messages, response_model=Reading, max_retries=0)
    return NO_PLAY if answer.model_dump() == READING.model_dump() else answer


CLIENTS: list[Ask] = [
    openai_sync,
    openai_async,
    openai_responses,
    anthropic_sync,
    anthropic_async,
    langchain_openai,
    langchain_anthropic,
    instructor_client,
]
ERRORS = {  # and what they say
    "429": ("RateLimitError", "reached a rate limit"),
    "500": ("InternalServerError", "internal error"),
    "lost": ("APIConnectionError", "Connection error"),
    "final": ("RateLimitError", "used up"),
}
clients = pytest.mark.parametrize("ask", CLIENTS, ids=lambda ask: ask.__name__)


async def answer_of(ask: Ask, spillway: PlayedSystem, url: str, retries: int) -> Any:
    answer = ask(spillway, url, retries)
    return await answer if hasattr(answer, "__await__") else answer


@clients
@pytest.mark.parametrize("kind", ["429", "500", "lost"])
async def test_what_may_work_later_is_tried_again(
    spillway: PlayedSystem, stumbling: StumblingWay, ask: Ask, kind: str
) -> None:
    name = ask.__name__
    assert await answer_of(ask, spillway, stumbling.url(kind, name), 2) == NO_PLAY
    assert stumbling.asked(kind, name) == 2


@clients
@pytest.mark.parametrize("kind", ERRORS)
async def test_errors_are_of_the_clients_own_types(
    spillway: PlayedSystem, stumbling: StumblingWay, ask: Ask, kind: str
) -> None:
    """One that is final is not even tried again where that is allowed."""
    name, retries = f"{ask.__name__}-error", 2 if kind == "final" else 0
    kind_of_error, message = ERRORS[kind]
    with pytest.raises(Exception, match=message) as caught:
        await answer_of(ask, spillway, stumbling.url(kind, name), retries)
    assert kind_of_error in {type(error).__name__ for error in causes(caught.value)}
    assert stumbling.asked(kind, name) == 1


def causes(error: BaseException | None) -> list[BaseException]:
    """The error and what it comes from: instructor wraps them."""
    return [] if error is None else [error, *causes(error.__cause__ or error.__context__)]
