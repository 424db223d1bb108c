"""Features specific to Vertex AI: tokens; Gemini's parts and blocked prompts; Claude's paths (``vertex_replay``)."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from fastapi.responses import JSONResponse

from pool_worker import engines
from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.chat import ChatRequest
from pool_worker.settings import VertexAnthropicSettings, VertexSettings
from protocol.generation import SamplingParams
from protocol.job import Call, Chat, ChatUsage, Tool, Turn
from tests.conformance.anthropic_replay import VertexAnthropicReplay
from tests.conformance.replay import ReplayOf, running
from tests.conformance.test_chat_engines import WEATHER, Driver, chat, driving_chat
from tests.conformance.vertex_replay import VertexReplay, chunk, google_environment

VERTEX: Final[dict[str, Any]] = {
    "kind": "vertex",
    "model": "gemini-3-pro",
    "project": "my-project",
    "location": "europe-west4",
}


@pytest.fixture
def replay(replay_of: ReplayOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VertexReplay:
    replay: VertexReplay = replay_of(VertexReplay)
    for name, value in google_environment(tmp_path, replay.url).items():
        monkeypatch.setenv(name, value)
    return replay


@asynccontextmanager
async def driving(replay: VertexReplay, **more: Any) -> AsyncIterator[Driver]:
    async with driving_chat(VertexSettings(**VERTEX, url=replay.url, **more)) as driver:
        yield driver


@pytest.mark.parametrize(("life_s", "tokens"), [(3600, 1), (60, 3)])
async def test_a_token_serves_until_shortly_before_it_expires(replay: VertexReplay, life_s: int, tokens: int) -> None:
    replay.token_life_s = life_s
    async with driving(replay) as driver:
        for name in ("a", "b"):
            assert (await driver.answer(name=name)).finish_reason == "stop"
    assert replay.tokens == tokens
    assert replay.urls[0].split(replay.url)[1] == (
        "/v1/projects/my-project/locations/europe-west4/publishers/google/models/gemini-3-pro:streamGenerateContent?alt=sse"
    )


async def test_token_requests_do_not_block_and_are_shared(replay: VertexReplay) -> None:
    replay.token_life_s = 60
    async with driving(replay) as driver:  # its start got one
        replay.token_life_s = 3600
        replay.may_give_tokens.clear()
        for name in ("a", "b"):
            driver.engine.submit(ChatRequest(name, chat(), SamplingParams(max_tokens=100), 7))
        await driver.wait_until(lambda: replay.tokens == 2)  # while the loop runs
        assert not replay.bodies
        replay.may_give_tokens.set()
        await driver.wait(lambda: all(driver.answers[name, 0].finish_reason == "stop" for name in ("a", "b")))
    assert replay.tokens == 2


async def test_a_missing_token_fails_only_the_attempt(replay: VertexReplay) -> None:
    replay.token_life_s = 60
    async with driving(replay) as driver:
        replay.token_status = 400
        assert "no access token" in ((await driver.answer()).error or "")
        assert not driver.refusals
        replay.token_status = 200
        assert (await driver.answer(name="after")).finish_reason == "stop"


async def test_a_missing_token_prevents_the_start(replay: VertexReplay) -> None:
    replay.token_status = 400
    engine = engines.create(VertexSettings(**VERTEX, url=replay.url))
    with pytest.raises(EngineDiedError, match="no access token"):
        await engine.start()
    await engine.stop()


def test_without_credentials_or_the_extra_no_worker_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    with pytest.raises(EngineDiedError, match=r"no Google credentials: .*missing\.json"):
        engines.create(VertexSettings(**VERTEX))
    for name in [name for name in sys.modules if name.startswith(("google.auth", "pool_worker.engines.chat_formats."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(EngineDiedError, match=r"pip install 'spillway-gateway\[gcp\]'"):
        engines.create(VertexSettings(**VERTEX))


def test_the_location_determines_the_url() -> None:
    assert VertexSettings(**VERTEX).url == "https://europe-west4-aiplatform.googleapis.com"
    assert VertexSettings(**{**VERTEX, "location": "global"}).url == "https://aiplatform.googleapis.com"


async def test_a_conversation_with_tools_becomes_parts(replay: VertexReplay) -> None:
    turns = (
        Turn("user", "weather?"),
        Turn("assistant", None, calls=(Call("c1", "weather", '{"city":"Rome"}'),)),
        Turn("tool", "sunny", call_id="c1"),
    )
    tools = (WEATHER, Tool("time", is_strict=True))
    async with driving(replay, thinks=True) as driver:
        await driver.answer(Chat(turns, tools=tools, reasoning_effort="low"))
        await driver.answer(Chat(turns, tools=tools, only_tool="time"), name="forced")
        await driver.answer(Chat(turns, tools=tools, is_single_call=True), name="single")
        await driver.answer(chat(reasoning_effort="xhigh"), name="xhigh")
    body, forced, single = replay.bodies
    assert single["toolConfig"] == body["toolConfig"]  # the gateway drops further calls
    call = {"name": "weather", "args": {"city": "Rome"}}
    result = {"name": "weather", "response": {"result": "sunny"}}
    assert body["contents"] == [
        {"role": "user", "parts": [{"text": "weather?"}]},
        {"role": "model", "parts": [{"functionCall": call, "thoughtSignature": "skip_thought_signature_validator"}]},
        {"role": "user", "parts": [{"functionResponse": result}]},
    ]
    assert body["generationConfig"]["thinkingConfig"] == {"includeThoughts": True, "thinkingLevel": "LOW"}
    assert body["toolConfig"]["functionCallingConfig"] == {"mode": "VALIDATED"}
    assert forced["toolConfig"]["functionCallingConfig"] == {"mode": "ANY", "allowedFunctionNames": ["time"]}
    reported = {name: refusal.param for name, refusal in driver.refusals.items()}
    assert reported == {"xhigh": "reasoning_effort"}


async def test_thoughts_are_counted_separately(replay: VertexReplay) -> None:
    async with driving(replay) as driver:
        assert (await driver.answer(chat("think"))).usage == ChatUsage("provider", 22, 32, 4, 2)


async def test_a_blocked_prompt_is_filtered(replay: VertexReplay) -> None:
    blocked = chunk({"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 22}})
    replay.faults.append(replay.with_events(lambda _: [blocked]))
    async with driving(replay) as driver:
        answer = await driver.answer()
    assert (answer.finish_reason, answer.is_filtered) == ("stop", True)
    assert answer.usage == ChatUsage("provider", 22, 0)


async def test_a_location_without_the_model_is_not_the_clients_fault(replay: VertexReplay) -> None:
    reported = {"error": {"code": 400, "message": "User location is not supported", "status": "FAILED_PRECONDITION"}}
    replay.faults.append(lambda _: JSONResponse(reported, 400))
    async with driving(replay) as driver:
        assert "403" in ((await driver.answer()).error or "")
    assert not driver.refusals


async def test_claude_requests_have_path_and_version(replay: VertexReplay) -> None:
    place: dict[str, Any] = {"model": "claude-sonnet-4-5@20250929", "project": "my-project", "location": "global"}
    with running(VertexAnthropicReplay()) as claude:
        for version in ("2026-10-21", "vertex-2023-10-16"):
            settings = VertexAnthropicSettings(
                kind="vertex_anthropic", url=claude.url, api_version=version, max_output_tokens=900, **place
            )
            async with driving_chat(settings) as driver:
                await driver.answer(name=version)
                await driver.answer(name="cold", temperature=0.0)
            assert list(driver.refusals) == (["cold"] if version == "2026-10-21" else [])
        newer, older, sampled = claude.bodies
        assert {url.removeprefix(claude.url) for url in claude.urls} == {
            "/v1/projects/my-project/locations/global/publishers/anthropic/models/claude-sonnet-4-5@20250929:streamRawPredict"
        }
    assert replay.tokens == 2
    assert (newer["anthropic_version"], newer["max_tokens"]) == ("2026-10-21", 900)
    assert (older["anthropic_version"], sampled["temperature"]) == ("vertex-2023-10-16", 0.0)
