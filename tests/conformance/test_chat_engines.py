"""Requirements for every pool that takes messages, whatever its API, and the handling of its faults."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from fastapi.responses import JSONResponse

from engine.types import Refusal
from pool_worker import engines
from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.chat import ChatOutput, ChatPoint, ChatRequest
from pool_worker.engines.chat_formats.openai_chat import OpenAIChatFormat
from pool_worker.engines.chat_formats.openai_profiles import PROFILES
from pool_worker.engines.chat_server import ChatServerEngine
from pool_worker.engines.server_busy import Busy
from pool_worker.settings import AnyChatSettings, OpenAIChatSettings
from protocol.generation import SamplingParams
from protocol.job import DROPPABLE, THINKING, AnswerSchema, Call, Chat, ChatUsage, Part, Tool, Turn
from tests.conformance.chat_replay import ARGUMENTS, REASONING, ChatReplay, answer_text
from tests.conformance.replay import ReplayOf
from tests.waiting import HANGS_S, HEALTHY_S

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me something."}]
WEATHER = Tool("weather", "Tells the weather.", '{"type":"object","properties":{"city":{"type":"string"}}}')


def chat(asked: str = "Tell me something.", **more: Any) -> Chat:
    return Chat((Turn("system", "Be brief."), Turn("user", asked)), **more)


class Answer:
    """A choice's combined output."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.tokens = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.usage: ChatUsage | None = None
        self.is_filtered = False

    def text(self, kind: str = "text") -> str:
        return "".join(part.text for part in self.parts if part.kind == kind)


