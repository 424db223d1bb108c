"""Calls of tools and reasoning, as the official clients see them, from scripted workers that write them."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from msgspec.structs import replace
from pydantic import BaseModel

from gateway.settings import ModelSettings
from protocol import artifacts
from protocol.bus import Bus
from protocol.logprobs import TokenLogprob
from tests.integration.gateway.conftest import (
    MODEL,
    GatewayUnderTest,
    Start,
    card,
    has_context_length,
)
from tests.integration.gateway.scripted_worker import Attempt
from tests.small_tokenizer import byte_tokenizer, byte_tokenizer_json
from tests.tool_templates import (
    DEEPSEEK_V3_STYLE,
    DEEPSEEK_V31_STYLE,
    GLM_STYLE,
    HARMONY_STYLE,
    HERMES_STYLE,
    KIMI_STYLE,
    LLAMA_STYLE,
    MISTRAL_STYLE,
    THINKING_STYLE,
)
from tests.waiting import HANGS_S, until

HELLO = [{"role": "user", "content": "Will it rain?"}]
ARGUMENTS = '{"city": "Köln", "days": 2}'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "…", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO_CALLS = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
GLM_CALL = """<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Köln</arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
</tool_call>"""
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
DEEPSEEK = f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}{DEEPSEEK_CALL}<｜tool▁calls▁end｜>"
DEEPSEEK_V3_CALL = "function<｜tool▁sep｜>{}\n```json\n{}\n```"
KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KIMI_CALLS = f"{KIMI_CALL.format('get_weather:3', ARGUMENTS)}{KIMI_CALL.format('now:4', '{}')}"
StartModel = Callable[..., Awaitable[GatewayUnderTest]]


@pytest.fixture
def start_model(start_gateway: Start, bus: Bus) -> StartModel:
    """A gateway whose model has the chat template given."""

    async def start(template: str, *, tool_template: str | None = None, **settings: Any) -> GatewayUnderTest:
        models = {MODEL: ModelSettings(aliases=("short",), **settings)}
        gateway = await start_gateway(with_card=False, models=models)
        its_card = replace(card(), chat_template=template, context_length=4096, tool_template=tool_template)
        await artifacts.publish_model_card(bus, its_card, byte_tokenizer_json())
        client = gateway.client()
        await until(lambda: has_context_length(client))
        return gateway

    return start


def says(*texts: str, finish_reason: str = "stop", width: int = 3) -> Callable[[Attempt], Awaitable[None]]:
    """A script whose choices are these texts, a few characters at a time."""

    async def script(attempt: Attempt) -> None:
        await attempt.accept()
        for index, text in enumerate(texts):
            for place in range(0, len(text), width):
                await attempt.tokens(text[place : place + width], index=index)
            await attempt.tokens("", index=index, finish_reason=finish_reason)
        await attempt.finish()

    return script


async def streamed(gateway: GatewayUnderTest, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a streamed answer, put together from its deltas."""
    stream = await gateway.client().chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "tools": [TOOL, NOW], "stream": True, **fields}
    )
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for part in chunk.choices:
            whole = choices.setdefault(part.index, {"content": None, "reasoning": None, "calls": [], "end": None})
            delta = part.delta.model_dump()
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for kind in ("content", "reasoning"):
                if delta.get(kind):
                    whole[kind] = (whole[kind] or "") + delta[kind]
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    assert call["index"] == len(whole["calls"])
                    whole["calls"].append([call["function"]["name"], ""])
                else:
                    assert whole["end"] is None
                    whole["calls"][call["index"]][1] += call["function"]["arguments"]
            whole["end"] = part.finish_reason or whole["end"]
    return [choices[index] for index in sorted(choices)]


