"""Models that pools serve which take messages: the real gateway and worker before a replay of OpenAI's API.

The answers are read by OpenAI's own client. What the API has counted is what callers and the ledger are told.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from nats.aio.msg import Msg

from gateway.settings import HostedPoolSettings, ModelSettings, TenantSettings
from pool_worker.settings import OpenAIChatSettings, WorkerSettings
from pool_worker.stopping import Stop
from protocol import subjects
from protocol.artifacts import get_object
from protocol.errors import BusError
from protocol.messages import Job, decode_job, unpack_token_ids
from protocol.usage import AttemptRecord, RequestRecord
from tests.conformance.chat_replay import ARGUMENTS, REASONING, ChatReplay, answer_text
from tests.conformance.server_replay import Fault, running
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start
from tests.integration.gateway.scripted_worker import Attempt
from tests.integration.pool_worker.playing_gateway import running_worker
from tests.small_tokenizer import byte_tokenizer, byte_tokenizer_json
from tests.waiting import until

ASKED: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me something."}]
WHOLE = answer_text(ASKED)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "time"}},
]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "not": {"required": ["m"]}}

StartPool = Callable[..., Awaitable[GatewayUnderTest]]


@pytest.fixture(scope="module")
def server() -> Iterator[ChatReplay]:
    with running(ChatReplay()) as replay:
        yield replay


@pytest.fixture
def replay(server: ChatReplay) -> ChatReplay:
    server.forget()
    return server


@pytest.fixture
def stops() -> list[Stop]:
    """Signals that make the workers leave."""
    return []


@pytest.fixture
async def start_pool(
    start_gateway: Start, replay: ChatReplay, nats_url: str, tmp_path: Path, stops: list[Stop]
) -> AsyncIterator[StartPool]:
    """Starts a gateway and workers for the replay; ``is_mixed``: the model has workers of its own, too."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(byte_tokenizer_json())
    async with AsyncExitStack() as stack:

        async def start(
            profile: str = "openai", *, is_mixed: bool = False, workers: int = 1, tier: str = "spot"
        ) -> GatewayUnderTest:
            hosted: dict[str, Any] = {}
            if tier == "hosted":
                hosted["hosted"] = {"api": HostedPoolSettings(provider="openai", models=(MODEL,))}
                hosted["tenants"] = {"test 0": TenantSettings(allow_hosted=("openai",))}
                hosted["only_hosted"] = frozenset() if is_mixed else frozenset({MODEL})
            model = ModelSettings() if is_mixed else ModelSettings(tokenizer=str(tokenizer), context_length=1_000_000)
            names = frozenset({MODEL})
            gateway = await start_gateway(
                with_card=is_mixed,
                models={MODEL: model.model_copy(update={"aliases": ("short",)})},
                by_messages=names,
                only_by_messages=frozenset() if is_mixed else names,
                **hosted,
            )
            engine = OpenAIChatSettings.model_validate(
                {
                    "kind": "openai_chat",
                    "profile": profile,
                    "url": replay.url,
                    "model": "replay",
                    "max_model_len": 1_000_000,
                }
            )
            for number in range(workers):
                names_of = {"worker_id": f"api-{number}", "pool": "api", "provider": "openai", "tier": tier}
                settings = WorkerSettings(nats_urls=(nats_url,), engine=engine, models=(MODEL,), **names_of)
                stops.append(await stack.enter_async_context(running_worker(settings)))
            return gateway

        yield start


def ask(gateway: GatewayUnderTest, asked: str | None = None, **rest: Any) -> Any:
    messages = ASKED if asked is None else [ASKED[0], {"role": "user", "content": asked}]
    return gateway.client().chat.completions.create(model=MODEL, messages=rest.pop("messages", messages), **rest)


class Streamed:
    """Put a stream together with OpenAI's client."""

    def __init__(self) -> None:
        self.text = self.reasoning = self.refusal = ""
        self.calls: list[list[str]] = []  # id, name, arguments
        self.finish_reason: str | None = None
        self.usage: Any = None
        self.error: str | None = None
        self.roles = 0

    def take(self, chunk: Any) -> None:
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            delta = choice.delta
            self.roles += delta.role is not None
            self.text += delta.content or ""
            self.refusal += delta.refusal or ""
            self.reasoning += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                if call.id is not None:
                    self.calls.append([call.id, call.function.name, ""])
                self.calls[call.index][2] += call.function.arguments or ""
            self.finish_reason = choice.finish_reason or self.finish_reason


