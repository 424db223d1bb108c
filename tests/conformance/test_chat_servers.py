"""Requirements for every server that takes messages, seen only through its engine: a replay, and the real ones.

Unlike ``test_chat_engines`` it does not see the requests, so it can run against third-party servers
(``real_servers``).
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest

from pool_worker.engines.chat import ChatPoint, ChatRequest
from pool_worker.engines.chat_formats.base import ChatFormat
from pool_worker.settings import OpenAIChatSettings
from protocol.generation import SamplingParams
from protocol.job import AnswerSchema, Chat, Turn
from tests.conformance.chat_replay import ChatReplay
from tests.conformance.matrix import FIELDS
from tests.conformance.test_chat_engines import Answer, Driver, driving_chat

# The settings of a real server (tests/conformance/real_servers.py), as JSON, or nothing.
REAL_SERVER: dict[str, Any] = json.loads(os.environ.get("SPILLWAY_TEST_SERVER", "{}"))
WORDS = 16
SCHEMA = {
    "type": "object",
    "properties": {"day": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["day"],
    "additionalProperties": False,
}


def chat(asked: str = "Tell me a story about a river.", **more: Any) -> Chat:
    return Chat((Turn("user", asked),), is_limited=True, **more)


@pytest.fixture(params=["real"] if REAL_SERVER else ["replay"])
def settings(request: pytest.FixtureRequest) -> OpenAIChatSettings:
    if request.param == "real":
        return OpenAIChatSettings(**REAL_SERVER)
    replay: ChatReplay = request.getfixturevalue("replay_of")(ChatReplay)
    return OpenAIChatSettings(kind="openai_chat", profile="vllm", url=replay.url, model="replay")


@pytest.fixture
async def driver(settings: OpenAIChatSettings) -> AsyncIterator[Driver]:
    async with driving_chat(settings) as driver:
        yield driver


def can(driver: Driver) -> ChatFormat:
    return driver.engine._format


async def greedy(driver: Driver, name: str = "r", asked: Chat | None = None, **more: Any) -> Answer:
    return await driver.answer(asked or chat(), name=name, **{"max_tokens": WORDS, "temperature": 0.0, **more})


async def test_an_answer_has_parts_and_the_servers_counts(driver: Driver) -> None:
    answer = await greedy(driver)
    assert answer.finish_reason == "length"
    assert len(answer.parts) > 1
    assert answer.usage is not None
    assert (answer.usage.counted_by, answer.usage.completion_tokens) == ("provider", WORDS)
    assert answer.usage.prompt_tokens > 0


async def test_the_token_limit_is_kept(driver: Driver) -> None:
    whole = await greedy(driver, "whole")
    for limit in (1, 2, 7):
        answer = await greedy(driver, f"r{limit}", max_tokens=limit)
        assert answer.finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == limit
        assert whole.text().startswith(answer.text())


async def test_each_choice_ends(driver: Driver) -> None:
    driver.engine.submit(ChatRequest("r", chat(), SamplingParams(max_tokens=WORDS, n=3), 7))
    await driver.wait(lambda: all(driver.answers["r", index].finish_reason for index in range(3)))
    assert all(driver.answers["r", index].text() for index in range(3))


async def test_together_equals_alone(driver: Driver) -> None:
    asked = [
        chat(f"Tell me a story about {thing}.") for thing in ("a river", "an old lamp", "the sea", "a tired horse")
    ]
    alone = [await greedy(driver, f"alone{number}", one) for number, one in enumerate(asked)]
    together = await asyncio.gather(*(greedy(driver, f"together{number}", one) for number, one in enumerate(asked)))
    assert [answer.text() for answer in together] == [answer.text() for answer in alone]
    assert len({answer.text() for answer in alone}) > 1


async def test_a_stop_string_ends_the_answer_before_it(driver: Driver) -> None:
    whole = (await greedy(driver, "whole")).text()
    stop = whole[len(whole) // 2 :][:3]
    answer = await greedy(driver, "stopped", stop=(stop,))
    assert (answer.finish_reason, answer.text()) == ("stop", whole[: whole.index(stop)])


async def test_a_seed_determines_the_answer(driver: Driver) -> None:
    if "seed" not in can(driver).honoured:
        return
    answers = [
        await greedy(driver, f"r{number}", temperature=1.0, seed=seed) for number, seed in enumerate((5, 5, 6, 7, 8))
    ]
    texts = [answer.text() for answer in answers]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1 or not REAL_SERVER


async def test_fields_a_server_does_not_support_are_refused_by_name(driver: Driver) -> None:
    refused = [name for name in FIELDS if name not in {*can(driver).honoured, "temperature", "skip_special_tokens"}]
    for name in refused:
        assert (await driver.answer(chat(), name=name, **{name: FIELDS[name]})).finish_reason == "error"
        assert driver.refusals[name].param == name


async def test_supported_fields_are_accepted(driver: Driver) -> None:
    for name in sorted(can(driver).honoured & FIELDS.keys()):
        answer = await driver.answer(chat(), name=name, **{"max_tokens": WORDS, name: FIELDS[name]})
        assert answer.finish_reason in {"stop", "length"}, (name, answer.error)


async def test_an_answer_follows_a_schema(driver: Driver) -> None:
    if "json_schema" not in can(driver).schemas:
        return
    schema = AnswerSchema(json.dumps(SCHEMA), "day", is_strict=True)
    answer = await greedy(driver, "schema", chat(schema=schema), max_tokens=100)
    assert answer.finish_reason == "stop"
    if REAL_SERVER:
        jsonschema.validate(json.loads(answer.text()), SCHEMA)


async def test_a_partial_answer_is_resumed(driver: Driver) -> None:
    if not driver.engine.continues:
        return
    whole = (await greedy(driver, "whole")).text()
    for partial in (whole[: whole.index(" ")], whole[: whole.rindex(" ")]):  # where a server's tokens begin again
        point = ChatPoint(0, partial, 5)
        rest = await greedy(driver, f"after {len(partial)}", resume=(point,), max_tokens=5 + WORDS)
        assert (partial + rest.text()).startswith(whole)


async def test_canceling_frees_a_slot(driver: Driver) -> None:
    for number in range(8):
        driver.engine.submit(ChatRequest(f"long{number}", chat(), SamplingParams(max_tokens=300), 7))
    await driver.wait(lambda: bool(driver.answers["long0", 0].parts))
    for number in range(8):
        driver.engine.cancel(f"long{number}")
        driver.engine.cancel(f"long{number}")
    await driver.wait(lambda: all(driver.answers[f"long{number}", 0].finish_reason for number in range(8)))
    assert (await greedy(driver, "next")).finish_reason == "length"


async def test_a_too_long_conversation_is_the_clients_fault(driver: Driver) -> None:
    if not REAL_SERVER:
        return  # a replay has no context limit
    await driver.answer(chat("river " * 3000), name="long")
    assert driver.refusals["long"].param
    assert (await greedy(driver, "next")).finish_reason == "length"


async def test_stopping_ends_with_work_in_progress(settings: OpenAIChatSettings) -> None:
    async with driving_chat(settings) as driver:
        driver.engine.submit(ChatRequest("r", chat(), SamplingParams(max_tokens=300), 7))
        await driver.wait(lambda: bool(driver.answers["r", 0].parts))