async def test_calls_whole_and_streamed(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    worker = await gateway.add_worker(script=says(TWO_CALLS, "No, it won't.\n"))
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": [TOOL, NOW], "n": 2, "max_tokens": 300}
    answer = await gateway.client().chat.completions.create(**ask)
    called, told = answer.choices
    assert called.finish_reason == "tool_calls"
    assert called.message.content == "Let me see."
    assert called.message.tool_calls is not None
    first, second = called.message.tool_calls
    assert first.id.startswith("call_")
    assert first.id != second.id
    assert (first.type, first.function.name, first.function.arguments) == ("function", "get_weather", ARGUMENTS)
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert (told.message.content, told.message.tool_calls, told.finish_reason) == ("No, it won't.\n", None, "stop")

    choices = await streamed(gateway, n=2)
    assert choices == [
        {
            "content": "Let me see.",
            "reasoning": None,
            "calls": [["get_weather", ARGUMENTS], ["now", "{}"]],
            "end": "tool_calls",
        },
        {"content": "No, it won't.\n", "reasoning": None, "calls": [], "end": "stop"},
    ]
    job = worker.attempts[0].job
    assert job.sampling.grammar is None  # nothing is forced
    assert job.sampling.skip_special_tokens
    prompt = byte_tokenizer().decode(worker.attempts[0].prompt_ids, skip_special_tokens=False)
    assert '{"type": "function", "function": {"name": "get_weather", "description": "…"' in prompt

    # The next turn, with the call and its result.
    result = {"role": "tool", "tool_call_id": first.id, "content": "dry"}
    await gateway.client().chat.completions.create(**{**ask, "messages": [*HELLO, called.message, result]})
    prompt = byte_tokenizer().decode(worker.attempts[-1].prompt_ids, skip_special_tokens=False)
    assert f"{CALL}\n<tool_call>" in prompt
    assert "<tool_response>\ndry\n</tool_response>" in prompt


async def test_alone_without_content_and_no_more_than_one(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    await gateway.add_worker(script=says(f"{CALL}\n{CALL}"))
    answer = await gateway.client().chat.completions.create(
        model=MODEL, messages=HELLO, tools=[TOOL], parallel_tool_calls=False
    )
    assert answer.choices[0].message.content is None
    assert len(answer.choices[0].message.tool_calls or ()) == 1
    [choice] = await streamed(gateway, parallel_tool_calls=False)
    assert choice["calls"] == [["get_weather", ARGUMENTS]]


async def test_legacy_functions(start_model: StartModel) -> None:
    """As OpenAI's older clients ask and are answered."""
    gateway = await start_model(HERMES_STYLE)
    worker = await gateway.add_worker(script=says(f"{CALL}\n{CALL}"))
    function = {"name": "get_weather", "description": "…", "parameters": SCHEMA}
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "functions": [function], "function_call": "auto"}
    [choice] = (await gateway.client().chat.completions.create(**ask)).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.function_call is not None
    assert choice.message.tool_calls is None
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("get_weather", ARGUMENTS)

    name, arguments, ends = "", "", []
    async for chunk in await gateway.client().chat.completions.create(**ask, stream=True):
        called = chunk.choices[0].delta.function_call
        name += (called.name or "") if called else ""
        arguments += (called.arguments or "") if called else ""
        ends.append(chunk.choices[0].finish_reason)
    assert (name, arguments, ends[-1]) == ("get_weather", ARGUMENTS, "function_call")

    result = {"role": "function", "name": "get_weather", "content": "dry"}
    messages = [*HELLO, choice.message.model_dump(exclude_none=True), result]
    await gateway.client().chat.completions.create(
        **{**ask, "messages": messages, "function_call": {"name": "get_weather"}}
    )
    prompt = byte_tokenizer().decode(worker.attempts[-1].prompt_ids, skip_special_tokens=False)
    assert CALL in prompt
    assert "<tool_response>\ndry\n</tool_response>" in prompt
    assert worker.attempts[-1].job.sampling.grammar is not None  # it must call


async def test_schemas_of_tools_that_cannot_be_forced(start_model: StartModel) -> None:
    function = {"name": "f", "parameters": {"type": "object", "not": {"required": ["a"]}}}
    tools = [{"type": "function", "function": function}]
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": tools}
    gateway = await start_model(HERMES_STYLE, lenient_schemas=True)
    worker = await gateway.add_worker(script=says('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'))
    answer = await gateway.client().chat.completions.create(**ask, tool_choice="required")
    grammar = worker.attempts[0].job.sampling.grammar
    assert grammar is not None
    assert '"not"' not in grammar.source
    [told] = answer.choices[0].schema_errors  # type: ignore[attr-defined]
    assert "not" in told
    stream = await gateway.client().chat.completions.create(**ask, tool_choice="required", stream=True)
    ends = [chunk.choices[0] async for chunk in stream if chunk.choices and chunk.choices[0].finish_reason]
    assert [end.schema_errors for end in ends] == [[told]]


async def test_what_is_cut_off_or_no_call(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    await gateway.add_worker(
        script=says(CALL.partition("ays")[0], "so <tool_call>\n{oops", CALL[:15], finish_reason="length")
    )
    choices = await streamed(gateway, n=3)
    assert [(choice["content"], choice["end"]) for choice in choices] == [
        (None, "length"),
        ("so <tool_call>\n{oops", "length"),
        (CALL[:15], "length"),
    ]
    assert choices[0]["calls"] == [["get_weather", ARGUMENTS.partition("ays")[0]]]


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        (HERMES_STYLE, TWO_CALLS),
        (GLM_STYLE, f"Let me see.\n{GLM_CALL}\n<tool_call>now\n</tool_call>"),
        (
            DEEPSEEK_V3_STYLE,
            DEEPSEEK.format(DEEPSEEK_V3_CALL.format("get_weather", ARGUMENTS), DEEPSEEK_V3_CALL.format("now", "{}")),
        ),
        (DEEPSEEK_V31_STYLE, DEEPSEEK.format(f"get_weather<｜tool▁sep｜>{ARGUMENTS}", "now<｜tool▁sep｜>{}")),
        (KIMI_STYLE, f"<|tool_calls_section_begin|>{KIMI_CALLS}<|tool_calls_section_end|>"),
    ],
    ids=["hermes", "glm", "deepseek-v3", "deepseek-v31", "kimi"],
)
async def test_a_rescue_within_the_arguments(start_model: StartModel, template: str, calls: str) -> None:
    """The first worker fails there; the second goes on, and the deltas are those of an undisturbed answer."""
    gateway = await start_model(template)
    place = calls.index("Köln") + 2

    async def fail_then_finish(attempt: Attempt) -> None:
        await attempt.accept()
        if attempt.job.attempt == 1:
            await attempt.tokens(calls[:place], (1, 2))
            await attempt.fail("worker_draining", "bye", retryable=True)
            return
        assert attempt.job.resume[0].text_chars == place
        await attempt.tokens(calls[place : place + 9], (3,))
        await attempt.tokens(calls[place + 9 :], (4,), finish_reason="stop")
        await attempt.finish()

    worker = await gateway.add_worker(script=fail_then_finish)
    [choice] = await streamed(gateway)
    assert choice["calls"] == [["get_weather", ARGUMENTS], ["now", "{}"]]
    assert choice["end"] == "tool_calls"
    assert len(worker.attempts) == 2
    [record] = await gateway.records()
    assert (record.attempts, record.completion_tokens) == (2, 4)


