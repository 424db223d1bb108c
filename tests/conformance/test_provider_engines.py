"""Requirements for every hosted API, by its format, and the handling of its faults."""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import TypeAdapter

from pool_worker.engines.chat import ChatPoint, ChatRequest
from pool_worker.settings import AnyChatSettings
from protocol.generation import SamplingParams
from protocol.job import AnswerSchema, Call, Chat, ChatUsage, Tool, Turn
from tests.conformance.anthropic_replay import AnthropicReplay, VertexAnthropicReplay
from tests.conformance.aws_replay import AWS_ENVIRONMENT, BedrockReplay, SageMakerReplay
from tests.conformance.chat_replay import ARGUMENTS, REASONING, Asked, ChatReplay, answer_text, script_of
from tests.conformance.replay import ReplayOf
from tests.conformance.test_chat_engines import (
    ASKED,
    WEATHER,
    Driver,
    chat,
    check_stop_strings,
    check_unsupported,
    driving_chat,
)
from tests.conformance.vertex_replay import VertexReplay, google_environment

SETTINGS: Final = TypeAdapter[AnyChatSettings](AnyChatSettings)
SCHEMA: Final = '{"type":"object","additionalProperties":false}'


@dataclass(frozen=True)
class Provider:
    """One API, and the names of its fields in a body."""

    replay: type[ChatReplay]
    settings: Mapping[str, Any]
    limit_at: str  # field of the answer's limit
    schema_at: str | None  # and a JSON schema
    key_header: str | None = None
    alternates: bool = True  # user and assistant must alternate


REGION: Final = {"aws_region": "eu-central-1"}
PROVIDERS: Final[dict[str, Provider]] = {
    "openai_chat": Provider(
        ChatReplay,
        {"kind": "openai_chat", "profile": "openai", "api_key": "k-1"},
        limit_at="max_completion_tokens",
        schema_at="response_format.json_schema.schema",
        alternates=False,
    ),
    "anthropic": Provider(
        AnthropicReplay,
        {"kind": "anthropic", "api_key": "k-1", "continues": True},
        limit_at="max_tokens",
        schema_at="output_config.format.schema",
        key_header="x-api-key",
    ),
    "bedrock": Provider(
        BedrockReplay,
        {"kind": "bedrock", "continues": True, "model": "replay.model-v1:0", **REGION},
        limit_at="inferenceConfig.maxTokens",
        schema_at="outputConfig.textFormat.structure.jsonSchema.schema",
    ),
    "sagemaker": Provider(
        SageMakerReplay,
        {"kind": "sagemaker", "endpoint": "replay", **REGION},
        limit_at="max_tokens",
        schema_at="response_format.json_schema.schema",
        alternates=False,
    ),
    "vertex": Provider(
        VertexReplay,
        {"kind": "vertex", "project": "my-project", "location": "europe-west4", "thinks": True},
        limit_at="generationConfig.maxOutputTokens",
        schema_at="generationConfig.responseJsonSchema",
    ),
    "vertex_anthropic": Provider(
        VertexAnthropicReplay,
        {"kind": "vertex_anthropic", "project": "my-project", "location": "europe-west4", "continues": True},
        limit_at="max_tokens",
        schema_at="output_config.format.schema",
    ),
}


def found(body: Any, path: str) -> Any:
    for name in path.split("."):
        body = body.get(name) if body is not None else None
    return body


@asynccontextmanager
async def driving(provider: Provider, replay: ChatReplay, **more: Any) -> AsyncIterator[Driver]:
    known = {"url": replay.url, "model": "replay", **provider.settings, **more}
    async with driving_chat(SETTINGS.validate_python(known)) as driver:
        yield driver


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replay_of: ReplayOf) -> None:
    for name, value in {**AWS_ENVIRONMENT, **google_environment(tmp_path, replay_of(VertexReplay).url)}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> Provider:
    return PROVIDERS[request.param]


@pytest.fixture
def replay(provider: Provider, replay_of: ReplayOf) -> ChatReplay:
    return replay_of(provider.replay)


@pytest.fixture
async def driver(provider: Provider, replay: ChatReplay) -> AsyncIterator[Driver]:
    async with driving(provider, replay) as driver:
        yield driver


async def test_text_and_the_providers_counts(driver: Driver, provider: Provider, replay: ChatReplay) -> None:
    answer = await driver.answer()
    assert answer.text() == answer_text(ASKED)
    assert answer.finish_reason == "stop"
    assert answer.usage == ChatUsage("provider", 22, 30, 4)
    assert answer.tokens > 0  # estimated meanwhile
    if provider.key_header is not None:
        assert replay.headers[0][provider.key_header] == "k-1"
        assert "authorization" not in replay.headers[0]


