"""Features specific to Anthropic's Messages API: versions, thinking, effort, errors (``anthropic_replay``)."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from pool_worker.settings import AnthropicSettings
from protocol.job import Call, Chat, ChatUsage, Part, Tool, Turn
from tests.conformance.anthropic_replay import AnthropicReplay, event
from tests.conformance.replay import ReplayOf
from tests.conformance.test_chat_engines import WEATHER, Driver, chat, driving_chat


@pytest.fixture
def replay(replay_of: ReplayOf) -> AnthropicReplay:
    return replay_of(AnthropicReplay)


@asynccontextmanager
async def driving(replay: AnthropicReplay, **more: Any) -> AsyncIterator[Driver]:
    async with driving_chat(AnthropicSettings(kind="anthropic", url=replay.url, model="replay", **more)) as driver:
        yield driver


async def test_the_older_version_samples_and_the_newer_does_not(replay: AnthropicReplay) -> None:
    async with driving(replay, api_version="2023-06-01") as driver:
        await driver.answer(temperature=0.0, top_k=5)
        await driver.answer(name="hot", temperature=1.5)
    assert (replay.bodies[0]["temperature"], replay.bodies[0]["top_k"]) == (0.0, 5)
    assert driver.refusals["hot"].param == "temperature"
    async with driving(replay) as driver:
        await driver.answer(temperature=0.0)
        await driver.answer(name="usual")
    assert driver.refusals["r"].param == "temperature"
    assert [headers["anthropic-version"] for headers in replay.headers] == ["2023-06-01", "2026-10-21"]
    assert replay.bodies[-1]["max_tokens"] == 8192


async def test_thinking_and_effort(replay: AnthropicReplay) -> None:
    async with driving(replay, thinks=True) as driver:
        answer = await driver.answer(chat("think", reasoning_effort="high"))
        await driver.answer(chat("call", tools=(WEATHER,), only_tool="weather", is_single_call=True), name="forced")
        await driver.answer(chat(reasoning_effort="none"), name="none")
        await driver.answer(chat(reasoning_effort="minimal"), name="minimal")
    assert answer.usage == ChatUsage("provider", 22, 32, 4, 2)
    first, forced, none = replay.bodies
    assert first["thinking"] == {"type": "adaptive", "display": "summarized"}
    assert first["output_config"] == {"effort": "high"}
    assert "thinking" not in forced
    assert forced["tool_choice"] == {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    assert none["thinking"] == {"type": "disabled"}
    assert driver.refusals["minimal"].param == "reasoning_effort"


async def test_a_conversation_with_tools_becomes_blocks(replay: AnthropicReplay) -> None:
    turns = (
        Turn("developer", "Be brief."),
        Turn("user", "weather?"),
        Turn("assistant", "Well.", calls=(Call("c1", "weather", '{"city":"Rome"}'), Call("c2", "time"))),
        Turn("tool", "sunny", call_id="c1"),
        Turn("tool", "noon", call_id="c2"),
        Turn("user", "and now?"),
    )
    async with driving(replay) as driver:
        await driver.answer(Chat(turns, tools=(Tool("weather", "Tells.", '{"type":"object"}', is_strict=True),)))
        await driver.answer(Chat(turns), name="without")
    body, without = replay.bodies
    assert body["system"] == [{"type": "text", "text": "Be brief."}]
    assert body["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Well."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
                {"type": "tool_use", "id": "c2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "c2", "content": "noon"},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    [tool] = body["tools"]
    assert tool == {"name": "weather", "description": "Tells.", "input_schema": {"type": "object"}, "strict": True}
    assert body["tool_choice"] == {"type": "auto"}
    assert [tool["name"] for tool in without["tools"]] == ["weather", "time"]
    assert without["tool_choice"] == {"type": "none"}


async def test_a_call_without_arguments_has_an_empty_object(replay: AnthropicReplay) -> None:
    def without_arguments(events: Any) -> list[str]:
        return [one for one in events if "partial_json" not in one]

    replay.faults.append(replay.with_events(without_arguments))
    async with driving(replay) as driver:
        answer = await driver.answer(chat("call", tools=(WEATHER,)))
    assert answer.parts == [Part("call", "weather", "call_0"), Part("arguments", "{}")]


async def test_an_account_without_credit_is_not_the_clients_fault(replay: AnthropicReplay) -> None:
    """https://platform.claude.com/docs/en/api/errors: it is reported as a 400."""
    message = "Your credit balance is too low to access the Anthropic API. Please go to Plans & Billing."
    reported = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    replay.faults.append(lambda _: JSONResponse(reported, 400))
    async with driving(replay) as driver:
        answer = await driver.answer()
    assert (answer.finish_reason, driver.refusals) == ("error", {})
    assert "402" in (answer.error or "")


@pytest.mark.parametrize("counts", [{"output_tokens": -1}, {"output_tokens": "x"}, {"output_tokens_details": 5}])
async def test_implausible_counts_are_replaced_by_estimates(replay: AnthropicReplay, counts: dict[str, Any]) -> None:
    def wrong(events: Any) -> list[str]:
        return [*events[:-2], event(json.loads(events[-2].split("data: ")[1]) | {"usage": counts}, is_known=False)]

    replay.faults.append(replay.with_events(wrong))
    async with driving(replay) as driver:
        answer = await driver.answer()
    assert answer.usage == ChatUsage("estimate", 7, answer.tokens)


@pytest.mark.parametrize("reported", [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}])
async def test_unexpected_blocks_are_malformed(replay: AnthropicReplay, reported: dict[str, Any]) -> None:
    block = event({"type": "content_block_start", "index": 1, "content_block": reported})
    replay.faults.append(replay.with_events(lambda events: [*events[:6], block, *events[6:]]))
    async with driving(replay) as driver:
        assert "server_tool_use" in ((await driver.answer()).error or "")