async def test_reasoning_that_the_template_began(start_model: StartModel) -> None:
    gateway = await start_model(THINKING_STYLE)
    await gateway.add_worker(script=says(f"They ask …\n</think>\n\n{CALL}", "I wonder"))
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "n": 2}
    answer = await gateway.client().chat.completions.create(**ask, tools=[TOOL])
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    # They came in 4 and 3 tokens; the last of the first also began its mark.
    assert answer.usage.completion_tokens_details.reasoning_tokens == 7
    first, second = (choice.message.model_dump() for choice in answer.choices)
    assert first["reasoning"] == first["reasoning_content"] == "They ask …"
    assert first["content"] is None
    assert len(first["tool_calls"]) == 1
    assert (second["reasoning"], second["content"]) == ("I wonder", None)
    choices = await streamed(gateway, n=2)
    assert [(choice["reasoning"], choice["content"]) for choice in choices] == [
        ("They ask …", None),
        ("I wonder", None),
    ]
    stream = await gateway.client().chat.completions.create(
        **ask, tools=[TOOL], stream=True, stream_options={"include_usage": True}
    )
    *_, last = [chunk async for chunk in stream]
    assert last.usage == answer.usage
    # Without tools it is split all the same; without thinking there is nothing to split.
    quiet = await gateway.client().chat.completions.create(
        **ask, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert quiet.choices[1].message.content == "I wonder"
    assert "reasoning" not in quiet.choices[1].message.model_dump()


async def test_reasoning_is_split_without_tools_and_with_logprobs(start_model: StartModel) -> None:
    gateway = await start_model(THINKING_STYLE)
    parts = ["So", "</thi", "nk>", "\n", "Hi", "!"]

    async def with_logprobs(attempt: Attempt) -> None:
        await attempt.accept()
        for number, part in enumerate(parts):
            logprob = TokenLogprob(number, part, -0.5, part.encode())
            end = "stop" if number == len(parts) - 1 else None
            await attempt.tokens(part, (number,), logprobs=(logprob,), finish_reason=end)
        await attempt.finish()

    await gateway.add_worker(script=with_logprobs)
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "logprobs": True}
    answer = await gateway.client().chat.completions.create(**ask)
    assert answer.choices[0].logprobs is not None
    assert [token.token for token in answer.choices[0].logprobs.content or ()] == parts
    tokens: list[str] = []
    async for chunk in await gateway.client().chat.completions.create(**ask, stream=True):
        logprobs = chunk.choices[0].logprobs
        tokens += [token.token for token in (logprobs.content if logprobs else None) or ()]
    assert tokens == parts