async def test_stop_strings_are_searched_in_the_content(driver: Driver, replay: ChatReplay) -> None:
    await check_stop_strings(driver, replay)


async def test_unsupported_fields_are_refused_or_dropped(provider: Provider, replay: ChatReplay) -> None:
    await check_unsupported(partial(driving, provider, replay), replay)


async def test_a_limit_and_several_choices(driver: Driver, provider: Provider, replay: ChatReplay) -> None:
    driver.engine.submit(ChatRequest("two", chat(is_limited=True), SamplingParams(max_tokens=3, n=2), 7))
    await driver.wait(lambda: all(driver.answers["two", index].finish_reason for index in (0, 1)))
    for index in (0, 1):
        answer = driver.answers["two", index]
        assert answer.finish_reason == "length"
        assert answer_text(ASKED).startswith(answer.text())
    assert [found(body, provider.limit_at) for body in replay.bodies] == [3, 3]


async def test_reasoning_and_calls_are_distinguished(driver: Driver) -> None:
    tools = (WEATHER, Tool("time"))
    answer = await driver.answer(chat("think, then call", tools=tools, tool_choice="required"))
    assert answer.text("reasoning") == REASONING
    calls = [(part.text, part.call_id) for part in answer.parts if part.kind == "call"]
    assert calls == [("weather", "call_0"), ("time", "call_1")]
    assert answer.text("arguments") == ARGUMENTS * 2
    assert (answer.finish_reason, answer.text()) == ("stop", "")
    assert answer.usage is not None
    assert answer.usage.counted_by == "provider"


async def test_a_filtered_answer(driver: Driver) -> None:
    filtered = await driver.answer(chat("filter"))
    assert (filtered.finish_reason, filtered.is_filtered) == ("stop", True)


async def test_fields_that_an_api_lacks_are_refused_by_name(
    driver: Driver, provider: Provider, replay: ChatReplay
) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {5: 1.0},
        "seed": 7,
        "logprobs": 2,
        "ignore_eos": True,
    }
    await driver.answer(name="usual")
    for name, value in asked.items():
        answer = await driver.answer(name=name, **{name: value})
        if name in driver.engine._format.honoured:
            assert answer.finish_reason == "stop"
            assert replay.bodies[-1] != replay.bodies[0], name
        else:
            assert driver.refusals[name].param == name
    for kind, schema in (("json_schema", AnswerSchema(SCHEMA, "thing")), ("json_object", AnswerSchema())):
        await driver.answer(chat(schema=schema), name=kind)
        assert (kind in driver.refusals) == (kind not in driver.engine._format.schemas)
        if kind in driver.refusals:
            assert driver.refusals[kind].param == "response_format"
        elif kind == "json_schema":
            assert provider.schema_at is not None
            reported = found(replay.bodies[-1], provider.schema_at)  # JSON, or JSON in a text
            assert (reported if isinstance(reported, str) else json.dumps(reported, separators=(",", ":"))) == SCHEMA


@pytest.mark.parametrize(
    ("turns", "param"),
    [
        ((Turn("user", "a", name="Anna"),), "messages"),
        ((Turn("user", "a"), Turn("assistant", "b")), "messages"),
        ((Turn("system", ""),), "messages"),
        ((Turn("user", ""),), "messages"),
        ((Turn("user", "a"), Turn("tool", "b", call_id="call_9")), "messages"),
        ((Turn("user", "a"), Turn("assistant", None, calls=(Call("1", "f", "[1]"),)), Turn("user", "b")), "messages"),
    ],
)
async def test_unsupported_conversations_are_refused(
    driver: Driver, provider: Provider, replay: ChatReplay, turns: tuple[Turn, ...], param: str
) -> None:
    if not provider.alternates:
        return
    assert (await driver.answer(Chat(turns))).finish_reason == "error"
    assert driver.refusals["r"].param == param
    assert not replay.bodies