async def stream(gateway: GatewayUnderTest, asked: str | None = None, **rest: Any) -> Streamed:
    told = Streamed()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async for chunk in await ask(gateway, asked, **options, **rest):
            told.take(chunk)
    except openai.APIError as error:
        told.error = error.code
    return told


async def rows(gateway: GatewayUnderTest, attempts: int = 1) -> tuple[RequestRecord, list[AttemptRecord]]:
    """The one request's record and those of its attempts."""
    found: list[AttemptRecord] = []

    async def are_there() -> bool:
        found[:] = [record for record in await gateway.usage() if isinstance(record, AttemptRecord)]
        return len(found) == attempts

    [record] = await gateway.records(1)
    await until(are_there)
    return record, sorted(found, key=lambda one: one.attempt)


def cut(replay: ChatReplay, after: int) -> Fault:
    """The server's connection ends in an orderly way after so many events, and the answer has no end."""

    def answer(request: Request) -> Response:
        return StreamingResponse(iter(replay.events(request._json)[:after]), media_type="text/event-stream")

    return answer


def is_provider(record: RequestRecord | AttemptRecord, *counts: int) -> bool:
    told = (record.prompt_tokens, record.cached_tokens, record.completion_tokens)
    return record.counted_by == "provider" and told == counts


async def test_a_whole_answer_and_its_rows(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool()
    answer = await ask(gateway)
    assert answer.choices[0].message.content == WHOLE
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (22, 30, 52)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    record, [attempt] = await rows(gateway)
    assert is_provider(record, 22, 4, 30)
    assert is_provider(attempt, 22, 4, 30)
    assert (record.outcome, record.provider, record.finish_reason) == ("ok", "openai", "stop")
    assert (attempt.engine, attempt.rescue) == ("openai_chat", None)
    assert replay.bodies[0]["messages"] == ASKED


async def test_a_stream_and_its_usage(start_pool: StartPool) -> None:
    gateway = await start_pool()
    told = await stream(gateway)
    assert (told.text, told.finish_reason, told.roles, told.error) == (WHOLE, "stop", 1, None)
    assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (22, 30)
    record, _ = await rows(gateway)
    assert is_provider(record, 22, 4, 30)


async def test_several_choices_each_pay_for_the_prompt(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool()
    answer = await ask(gateway, n=2, max_tokens=5)
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 2
    assert {choice.message.content for choice in answer.choices} == {" ".join(WHOLE.split(" ")[:5])}
    record, _ = await rows(gateway)
    assert is_provider(record, 44, 8, 10)
    assert [body["max_completion_tokens"] for body in replay.bodies] == [5, 5]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tools_and_reasoning(start_pool: StartPool, replay: ChatReplay, is_stream: bool) -> None:
    gateway = await start_pool()
    rest = {"tools": TOOLS, "tool_choice": "required"}
    if is_stream:
        told = await stream(gateway, "think, then call", **rest)
        calls, reasoning, reason, usage = told.calls, told.reasoning, told.finish_reason, told.usage
    else:
        answer = await ask(gateway, "think, then call", **rest)
        message = answer.choices[0].message
        calls = [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls]
        reasoning, reason, usage = message.reasoning_content, answer.choices[0].finish_reason, answer.usage
        assert message.content is None
    assert calls == [["call_0", "weather", ARGUMENTS], ["call_1", "time", ARGUMENTS]]
    assert (reasoning, reason) == (REASONING, "tool_calls")
    assert usage.completion_tokens_details.reasoning_tokens == 2
    assert replay.bodies[0]["tool_choice"] == "required"
    assert replay.bodies[0]["tools"] == TOOLS


async def test_a_schema_is_the_apis_to_follow(start_pool: StartPool, replay: ChatReplay) -> None:
    """Also where it says what no grammar of ours could enforce."""
    gateway = await start_pool()
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    assert (await ask(gateway, response_format=response_format)).choices[0].message.content == WHOLE
    assert replay.bodies[0]["response_format"] == response_format


async def test_refusals_and_filters(start_pool: StartPool) -> None:
    gateway = await start_pool()
    answer = await ask(gateway, "refuse")
    assert answer.choices[0].message.refusal == "I cannot help with that."
    assert (await stream(gateway, "refuse")).refusal == "I cannot help with that."
    assert (await ask(gateway, "filter")).choices[0].finish_reason == "content_filter"
    assert (await stream(gateway, "filter")).finish_reason == "content_filter"


async def test_the_conversation_of_tools_is_sent_as_it_was(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool()
    function = {"name": "weather", "arguments": '{"city":"Rome"}'}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    await ask(gateway, messages=messages, tools=TOOLS)
    messages[1] = {"role": "user", "content": "weather?"}
    assert replay.bodies[0]["messages"] == messages


async def test_a_conversation_too_large_for_a_message(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool()
    jobs: list[Job] = []

    async def on_job(message: Msg) -> None:
        jobs.append(decode_job(message.data))

    await gateway.bus.subscribe("rq.>", on_job)
    content = "many words " * 30_000
    answer = await ask(gateway, content)
    assert answer.choices[0].message.content == answer_text([ASKED[0], {"role": "user", "content": content}])
    assert replay.bodies[0]["messages"][1]["content"] == content
    await until(lambda: jobs)
    assert (jobs[0].chat, jobs[0].prompt_ids) == (None, b"")
    assert jobs[0].chat_object is not None
    bucket, name = subjects.PROMPTS_BUCKET, jobs[0].chat_object

    async def is_gone() -> bool:
        try:
            await get_object(gateway.bus, bucket, name)
        except BusError:
            return True
        return False

    await until(is_gone)  # nothing of it stays


# --- what cannot be -------------------------------------------------------------------------------------------------


async def test_the_apis_own_refusal_is_the_callers_at_once(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool(workers=2)
    replay.faults += [lambda _: JSONResponse({"error": {"message": "content is not allowed"}}, 400)] * 3
    for attempt in (ask(gateway), ask(gateway, stream=True)):
        with pytest.raises(openai.BadRequestError, match="content is not allowed"):
            await attempt
    assert len(replay.bodies) == 2
    replay.faults.clear()
    assert (await ask(gateway)).choices[0].message.content == WHOLE


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("top_k", {"extra_body": {"top_k": 5}}),
        ("logprobs", {"logprobs": True}),
        ("structured_outputs", {"extra_body": {"structured_outputs": {"regex": "a+"}}}),
        ("return_token_ids", {"extra_body": {"return_token_ids": True}}),
        ("chat_template_kwargs", {"extra_body": {"chat_template_kwargs": {"x": 1}}}),
        ("continue_final_message", {"extra_body": {"continue_final_message": True}}),
    ],
)
async def test_what_the_api_cannot_honour_is_refused_by_name(
    start_pool: StartPool, replay: ChatReplay, field: str, fields: dict[str, Any]
) -> None:
    gateway = await start_pool()
    with pytest.raises(openai.BadRequestError) as refusal:
        await ask(gateway, **fields)
    assert refusal.value.param == field
    assert replay.bodies == []


async def test_a_plain_prompt_has_no_place_there(start_pool: StartPool) -> None:
    gateway = await start_pool()
    with pytest.raises(openai.BadRequestError, match="/v1/chat/completions") as refusal:
        await gateway.client().completions.create(model=MODEL, prompt="Hi")
    assert refusal.value.param == "model"


async def test_a_prompt_too_long_is_refused_by_our_count(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool()
    with pytest.raises(openai.BadRequestError) as refusal:
        await ask(gateway, "x" * 1_000_001)
    assert refusal.value.code == "context_length_exceeded"
    assert replay.bodies == []


# --- what is cut ----------------------------------------------------------------------------------------------------


async def test_a_cut_stream_goes_on_where_the_api_takes_its_beginning(
    start_pool: StartPool, replay: ChatReplay
) -> None:
    gateway = await start_pool("deepseek", workers=2)
    replay.faults.append(cut(replay, 12))
    told = await stream(gateway)
    assert (told.text, told.finish_reason, told.roles, told.error) == (WHOLE, "stop", 1, None)
    said = replay.bodies[1]["messages"][-1]
    assert (said["role"], said["prefix"]) == ("assistant", True)
    assert WHOLE.startswith(said["content"])
    record, [first, second] = await rows(gateway, 2)
    assert (first.rescue, second.rescue) == (None, "message")
    assert first.completion_tokens > 0, "what was made before the cut is counted"
    assert (first.counted_by, second.counted_by, record.counted_by) == ("estimate", "provider", "estimate")
    assert record.completion_tokens == first.completion_tokens + second.completion_tokens


async def test_a_cut_stream_is_never_told_twice_where_it_does_not(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("openai", workers=2)
    replay.faults.append(cut(replay, 12))
    told = await stream(gateway)
    assert told.error == "answer_cut"
    assert 0 < len(told.text) < len(WHOLE)
    assert WHOLE.startswith(told.text)
    assert len(replay.bodies) == 1
    record, [attempt] = await rows(gateway)
    assert (record.error_code, record.counted_by) == ("answer_cut", "estimate")
    assert record.completion_tokens == attempt.completion_tokens > 0


@pytest.mark.parametrize("profile", ["openai", "deepseek"])
async def test_a_cut_answer_that_nobody_has_seen_begins_anew(
    start_pool: StartPool, replay: ChatReplay, profile: str
) -> None:
    gateway = await start_pool(profile)
    replay.faults.append(cut(replay, 12))
    answer = await ask(gateway)
    assert answer.choices[0].message.content == WHOLE
    record, [_, second] = await rows(gateway, 2)
    assert second.rescue == "start"
    assert is_provider(record, 22, 4, 30)
    assert record.attempts == 2


@pytest.mark.parametrize("after", [2, 3, 8])
async def test_a_call_is_whole_or_not_told_again(start_pool: StartPool, replay: ChatReplay, after: int) -> None:
    gateway = await start_pool("deepseek")
    replay.faults.append(cut(replay, after))
    told = await stream(gateway, "call", tools=TOOLS)
    assert told.error == "answer_cut"
    assert len(replay.bodies) == 1
    answer = await ask(gateway, "call", tools=TOOLS)
    assert [call.function.arguments for call in answer.choices[0].message.tool_calls] == [ARGUMENTS] * 2


async def test_nothing_told_is_begun_anew(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("openai")
    replay.faults.append(cut(replay, 1))
    told = await stream(gateway, "call", tools=TOOLS)
    assert (told.error, told.finish_reason) == (None, "tool_calls")
    record, [_, second] = await rows(gateway, 2)
    assert second.rescue == "start"
    assert record.counted_by == "provider"


async def test_a_worker_that_leaves_ends_what_its_api_has_begun(
    start_pool: StartPool, replay: ChatReplay, stops: list[Stop]
) -> None:
    gateway = await start_pool("deepseek", workers=2)
    replay.token_s = 0.05
    told = Streamed()
    async for chunk in await ask(gateway, stream=True):
        told.take(chunk)
        if told.text and not stops[0].requested.is_set():
            for stop in stops:
                stop.request()
    assert (told.text, told.finish_reason) == (WHOLE, "stop")
    assert len(replay.bodies) == 1


async def test_who_leaves_is_counted_for_what_was_made(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool()
    replay.token_s = 0.05
    async for chunk in await ask(gateway, stream=True):
        if chunk.choices[0].delta.content:
            break
    await gateway.close_clients()
    record, [attempt] = await rows(gateway)
    assert (record.outcome, attempt.outcome) == ("cancelled", "cancelled")
    assert (record.counted_by, attempt.counted_by) == ("estimate", "estimate")
    assert record.completion_tokens == attempt.completion_tokens > 0
    await until(lambda: replay.streams == 0)


# --- somebody else's API --------------------------------------------------------------------------------------------


async def test_a_model_that_only_a_hosted_api_serves(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("deepseek", tier="hosted")
    answer = await ask(gateway)
    assert answer.choices[0].message.content == WHOLE
    replay.faults.append(lambda _: JSONResponse({"error": {"message": "content is not allowed"}}, 400))
    with pytest.raises(openai.BadRequestError, match="content is not allowed"):
        await ask(gateway)
    assert len(replay.bodies) == 2
    replay.faults.append(cut(replay, 12))
    told = await stream(gateway)
    assert (told.text, told.error) == (WHOLE, None)
    first, *_ = await gateway.records(3)
    assert (first.tier, first.provider) == ("hosted", "openai")
    assert is_provider(first, 22, 4, 30)


async def test_a_hosted_stream_that_nobody_can_go_on_with_ends_soon(start_pool: StartPool, replay: ChatReplay) -> None:
    """It waits for nobody: its own workers are alive, and their API does not take the beginning of an answer."""
    gateway = await start_pool("openai", tier="hosted")
    await ask(gateway)  # the pool is known
    replay.faults.append(cut(replay, 12))
    told = await stream(gateway)
    assert told.error == "answer_cut"
    assert WHOLE.startswith(told.text)
    assert len(replay.bodies) == 2


async def test_what_no_api_can_read_finds_no_room_at_a_hosted_pool(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("openai", is_mixed=True, tier="hosted")
    assert (await ask(gateway)).choices[0].message.content == WHOLE
    with pytest.raises(openai.APIStatusError) as refusal:
        await ask(gateway, extra_body={"structured_outputs": {"regex": "a+"}, "do_not_queue": True})
    assert refusal.value.code == "no_workers"
    assert "x-spillway-attempts" not in refusal.value.response.headers, "it was not admitted"
    assert len(replay.bodies) == 1


# --- beside the model's own workers ---------------------------------------------------------------------------------


async def test_what_an_engine_began_goes_on_as_a_message(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("deepseek", is_mixed=True, tier="on-demand")
    begun = WHOLE[:20]

    async def begin(attempt: Attempt) -> None:
        if attempt.job.attempt > 1:
            await attempt.hand_back(0.2)
            return
        attempt.worker.takes_jobs = False
        await attempt.accept()
        await attempt.tokens(begun, (5, 6, 7))
        await attempt.fail("engine_error", "lost", True)

    await gateway.add_worker(script=begin)  # of a cheaper tier: it comes first
    told = await stream(gateway)
    assert (told.text, told.finish_reason, told.error) == (WHOLE, "stop", None)
    assert replay.bodies[0]["messages"][-1]["content"] == begun
    record, [attempt] = await rows(gateway)  # our worker leaves none
    assert (attempt.rescue, attempt.resumed_tokens, record.counted_by) == ("message", 3, "estimate")


async def test_what_an_api_began_goes_on_from_its_text(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("openai", is_mixed=True, tier="spot")
    replay.faults.append(cut(replay, 12))

    async def go_on(attempt: Attempt) -> None:
        if attempt.job.attempt == 1:
            await attempt.hand_back(0.2)
            return
        await attempt.accept()
        await attempt.tokens(" and an end", (1, 2), finish_reason="stop")
        await attempt.finish()

    ours = await gateway.add_worker(script=go_on, place=("pool-a", "provider-a", "region-a", "on-demand"))
    told = await stream(gateway)
    assert told.error is None
    said = told.text.removesuffix(" and an end")
    assert 0 < len(said) < len(told.text)
    assert WHOLE.startswith(said)
    [point] = ours.attempts[-1].job.resume
    assert byte_tokenizer().decode(unpack_token_ids(point.token_ids)) == said
    assert (point.text, point.text_chars, point.is_encoded) == (said, len(said), True)
    [record] = await gateway.records(1)
    assert (record.counted_by, record.attempts) == ("estimate", 2)


async def test_what_the_api_does_not_take_goes_to_our_own(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("openai", is_mixed=True)
    await gateway.add_worker()
    for fields in ({"top_k": 5}, {"structured_outputs": {"regex": "a+"}}, {"return_token_ids": True}):
        answer = await ask(gateway, extra_body=fields)
        assert answer.choices[0].message.content == "Hello world"
    assert replay.bodies == []
    completion = await gateway.client().completions.create(model=MODEL, prompt="Hi")
    assert completion.choices[0].text == "Hello world"


async def test_a_job_of_the_exact_path_carries_no_conversation(start_gateway: Start) -> None:
    gateway = await start_gateway()
    worker = await gateway.add_worker()
    await ask(gateway)
    job = worker.attempts[0].job
    assert (job.chat, job.chat_object) == (None, None)
    [record] = await gateway.records(1)
    assert record.counted_by == "engine"