class Driver:
    """Iterates an engine's steps, as a worker does."""

    def __init__(self, engine: ChatServerEngine) -> None:
        self.engine = engine
        self.answers: dict[tuple[str, int], Answer] = defaultdict(Answer)
        self.refusals: dict[str, Refusal] = {}
        self.busy: dict[str, float | None] = {}  # by request: how long the server asks to wait
        self._changed = asyncio.Event()

    async def run(self) -> None:
        async for outputs in self.engine.steps():
            for output in outputs:
                answer = self.answers[output.request_id, output.index]
                assert answer.finish_reason is None, "output after the end"
                if isinstance(output, Refusal):
                    self.refusals[output.request_id] = output
                elif isinstance(output, Busy):
                    self.busy[output.request_id] = output.wait_s
                elif isinstance(output, ChatOutput):
                    answer.parts += output.parts
                    answer.tokens += output.tokens
                    answer.usage, answer.is_filtered = output.usage, output.is_filtered
                answer.finish_reason, answer.error = output.finish_reason, output.error
            self._changed.set()

    async def wait(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANGS_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANGS_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def end_of(self, name: str) -> None:
        await self.wait(lambda: self.answers[name, 0].finish_reason is not None)

    async def answer(self, asked: Chat | None = None, name: str = "r", **more: Any) -> Answer:
        resume, salt = more.pop("resume", ()), more.pop("cache_salt", "")
        sampling = SamplingParams(max_tokens=more.pop("max_tokens", 100), **more)
        self.engine.submit(ChatRequest(name, asked or chat(), sampling, 7, resume, salt))
        await self.end_of(name)
        return self.answers.pop((name, 0))


def settings(replay: ChatReplay, **more: Any) -> OpenAIChatSettings:
    known = {"kind": "openai_chat", "profile": "openai", "model": "replay", "api_key": "k-1", "ready_s": HANGS_S}
    return OpenAIChatSettings(**{**known, "url": replay.url, **more})


@asynccontextmanager
async def driving(replay: ChatReplay, **more: Any) -> AsyncIterator[Driver]:
    async with driving_chat(settings(replay, **more)) as driver:
        yield driver


@asynccontextmanager
async def driving_chat(settings: AnyChatSettings) -> AsyncIterator[Driver]:
    engine = engines.create(settings)
    assert isinstance(engine, ChatServerEngine)
    await engine.start()
    driver = Driver(engine)
    steps = asyncio.create_task(driver.run())
    try:
        yield driver
    finally:
        await engine.stop()
        await steps


@pytest.fixture
def replay(replay_of: ReplayOf) -> ChatReplay:
    return replay_of(ChatReplay)


@pytest.fixture(params=PROFILES)
async def pair(request: pytest.FixtureRequest, replay: ChatReplay) -> AsyncIterator[tuple[Driver, ChatReplay]]:
    replay.repeats_prefix = PROFILES[request.param].repeats_prefix
    async with driving(replay, profile=request.param) as driver:
        yield driver, replay


async def test_text_and_the_providers_counts(pair: tuple[Driver, ChatReplay]) -> None:
    driver, replay = pair
    answer = await driver.answer()
    assert answer.text() == answer_text(ASKED)
    assert answer.finish_reason == "stop"
    assert answer.usage == ChatUsage("provider", 22, 30, 4)
    assert answer.tokens > 0  # estimated meanwhile
    [body] = replay.bodies
    assert body["messages"] == ASKED
    assert not {"max_tokens", "max_completion_tokens"} & body.keys()  # no limit was set


@pytest.mark.parametrize("profile", PROFILES)
async def test_the_tenants_salt_is_sent_to_an_api_that_takes_one(replay: ChatReplay, profile: str) -> None:
    replay.repeats_prefix = PROFILES[profile].repeats_prefix
    async with driving(replay, profile=profile) as driver:
        await driver.answer()
        await driver.answer(cache_salt="of the tenant")
    shared, salted = replay.bodies
    field = {"vllm": "cache_salt", "sglang": "cache_salt", "deepseek": "user_id"}.get(profile)
    assert salted == (shared if field is None else {**shared, field: "of the tenant"})


async def test_a_limit_and_several_choices(pair: tuple[Driver, ChatReplay]) -> None:
    driver, replay = pair
    driver.engine.submit(ChatRequest("two", chat(is_limited=True), SamplingParams(max_tokens=3, n=2), 7))
    await driver.wait(lambda: all(driver.answers["two", index].finish_reason for index in (0, 1)))
    for index in (0, 1):
        answer = driver.answers["two", index]
        assert answer.finish_reason == "length"
        assert answer_text(ASKED).startswith(answer.text())
    assert len(replay.bodies) == 2
    assert not any("n" in body for body in replay.bodies)


async def test_reasoning_and_calls_are_distinguished(pair: tuple[Driver, ChatReplay]) -> None:
    driver, replay = pair
    tools = (WEATHER, Tool("time"))
    answer = await driver.answer(chat("think, then call", tools=tools, tool_choice="required"))
    assert answer.text("reasoning") == REASONING
    assert [(part.text, part.call_id) for part in answer.parts if part.kind == "call"] == [
        ("weather", "call_0"),
        ("time", "call_1"),
    ]
    assert answer.text("arguments") == ARGUMENTS * 2
    assert (answer.finish_reason, answer.text()) == ("stop", "")
    assert answer.usage is not None
    assert answer.usage.reasoning_tokens == 2
    [body] = replay.bodies
    assert body["tools"][0]["function"]["parameters"]["properties"] == {"city": {"type": "string"}}
    assert body["tool_choice"] in {"required", "any"}


async def check_stop_strings(driver: Driver, replay: ChatReplay) -> None:
    """They end the content only; the match is reported, and the API does not get them."""
    whole = answer_text(ASKED)
    stop = whole[len(whole) // 2 :][:12]  # in several pieces
    before = whole[: whole.index(stop)]
    for name, more, expected in (
        ("before", {"stop": (stop,)}, before),
        ("with", {"stop": ("never", stop), "include_stop_str_in_output": True}, before + stop),
        ("not found", {"stop": (whole[-9:] + "x",)}, whole),
        ("too early", {"stop": (stop,), "min_tokens": 1000}, whole),
    ):
        if "min_tokens" in more and "min_tokens" not in driver.engine.honoured:
            continue
        answer = await driver.answer(name=name, **more)
        assert (answer.text(), answer.finish_reason) == (expected, "stop"), name
        assert answer.usage is not None
        assert answer.usage.counted_by == ("provider" if expected == whole else "estimate")
        assert stop not in json.dumps(replay.bodies[-1])
    if driver.engine.continues:
        resume = (ChatPoint(0, before[:20], 5),)
        answer = await driver.answer(name="resumed", stop=(stop,), resume=resume)
        assert before[:20] + answer.text() == before
    driver.engine.submit(ChatRequest("two", chat(), SamplingParams(max_tokens=100, n=2, stop=(stop,)), 7))
    await driver.wait(lambda: all(driver.answers["two", index].finish_reason for index in (0, 1)))
    assert [driver.answers["two", index].text() for index in (0, 1)] == [before, before]

    asked = [ASKED[0], {"role": "user", "content": "think"}]
    stops = ("Let", "about", f"{REASONING[-3:]}{answer_text(asked)[:3]}")  # the last ends in the content
    answer = await driver.answer(chat("think"), name="thought", stop=stops)
    assert (answer.text("reasoning"), answer.text()) == (REASONING, answer_text(asked))
    answer = await driver.answer(chat("call", tools=(WEATHER,)), name="called", stop=(ARGUMENTS[:3], "weather", "{"))
    assert (answer.text("call"), answer.text("arguments")) == ("weather", ARGUMENTS)


async def test_stop_strings_are_searched_in_the_content(pair: tuple[Driver, ChatReplay]) -> None:
    await check_stop_strings(*pair)


async def test_refusals_and_filters(pair: tuple[Driver, ChatReplay]) -> None:
    driver, _ = pair
    assert (await driver.answer(chat("refuse"))).text("refusal") == "I cannot help with that."
    filtered = await driver.answer(chat("filter"))
    assert (filtered.finish_reason, filtered.is_filtered) == ("stop", True)


async def test_unsupported_fields_are_refused_by_name(pair: tuple[Driver, ChatReplay]) -> None:
    driver, replay = pair
    asked: dict[str, Any] = {
        "top_k": 5,
        "logprobs": 2,
        "min_p": 0.5,
        "logit_bias": {5: 1.0},
        "seed": 7,
        "presence_penalty": 0.5,
    }
    for number, (name, value) in enumerate(asked.items()):
        answer = await driver.answer(name=f"r{number}", **{name: value})
        if name in driver.engine._format.honoured:
            assert answer.finish_reason == "stop"
            field = "random_seed" if name == "seed" and "random_seed" in replay.bodies[-1] else name
            assert replay.bodies[-1][field] in (value, {"5": 1.0})
        else:
            assert driver.refusals[f"r{number}"].param == name
    schema = AnswerSchema('{"type":"object"}', "thing", is_strict=True)
    answer = await driver.answer(chat(schema=schema), name="schema")
    if "json_schema" in driver.engine._format.schemas:
        reported = {"name": "thing", "schema": {"type": "object"}, "strict": True}
        assert replay.bodies[-1]["response_format"] == {"type": "json_schema", "json_schema": reported}
    else:
        assert driver.refusals["schema"].param == "response_format"
    answer = await driver.answer(chat(tools=(WEATHER,), is_single_call=True), name="single")
    assert isinstance(driver.engine._format, OpenAIChatFormat)
    reported = {"parallel_tool_calls": False} if driver.engine._format._profile.takes_single_call else {}
    assert {name: value for name, value in replay.bodies[-1].items() if name == "parallel_tool_calls"} == reported


SAMPLED: dict[str, Any] = {
    "temperature": 1.9,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {5: 1.0},
    "seed": 7,
    "stop_token_ids": (5,),
    "min_tokens": 2,
    "ignore_eos": True,
    "allowed_token_ids": (5,),
    "bad_words": ("no",),
}
WISHES: dict[str, Chat] = {"reasoning_effort": chat(reasoning_effort="unheard of"), THINKING: chat(thinks=True)}


Drive = Callable[..., AbstractAsyncContextManager[Driver]]


async def check_unsupported(drive: Drive, replay: ChatReplay) -> None:
    """Unsupported fields are refused by name, or dropped and reported; supported ones are sent."""
    assert {*SAMPLED, *WISHES} == DROPPABLE
    requests = {
        name: ChatRequest(
            name,
            WISHES.get(name, chat()),
            SamplingParams(max_tokens=100, **({name: SAMPLED[name]} if name in SAMPLED else {})),
            7,
        )
        for name in sorted(DROPPABLE)
    }
    async with drive() as driver:
        await driver.answer(name="usual")
        [usual] = replay.bodies
        for name, request in requests.items():
            assert driver.engine.fitted(request) == (request, ())
            driver.engine.submit(request)
            await driver.end_of(name)
            if name not in driver.refusals:
                assert name == THINKING or replay.bodies[-1] != usual, name
                assert driver.answers[name, 0].finish_reason == "stop", name
        refusals = driver.refusals
    assert all(refusal.param == name and f"'{name}'" in str(refusal.error) for name, refusal in refusals.items())
    async with drive(unsupported="drop") as driver:
        for name, request in requests.items():
            fitted, dropped = driver.engine.fitted(request)
            assert dropped == ((name,) if name in refusals else ())
            assert (fitted == request) == (name not in refusals)
            driver.engine.submit(fitted)
            await driver.end_of(name)
            assert driver.answers[name, 0].text() == answer_text(ASKED)
            assert name == THINKING or (replay.bodies[-1] == usual) == (name in refusals), name
        both = SamplingParams(logprobs=1, n=2)  # its answer would have another form
        assert driver.engine.fitted(ChatRequest("r", chat(), both, 7))[1] == ()


@pytest.mark.parametrize("profile", PROFILES)
async def test_unsupported_fields_are_refused_or_dropped(replay: ChatReplay, profile: str) -> None:
    await check_unsupported(partial(driving, replay, profile=profile), replay)


@pytest.mark.parametrize(
    ("profile", "thinks", "sent"),
    [
        ("vllm", True, {"chat_template_kwargs": {"enable_thinking": True}}),
        ("sglang", False, {"chat_template_kwargs": {"enable_thinking": False}}),
        ("openrouter", False, {"reasoning": {"enabled": False}}),
        ("deepseek", True, {"thinking": {"type": "enabled"}}),
    ],
)
async def test_reasoning_can_be_switched(replay: ChatReplay, profile: str, thinks: bool, sent: dict[str, Any]) -> None:
    async with driving(replay, profile=profile) as driver:
        await driver.answer(chat(thinks=thinks))
    [body] = replay.bodies
    assert {name: value for name, value in body.items() if name in sent} == sent


async def test_a_partial_answer_is_resumed_or_left_to_others(pair: tuple[Driver, ChatReplay]) -> None:
    driver, replay = pair
    if not driver.engine.continues:
        return
    whole = answer_text(ASKED)
    for prefix in (whole[:1], whole[: len(whole) // 2], whole[:-1]):
        answer = await driver.answer(resume=(ChatPoint(0, prefix, 5),), name=f"after {len(prefix)}")
        assert prefix + answer.text() == whole
        assert replay.bodies[-1]["messages"][-1]["content"] == prefix


async def test_a_conversation_with_tools_is_passed_unchanged(pair: tuple[Driver, ChatReplay]) -> None:
    driver, replay = pair
    turns = (
        Turn("user", "weather?"),
        Turn("assistant", None, calls=(Call("call_9", "weather", '{"city":"Rome"}'),)),
        Turn("tool", "sunny", call_id="call_9"),
    )
    assert (await driver.answer(Chat(turns, tools=(WEATHER,)))).finish_reason == "stop"
    call = {"id": "call_9", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
    assert replay.bodies[0]["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_9"},
    ]


async def test_keys_and_paths_of_azure_and_deepseek(replay: ChatReplay) -> None:
    async with driving(replay, profile="azure", model="my-gpt") as driver:
        await driver.answer()
    assert replay.urls[0].endswith("/openai/deployments/my-gpt/chat/completions?api-version=2024-10-21")
    assert replay.headers[0]["api-key"] == "k-1"
    assert "authorization" not in replay.headers[0]
    async with driving(replay, profile="deepseek") as driver:
        await driver.answer()
        await driver.answer(resume=(ChatPoint(0, answer_text(ASKED)[:9], 2),), name="resumed")
    assert replay.headers[1]["authorization"] == "Bearer k-1"
    paths = [url.removeprefix(replay.url) for url in replay.urls[1:]]
    assert paths == ["/chat/completions", "/beta/chat/completions"]


# --- faults, beside those of every API (``test_provider_engines``) ---------------------------------------------------


@pytest.fixture
async def faulty(replay: ChatReplay) -> AsyncIterator[tuple[Driver, ChatReplay]]:
    async with driving(replay) as driver:
        yield driver, replay


CUTS: dict[str, Callable[[list[str]], list[str]]] = {
    "a list": lambda events: [*events[:6], "data: [1, 2]\n\n", *events[6:]],
    "choices that are none": lambda events: [*events[:6], 'data: {"choices": 5}\n\n', *events[6:]],
    "an endless event": lambda events: [*events[:6], "data: " + "x" * 3_000_000],
}


@pytest.mark.parametrize("cut", CUTS)
async def test_a_faults_earlier_output_is_kept_and_the_attempt_fails(
    faulty: tuple[Driver, ChatReplay], cut: str
) -> None:
    driver, replay = faulty
    replay.faults.append(replay.with_events(CUTS[cut]))
    answer = await driver.answer(name="faulty")
    assert answer.finish_reason == "error"
    assert answer.error
    whole = answer_text(ASKED)
    assert 0 < len(answer.text()) < len(whole)
    assert whole.startswith(answer.text())
    assert not driver.refusals
    assert (await driver.answer(name="after")).text() == whole


@pytest.mark.parametrize("events_lost", [1, 2])
async def test_an_answer_with_a_finish_reason_is_complete_without_its_rest(
    faulty: tuple[Driver, ChatReplay], events_lost: int
) -> None:
    driver, replay = faulty
    replay.faults.append(replay.with_events(lambda events: events[:-events_lost]))
    answer = await driver.answer()
    assert (answer.finish_reason, answer.text()) == ("stop", answer_text(ASKED))
    assert answer.usage is not None
    assert answer.usage.counted_by == ("provider" if events_lost == 1 else "estimate")


@pytest.mark.parametrize("usage", ['"usage": {"prompt_tokens": -1, "completion_tokens": "x"}', '"usage": {}'])
async def test_implausible_counts_are_replaced_by_estimates(faulty: tuple[Driver, ChatReplay], usage: str) -> None:
    driver, replay = faulty

    def wrong(events: list[str]) -> list[str]:
        event = f'data: {{"choices": [], {usage}}}\n\n'
        return [*events[:-2], event, events[-1]]

    replay.faults.append(replay.with_events(wrong))
    answer = await driver.answer()
    assert answer.usage == ChatUsage("estimate", 7, answer.tokens)


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_request_fault_is_refused_permanently(faulty: tuple[Driver, ChatReplay], status: int) -> None:
    driver, replay = faulty
    replay.faults.append(lambda _: JSONResponse({"error": {"message": "content is not allowed"}}, status))
    assert "content is not allowed" in ((await driver.answer()).error or "")
    assert driver.refusals["r"].param
    assert (await driver.answer(name="after")).finish_reason == "stop"


async def test_an_answer_that_does_not_continue_the_partial_one_fails(replay: ChatReplay) -> None:
    """An API that should repeat it but starts over: nothing of it may reach the client."""
    async with driving(replay, profile="mistral") as driver:
        answer = await driver.answer(resume=(ChatPoint(0, answer_text(ASKED)[:12], 3),))
    assert (answer.finish_reason, answer.text()) == ("error", "")
    assert "does not continue" in (answer.error or "")


async def test_canceling_ends_the_servers_work(faulty: tuple[Driver, ChatReplay]) -> None:
    driver, replay = faulty
    replay.token_s = 0.05
    driver.engine.submit(ChatRequest("left", chat(), SamplingParams(max_tokens=100), 7))
    await driver.wait(lambda: bool(driver.answers["left", 0].parts))
    driver.engine.cancel("left")
    await driver.wait(lambda: driver.answers["left", 0].finish_reason == "cancelled")
    await driver.wait_until(lambda: replay.streams == 0)


async def test_an_unhealthy_server_is_lost(replay: ChatReplay) -> None:
    engine = engines.create(settings(replay, profile="vllm", health_limit_s=HEALTHY_S))
    assert isinstance(engine, ChatServerEngine)
    await engine.start()
    replay.is_healthy = False
    with pytest.raises(EngineDiedError, match="500"):
        await Driver(engine).run()
    await engine.stop()
