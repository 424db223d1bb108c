import json
from typing import Any

import pytest

from gateway.api.errors import form_of
from gateway.api.fields import CalledFunction
from gateway.api.sampling import requested_max_tokens, sampling_of
from gateway.api.schema import parse_chat, parse_completion
from gateway.errors import InvalidParameter
from gateway.limits.sizes import check_grammar
from protocol.generation import Grammar
from protocol.job import Sampling
from tests.unit.gateway.api.bodies import CALL, USER, chat, completion, tool


def test_everything_supported_reaches_the_wire() -> None:
    request = parse_chat(
        chat(
            n=3,
            stop=["a", "b"],
            seed=-5,
            temperature=0,
            top_p=0.5,
            top_k=7,
            min_p=0.1,
            presence_penalty=-1,
            frequency_penalty=1.5,
            repetition_penalty=1.1,
            logit_bias={"9": 3, "10": -100},
            logprobs=True,
            top_logprobs=4,
            max_completion_tokens=11,
            max_tokens=99,
            min_tokens=2,
            ignore_eos=True,
            stop_token_ids=[1, 2],
            skip_special_tokens=False,
            user="u",
            metadata={"a": "b"},
        )
    )
    limit = requested_max_tokens(request)
    assert limit == ("max_completion_tokens", 11)
    assert sampling_of(request, 11) == Sampling(
        max_tokens=11,
        n=3,
        stop=("a", "b"),
        seed=-5,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.1,
        logit_bias={9: 3, 10: -100},
        logprobs=4,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(1, 2),
        skip_special_tokens=False,
    )


def test_what_vllm_added_reaches_the_wire() -> None:
    request = parse_chat(
        chat(allowed_token_ids=[5, 6], bad_words=["no"], include_stop_str_in_output=True, prompt_logprobs=0, top_p=0)
    )
    assert sampling_of(request, 5) == Sampling(
        max_tokens=5,
        allowed_token_ids=(5, 6),
        bad_words=("no",),
        include_stop_str_in_output=True,
        prompt_logprobs=0,
        top_p=0,
    )


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"logprobs": 3}, None),
        ({"logprobs": 3, "echo": True}, 3),
        ({"echo": True}, None),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 1}, 3),
        ({"logprobs": 0, "echo": True, "prompt_logprobs": 2, "max_tokens": 0}, 2),
    ],
)
def test_an_echo_with_logprobs_requests_prompt_logprobs(fields: dict[str, Any], wanted: int | None) -> None:
    assert sampling_of(parse_completion(completion(**fields)), 0).prompt_logprobs == wanted


def test_calls_and_their_results_reach_the_template() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "18 °C"}]}
    odd = {**CALL, "function": {"name": "f", "arguments": "no JSON"}}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL, odd], "reasoning": "So."}
    turns = [message.for_template() for message in parse_chat(chat(messages=[USER, called, result])).messages]
    assert turns[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {**CALL, "function": {"name": "f", "arguments": {"city": "Paris"}}},
                {**CALL, "function": {"name": "f", "arguments": {"arguments": "no JSON"}}},
            ],
            "reasoning_content": "So.",
            "reasoning": "So.",
            "thinking": "So.",
        },
        {"role": "tool", "content": "18 °C", "tool_call_id": "call_1"},
    ]


def test_deeply_nested_arguments_stay_text() -> None:
    nested = "[" * 100_000
    assert CalledFunction(name="f", arguments=nested).arguments_for_template() == {"arguments": nested}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        (" \n", {}),
        (' {"a": 1} ', {"a": 1}),
        *(
            (text, None)
            for text in ('{"a": ', "[]", '"x"', "null", "5", '{"a": NaN}', '{"a": 1} more', '{"a": "\\ud800"}')
        ),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
    ],
)
def test_invalid_arguments_are_wrapped_in_an_object(text: str, found: Any) -> None:
    """The model wrote invalid or truncated arguments; templates refused the conversation."""
    function = CalledFunction(name="f", arguments=text)
    assert function.arguments_for_template() == ({"arguments": text} if found is None else found)
    assert json.loads(function.arguments_object or "{}") == function.arguments_for_template()
    [turn] = [message.for_job() for message in parse_chat(chat(messages=[{"role": "assistant", "tool_calls": [
        {"id": "1", "function": {"name": "f", "arguments": text}}]}])).messages]  # fmt: skip
    assert turn.calls[0].arguments == function.arguments_object


def test_null_equals_an_omitted_field() -> None:
    names = ("n", "stop", "seed", "temperature", "top_k", "logit_bias", "logprobs", "max_tokens", "stream", "tools")
    request = parse_chat(chat(**dict.fromkeys(names)))
    assert requested_max_tokens(request) is None
    assert sampling_of(request, 5) == Sampling(max_tokens=5)


def test_logprobs_without_top_logprobs_and_top_k_off() -> None:
    assert sampling_of(parse_chat(chat(logprobs=True, top_k=-1)), 5) == Sampling(max_tokens=5, logprobs=0)
    assert sampling_of(parse_chat(chat(logprobs=False)), 5).logprobs is None
    assert sampling_of(parse_completion(completion(logprobs=5)), 5).logprobs == 5


def test_unknown_fields_are_ignored() -> None:
    assert parse_chat(chat(whatever=1, messages=[{**USER, "weight": 1}])).model == "m"