async def test_a_partial_answer_is_resumed_or_left_to_others(driver: Driver, replay: ChatReplay) -> None:
    whole = answer_text(ASKED)
    if not driver.engine.continues:
        await driver.answer(Chat((Turn("user", "a"), Turn("assistant", "b")), continues_last=True))
        assert driver.refusals["r"].param == "continue_final_message"
        return
    blank = whole.index(" ")
    for prefix in (whole[:1], whole[: blank + 1], whole[: len(whole) // 2], whole[:-1]):
        answer = await driver.answer(resume=(ChatPoint(0, prefix, 5),), name=f"after {len(prefix)}")
        assert (prefix + answer.text(), answer.error) == (whole, None)
        assert replay.asked(replay.bodies[-1]).prefix.rstrip() == prefix.rstrip()


async def test_an_answer_that_does_not_continue_the_partial_one_fails(driver: Driver, replay: ChatReplay) -> None:
    if not driver.engine.continues:
        return
    whole = answer_text(ASKED)
    replay.faults.append(replay.with_events(lambda events: [*events[:3], *events[9:]]))
    answer = await driver.answer(resume=(ChatPoint(0, whole[:4] + "  ", 3),))
    assert (answer.finish_reason, answer.text()) == ("error", "")


async def test_tools_are_sent_even_if_calls_are_forbidden(
    driver: Driver, provider: Provider, replay: ChatReplay
) -> None:
    """The last turn forbids tools, but the conversation contains tool calls."""
    turns = (
        Turn("user", "weather?"),
        Turn("assistant", "Let me see.", calls=(Call("call_9", "weather", '{"city":"Rome"}'), Call("call_8", "time"))),
        Turn("tool", "sunny", call_id="call_9"),
        Turn("tool", "noon", call_id="call_8"),
        Turn("user", "and call it tomorrow?"),
    )
    answer = await driver.answer(Chat(turns, tools=(WEATHER, Tool("time"))), name="with tools")
    assert [part.text for part in answer.parts if part.kind == "call"] == ["weather", "time"]
    answer = await driver.answer(Chat(turns))
    assert answer.finish_reason == "stop" or driver.refusals["r"].param == "tools"
    assert not [part for part in answer.parts if part.kind == "call"]


# --- faults ---------------------------------------------------------------------------------------------------------


CUTS: Final[dict[str, Callable[[ChatReplay, Sequence[Any]], list[Any]]]] = {
    "no end": lambda _, events: [*events[:6]],
    "cut in an event": lambda _, events: [*events[:6], events[6][: len(events[6]) // 2]],
    "malformed": lambda replay, events: [*events[:6], replay.garbage(), *events[6:]],
    "an error in the stream": lambda replay, events: [*events[:6], replay.failed()],
    "an unknown end": lambda replay, _: [*replay.answer_events(script_of(Asked(ASKED, limit=3)), end="error")],
}


@pytest.mark.parametrize("cut", CUTS)
async def test_a_faults_earlier_output_is_kept_and_the_attempt_fails(
    driver: Driver, replay: ChatReplay, cut: str
) -> None:
    replay.faults.append(replay.with_events(lambda events: CUTS[cut](replay, events)))
    answer = await driver.answer(name="faulty")
    assert answer.finish_reason == "error"
    assert answer.error
    assert cut != "an error in the stream" or replay.failure in answer.error
    whole = answer_text(ASKED)
    assert 0 < len(answer.text()) < len(whole)
    assert whole.startswith(answer.text())
    assert not driver.refusals
    assert (await driver.answer(name="after")).text() == whole


async def test_an_empty_stream_fails(driver: Driver, replay: ChatReplay) -> None:
    replay.faults.append(replay.with_events(lambda _: []))
    answer = await driver.answer()
    assert answer.finish_reason == "error"
    assert "no end" in (answer.error or "")


@pytest.mark.parametrize("status", [401, 403, 404, 500, 502])
async def test_api_and_key_faults_are_not_the_clients(driver: Driver, replay: ChatReplay, status: int) -> None:
    """404: the model does not exist."""
    replay.faults.append(lambda _: JSONResponse({"message": "x" * 10_000}, status))
    answer = await driver.answer()
    assert answer.finish_reason == "error"
    assert str(status) in (answer.error or "")
    assert "k-1" not in (answer.error or "")
    assert not driver.refusals


async def test_a_too_long_prompt_is_the_clients_fault(driver: Driver, replay: ChatReplay) -> None:
    replay.faults.append(lambda _: JSONResponse({"message": "prompt is too long: 210000 tokens > 200000 maximum"}, 400))
    assert "prompt is too long" in ((await driver.answer()).error or "")
    assert driver.refusals["r"].param
    assert (await driver.answer(name="after")).finish_reason == "stop"


@pytest.mark.parametrize("status", [429, 503, 529])
async def test_a_busy_api_is_retried_when_it_says(driver: Driver, replay: ChatReplay, status: int) -> None:
    replay.faults += [lambda _: JSONResponse({}, status, {"retry-after": "0.01"})] * 2
    assert (await driver.answer()).finish_reason == "stop"
    assert len(replay.bodies) == 3


async def test_redirects_are_not_followed(driver: Driver, replay: ChatReplay) -> None:
    replay.faults.append(lambda _: RedirectResponse("http://169.254.169.254/latest/meta-data"))
    assert "307" in ((await driver.answer()).error or "")
