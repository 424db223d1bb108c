"""Tool calls of scripted workers, as the official clients see them."""

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from protocol.job import Markup
from tests.integration.gateway.scripted_worker import Attempt
from tests.small_tokenizer import byte_tokenizer
from tests.tool_templates import (
    DEEPSEEK_V3_STYLE,
    DEEPSEEK_V31_STYLE,
    GLM_STYLE,
    HERMES_STYLE,
    KIMI_STYLE,
    LLAMA_STYLE,
    THINKING_STYLE,
)
from tests.unit.gateway.api.tools.calls import (
    ARGUMENTS,
    CALL,
    DEEPSEEK,
    DEEPSEEK_V3_CALL,
    GLM_CALL,
    HELLO,
    KIMI_CALLS,
    NOW,
    SCHEMA,
    TOOL,
    TWO_CALLS,
    StartModel,
    says,
    streamed,
)
from tests.unit.gateway.local_gateway import MODEL, LocalGateway, card


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
    assert job.sampling.grammar is None  # no grammar
    assert job.sampling.skip_special_tokens
    prompt = byte_tokenizer().decode(worker.attempts[0].prompt_ids, skip_special_tokens=False)
    assert '{"type": "function", "function": {"name": "get_weather", "description": "…"' in prompt

    # The next turn, with the call and its result.
    result = {"role": "tool", "tool_call_id": first.id, "content": "dry"}
    await gateway.client().chat.completions.create(**{**ask, "messages": [*HELLO, called.message, result]})
    prompt = byte_tokenizer().decode(worker.attempts[-1].prompt_ids, skip_special_tokens=False)
    assert f"{CALL}\n<tool_call>" in prompt
    assert "<tool_response>\ndry\n</tool_response>" in prompt


async def test_single_call_without_content(start_model: StartModel) -> None:
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
    """As used by OpenAI's older clients."""
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
    assert worker.attempts[-1].job.sampling.grammar is not None  # a call is required


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
    [told] = answer.choices[0].schema_errors
    assert "not" in told
    stream = await gateway.client().chat.completions.create(**ask, tool_choice="required", stream=True)
    ends = [chunk.choices[0] async for chunk in stream if chunk.choices and chunk.choices[0].finish_reason]
    assert [end.schema_errors for end in ends] == [[told]]


async def test_truncated_and_invalid_calls(start_model: StartModel) -> None:
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
    """The first worker fails there; the second continues, and the deltas equal those of an undisturbed answer."""
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


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
async def test_forced_by_a_grammar(start_model: StartModel, choice: Any) -> None:
    gateway = await start_model(HERMES_STYLE)
    worker = await gateway.add_worker(script=says('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'))
    [answer] = await streamed(gateway, tool_choice=choice, stop=["\n"])
    assert (answer["calls"], answer["end"]) == ([["now", "{}"]], "tool_calls")
    assert worker.attempts[0].job.sampling.stop == ()  # they could match inside the call's markup
    grammar = worker.attempts[0].job.sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.field) == ("lark", "tools")
    assert ("get_weather" in grammar.source) == (choice == "required")


@pytest.mark.parametrize(
    ("template", "markup"),
    [
        (HERMES_STYLE, Markup("hermes", "none", ("get_weather", "now"))),
        (THINKING_STYLE, Markup("hermes", "think", ("get_weather", "now"), begins_in_reasoning=True)),
        (LLAMA_STYLE, Markup("llama3_json", "none", ("get_weather", "now"))),
        (GLM_STYLE, Markup("glm45", "think", ("get_weather", "now"))),
        (KIMI_STYLE, Markup("kimi_k2", "none", ("get_weather", "now"))),
        (DEEPSEEK_V3_STYLE, Markup("deepseek_v3", "none", ("get_weather", "now"))),
    ],
    ids=["hermes", "thinking", "llama", "glm", "kimi", "deepseek"],
)
async def test_stop_strings_apply_only_to_content(start_model: StartModel, template: str, markup: Markup) -> None:
    gateway = await start_model(template)
    worker = await gateway.add_worker(script=says("Hi"))
    await streamed(gateway, stop=["\n"])
    await streamed(gateway)
    stopped, free = (attempt.job.sampling for attempt in worker.attempts)
    assert (stopped.stop, stopped.markup) == (("\n",), markup)
    assert (free.stop, free.markup) == ((), None)