async def test_harmony(start_model: StartModel) -> None:
    gateway = await start_model(HARMONY_STYLE)
    calling = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{ARGUMENTS}"
    )
    telling = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>No."
    worker = await gateway.add_worker(script=says(calling, telling))
    choices = await streamed(gateway, n=2, reasoning_effort="low", tools=[TOOL])
    assert choices == [
        {"content": None, "reasoning": "Hm.", "calls": [["get_weather", ARGUMENTS]], "end": "tool_calls"},
        {"content": "No.", "reasoning": "Hm.", "calls": [], "end": "stop"},
    ]
    assert "Reasoning: low" in byte_tokenizer().decode(worker.attempts[0].prompt_ids)


async def test_kimis_calls_keep_the_ids_that_it_gave_them(start_model: StartModel) -> None:
    gateway = await start_model(KIMI_STYLE)
    worker = await gateway.add_worker(
        script=says(f"<|tool_calls_section_begin|>{KIMI_CALLS}<|tool_calls_section_end|>")
    )
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": [TOOL, NOW]}
    answer = await gateway.client().chat.completions.create(**ask)
    calls = answer.choices[0].message.tool_calls or []
    assert [call.id for call in calls] == ["functions.get_weather:3", "functions.now:4"]
    stream = await gateway.client().chat.completions.create(**ask, stream=True)
    streamed = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.id) for call in streamed if call.id] == list(enumerate(call.id for call in calls))

    results = [{"role": "tool", "tool_call_id": call.id, "content": "dry"} for call in calls]
    await gateway.client().chat.completions.create(**{**ask, "messages": [*HELLO, answer.choices[0].message, *results]})
    prompt = byte_tokenizer().decode(worker.attempts[-1].prompt_ids, skip_special_tokens=False)
    assert KIMI_CALLS in prompt
    assert "## Return of functions.now:4" in prompt


async def test_mistrals_ids_have_nine_letters(start_model: StartModel) -> None:
    gateway = await start_model(MISTRAL_STYLE)
    await gateway.add_worker(script=says(f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'))
    ask: dict[str, Any] = {"model": MODEL, "tools": [TOOL]}
    answer = await gateway.client().chat.completions.create(**ask, messages=HELLO)
    message = answer.choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "dry"}
    await gateway.client().chat.completions.create(**ask, messages=[*HELLO, message, result])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_forced_by_a_grammar(start_model: StartModel, choice: Any) -> None:
    gateway = await start_model(HERMES_STYLE)
    worker = await gateway.add_worker(script=says('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'))
    [answer] = await streamed(gateway, tool_choice=choice)
    assert (answer["calls"], answer["end"]) == ([["now", "{}"]], "tool_calls")
    grammar = worker.attempts[0].job.sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.field) == ("lark", "tools")
    assert ("get_weather" in grammar.source) == (choice == "required")