def test_text_parts_are_joined_and_developer_means_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": parts, "name": "n"}, {"role": "assistant", "content": None}]
    turns = [message.for_template() for message in parse_chat(chat(messages=messages)).messages]
    assert turns == [{"role": "system", "content": "a\nb", "name": "n"}, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages.1.role"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id"),
        ({"messages": [USER, {"role": "tool", "tool_call_id": "c"}]}, "messages.1.content"),
        ({"messages": [{**USER, "tool_call_id": "c"}]}, "messages.0.tool_call_id"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "function_call": {"name": "f"}}]}, "messages.0.function_call"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.name"),
        ({"messages": [{"role": 1}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id"),
        ({"model": 5}, "model"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["ü" * 2048, "ü" * 2049]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"seed": 2**70}, "seed"),
        ({"best_of": 2}, "best_of"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools.2.function.name"),
        ({"tools": [tool("f", parameters={"type": "array"})]}, "tools.0.function.parameters"),
        ({"tools": [tool("f", strict="yes")]}, "tools.0.function.strict"),
        ({"tools": [tool(f"f{number}") for number in range(129)]}, "tools"),
        ({"tools": [tool("f", description="x" * 600_000)]}, "tools"),
        ({"tools": [tool("f")], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}], "tools": [tool("f")]}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "tool_choice"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
        ({"verbosity": "chatty"}, "verbosity"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words.0"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"echo": True}, "echo"),
        ({"service_tier": "fastest"}, "service_tier"),
        ({"do_not_queue": "yes"}, "do_not_queue"),
    ],
)
def test_chat_errors_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse_chat(chat(**fields))
    assert caught.value.param == param
    assert form_of(caught.value).status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"best_of": 1},
        {"n": 2, "best_of": 2},
        {"service_tier": "auto"},
        {"service_tier": "flex"},
        {"do_not_queue": True},
        {"store": False},
        {"store": True},
        {"verbosity": "low"},
        {"tool_choice": "auto"},
        {"parallel_tool_calls": False},
        {"functions": [], "function_call": "auto"},
        {"top_logprobs": 0},
        {"reasoning_effort": "low"},
        {"max_tokens": -1},
        {"max_completion_tokens": -1},
    ],
)
def test_default_values_of_unsupported_fields_are_accepted(fields: dict[str, Any]) -> None:
    assert parse_chat(chat(**fields)).model == "m"


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object", "")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"a": 1}, "strict": True},
                }
            },
            Grammar("json_schema", '{"a": 1}'),
        ),
        ({"structured_outputs": {"json": {"a": 1}}}, Grammar("json_schema", '{"a": 1}', "structured_outputs")),
        ({"structured_outputs": {"json": '{"a": 1}'}}, Grammar("json_schema", '{"a": 1}', "structured_outputs")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+", "structured_outputs")),
        ({"structured_outputs": {"choice": ["a.b", "c"]}}, Grammar("regex", r"a\.b|c", "structured_outputs")),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Grammar("lark", "start: /a/", "structured_outputs")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "", "structured_outputs")),
        ({"guided_json": {"a": 1}}, Grammar("json_schema", '{"a": 1}', "guided_json")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a.b", "c"]}, Grammar("regex", r"a\.b|c", "guided_choice")),
        ({"guided_grammar": "start: /a/"}, Grammar("lark", "start: /a/", "guided_grammar")),
    ],
)
def test_output_formats(fields: dict[str, Any], grammar: Grammar | None) -> None:
    request = parse_chat(chat(**fields))
    assert request.grammar == grammar
    assert sampling_of(request, 10).grammar == grammar


def test_legacy_functions_are_tools() -> None:
    """Legacy clients: their results have a name instead of an id."""
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"city": "Paris"}'}},
        {"role": "function", "name": "f", "content": "dry"},
    ]
    legacy = parse_chat(chat(messages=messages, functions=[{"name": "f"}], function_call={"name": "f"}))
    now = parse_chat(
        chat(
            messages=[
                USER,
                {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "function1"}]},
                {"role": "tool", "name": "f", "tool_call_id": "function1", "content": "dry"},
            ],
            tools=[tool("f")],
            tool_choice={"type": "function", "function": {"name": "f"}},
            parallel_tool_calls=False,
        )
    )
    assert (legacy.tools, legacy.tool_choice, legacy.parallel_tool_calls) == (now.tools, now.tool_choice, False)
    assert [message.for_template() for message in legacy.messages] == [m.for_template() for m in now.messages]
    assert (legacy.is_legacy, now.is_legacy) == (True, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"user": "u" * 1025}, "user"),
        ({"chat_template_kwargs": {"x": "y" * 65_536}}, "chat_template_kwargs"),
        ({"logit_bias": {str(number): 1 for number in range(16_385)}}, "logit_bias"),
    ],
)
def test_fields_that_are_too_large(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter, match="may have at most") as caught:
        parse_chat(chat(**fields))
    assert (caught.value.param, caught.value.code) == (param, "too_large")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a" * 200_001},
        {"guided_choice": ["a" * 1000] * 201},
        {"structured_outputs": {"grammar": "a" * 200_001}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"x": "y" * 200_000}}}},
    ],
)
def test_a_grammar_that_is_too_large(fields: dict[str, Any]) -> None:
    grammar = parse_chat(chat(**fields)).grammar
    assert grammar is not None
    with pytest.raises(InvalidParameter, match="may have at most 200000 characters") as caught:
        check_grammar(grammar)
    assert caught.value.param == next(iter(fields))