async def test_a_schema_error_names_the_tool_and_the_path(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    schema = {"type": "object", "properties": {"d": {"type": "string", "pattern": "(?=x)"}}}
    bad = {"type": "function", "function": {"name": "f", "parameters": schema}}
    status, param, message = await refusal(gateway, tools=[TOOL, bad], tool_choice="required")
    assert (status, param) == (400, "tools.1.function.parameters.properties.d.pattern")
    assert "tools.1.function.parameters.properties.d.pattern" in message


async def test_tool_choice_none_omits_the_tools(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    worker = await gateway.add_worker(script=says("Hi"))
    answer = await gateway.client().chat.completions.create(
        model=MODEL, messages=HELLO, tools=[TOOL], tool_choice="none"
    )
    assert answer.choices[0].message.content == "Hi"
    assert "get_weather" not in byte_tokenizer().decode(worker.attempts[0].prompt_ids)


async def test_without_tools_text_is_unchanged(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    await gateway.add_worker(script=says(f" \n{CALL} ", width=5))
    ask: dict[str, Any] = {"model": MODEL, "messages": HELLO}
    whole = await gateway.client().chat.completions.create(**ask)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (f" \n{CALL} ", "stop")
    parts = [chunk async for chunk in await gateway.client().chat.completions.create(**ask, stream=True)]
    texts = [part.choices[0].delta.content for part in parts if part.choices[0].delta.content]
    assert "".join(texts) == f" \n{CALL} "
    assert {len(text) for text in texts[:-1]} == {5}


async def test_a_separate_template_for_tools(start_model: StartModel) -> None:
    gateway = await start_model(card().chat_template or "", tool_template=HERMES_STYLE)
    worker = await gateway.add_worker(script=says(CALL))
    [choice] = await streamed(gateway)
    assert choice["calls"] == [["get_weather", ARGUMENTS]]
    await gateway.client().chat.completions.create(model=MODEL, messages=HELLO)
    with_tools, without = (byte_tokenizer().decode(attempt.prompt_ids) for attempt in worker.attempts)
    assert "get_weather" in with_tools
    assert "Tools" not in without


async def refusal(gateway: LocalGateway, **fields: Any) -> tuple[int, str | None, str]:
    answer = await gateway.post("/v1/chat/completions", **{"messages": HELLO, "tools": [TOOL], **fields})
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


async def test_refusals_name_the_field(start_model: StartModel) -> None:
    gateway = await start_model(LLAMA_STYLE)
    status, param, message = await refusal(gateway, response_format={"type": "json_object"})
    assert (status, param) == (400, "response_format")
    assert "calls as JSON" in message

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
    assert (status, param) == (400, "tools.0.function.parameters.not")
    assert "lenient_schemas" in message


async def test_parsers_can_be_disabled(start_model: StartModel) -> None:
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
    assert final.choices[0].message.tool_calls is not None
    [call] = final.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Köln", days=2)
    assert worker.attempts[0].job.sampling.grammar is not None  # the tool is strict

    parsed = await gateway.client().chat.completions.parse(model=MODEL, messages=HELLO, tools=tools)
    assert parsed.choices[0].message.tool_calls is not None
    [call] = parsed.choices[0].message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Köln", days=2)


async def test_tokenize_counts_tools_too(start_model: StartModel) -> None:
    gateway = await start_model(HERMES_STYLE)
    worker = await gateway.add_worker(script=says("Hi"))
    answer = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, tools=[TOOL])
    counted = await gateway.post("/tokenize", messages=HELLO, tools=[TOOL])
    assert counted.json()["tokens"] == worker.attempts[0].prompt_ids
    assert answer.usage is not None
    assert counted.json()["count"] == answer.usage.prompt_tokens