async def test_none_means_that_nothing_is_told_of_tools(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    worker = await gateway.add_worker(script=says("Hi"))
    answer = await gateway.client().chat.completions.create(
        model=MODEL, messages=HELLO, tools=[TOOL], tool_choice="none"
    )
    assert answer.choices[0].message.content == "Hi"
    assert "get_weather" not in byte_tokenizer().decode(worker.attempts[0].prompt_ids)


async def test_without_tools_text_is_passed_on_as_it_comes(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    await gateway.add_worker(script=says(f" \n{CALL} ", width=5))
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO}
    whole = await gateway.client().chat.completions.create(**ask)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (f" \n{CALL} ", "stop")
    parts = [chunk async for chunk in await gateway.client().chat.completions.create(**ask, stream=True)]
    texts = [part.choices[0].delta.content for part in parts if part.choices[0].delta.content]
    assert "".join(texts) == f" \n{CALL} "
    assert {len(text) for text in texts[:-1]} == {5}


async def test_a_template_of_its_own_for_tools(start_model: StartModel) -> None:
    gateway = await start_model(card().chat_template or "", tool_template=HERMES_STYLE)
    worker = await gateway.add_worker(script=says(CALL))
    [choice] = await streamed(gateway)
    assert choice["calls"] == [["get_weather", ARGUMENTS]]
    await gateway.client().chat.completions.create(model=MODEL, messages=HELLO)
    with_tools, without = (byte_tokenizer().decode(attempt.prompt_ids) for attempt in worker.attempts)
    assert "get_weather" in with_tools
    assert "Tools" not in without


async def refusal(gateway: GatewayUnderTest, **fields: Any) -> tuple[int, str | None, str]:
    headers = {"authorization": f"Bearer {gateway.key}"}
    body = {"model": MODEL, "messages": HELLO, "tools": [TOOL], **fields}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


async def test_refusals_name_the_field(start_model: StartModel) -> None:
    gateway = await start_model(LLAMA_STYLE)
    status, param, message = await refusal(gateway, response_format={"type": "json_object"})
    assert (status, param) == (400, "response_format")
    assert "look like JSON" in message

    async def refuse(attempt: Attempt) -> None:
        await attempt.accept()
        grammar = attempt.job.sampling.grammar
        assert grammar is not None
        await attempt.fail("invalid_request", "no such grammar", retryable=False, param=grammar.field)

    await gateway.add_worker(script=refuse)
    assert (await refusal(gateway, tool_choice="required"))[:2] == (400, "tools")
    function = {"name": "f", "parameters": {"type": "object", "not": {}}}
    cannot = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    status, param, message = await refusal(gateway, **cannot)
    assert (status, param) == (400, "tools")
    assert "lenient_schemas" in message


async def test_an_operator_may_turn_parsers_off(start_model: StartModel) -> None:
    gateway = await start_model(THINKING_STYLE, tool_parser="none", reasoning_parser="none")
    status, param, message = await refusal(gateway)
    assert (status, param) == (400, "tools")
    assert f"models.{MODEL}.tool_parser" in message
    await gateway.add_worker(script=says("So.</think>Hi"))
    answer = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.choices[0].message.content == "So.</think>Hi"


class Weather(BaseModel):
    """Forecast the weather."""

    city: str
    days: int


async def test_the_clients_own_helpers(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    worker = await gateway.add_worker(script=says(CALL.replace("get_weather", "Weather")))
    tools = [openai.pydantic_function_tool(Weather)]
    async with gateway.client().chat.completions.stream(model=MODEL, messages=HELLO, tools=tools) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_completion()
    arguments = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in arguments] == [Weather(city="Köln", days=2)]
    [call] = final.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Köln", days=2)
    assert worker.attempts[0].job.sampling.grammar is not None  # it is strict

    def sync() -> Any:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as client:
            return client.chat.completions.parse(model=MODEL, messages=HELLO, tools=tools)

    [call] = (await asyncio.to_thread(sync)).choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Köln", days=2)


async def test_langchain(start_model: StartModel) -> None:
    from langchain_openai import ChatOpenAI  # takes seconds, of each process that imports this file

    gateway = await start_model(HERMES_STYLE)
    await gateway.add_worker(script=says(CALL.replace("get_weather", "Weather")))
    model = ChatOpenAI(model=MODEL, base_url=f"{gateway.url}/v1", api_key=gateway.key).bind_tools([Weather])
    message = await model.ainvoke("Will it rain?")
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("Weather", json.loads(ARGUMENTS))]
    whole = None
    async for part in model.astream("Will it rain?"):
        whole = part if whole is None else whole + part
    assert whole is not None
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("Weather", json.loads(ARGUMENTS))]


async def test_tokenize_counts_tools_too(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    worker = await gateway.add_worker(script=says("Hi"))
    answer = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, tools=[TOOL])
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=HANGS_S) as client:
        counted = await client.post("/tokenize", json={"model": MODEL, "messages": HELLO, "tools": [TOOL]})
    assert counted.json()["tokens"] == worker.attempts[0].prompt_ids
    assert answer.usage is not None
    assert counted.json()["count"] == answer.usage.prompt_tokens
