"""Tools, calls and results are passed to a chat template as by transformers."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gateway.api.schema import parse_chat
from gateway.errors import InvalidParameter
from gateway.tokenizing.templates import ChatTemplate
from protocol.dialects.dialect import Dialect
from protocol.dialects.registry import TOOL_FORMATS
from tests import tool_templates
from tests.small_tokenizer import BOS, CHATML, EOS, byte_tokenizer

STYLES = {name: source for name, source in vars(tool_templates).items() if name.isupper()}
ARGUMENTS = {"city": "Köln", "days": 2, "deep": {"a": [1, None]}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"name": "get_weather", "description": "How <the> weather will be.", "parameters": PARAMETERS}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Will it rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "They live in Köln."},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"rain": "no"}'},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "And tomorrow?"},
]


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), bos_token=BOS, eos_token=EOS)


@pytest.mark.parametrize("style", STYLES)
def test_rendered_as_transformers_does(reference: PreTrainedTokenizerFast, style: str) -> None:
    tools: list[Any] = [{"type": "function", "function": WEATHER}]
    body = {
        "model": "m",
        "messages": CONVERSATION,
        "tools": [{"type": "function", "function": {**WEATHER, "strict": True}}],
    }
    request = parse_chat(json.dumps(body).encode())
    template = ChatTemplate(STYLES[style], {"bos_token": BOS, "eos_token": EOS})
    ours = template.render(
        [message.for_template() for message in request.messages],
        tools=[tool.for_template() for tool in request.tools or ()],
    )
    arguments: object = json.dumps(ARGUMENTS, ensure_ascii=False) if style == "DEEPSEEK_V31_STYLE" else ARGUMENTS
    call = {**CALL, "function": {"name": "get_weather", "arguments": arguments}}
    called = {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "They live in Köln."}
    theirs = [*CONVERSATION[:1], called, *CONVERSATION[2:]]
    assert ours == reference.apply_chat_template(
        theirs, tools=tools, chat_template=STYLES[style], tokenize=False, add_generation_prompt=True
    )
    assert "get_weather" in ours
    assert "tools" in template.variables


def test_a_tool_without_parameters_takes_none() -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    request = parse_chat(json.dumps({"model": "m", "messages": CONVERSATION, "tools": tools}).encode())
    assert [tool.for_template() for tool in request.tools or ()] == [
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    ]


def test_a_templates_refusal_is_reported() -> None:
    twice = {**CONVERSATION[1], "tool_calls": [CALL, CALL]}
    request = parse_chat(json.dumps({"model": "m", "messages": [twice]}).encode())
    template = ChatTemplate(tool_templates.LLAMA_STYLE, {"bos_token": BOS})
    with pytest.raises(InvalidParameter, match="only one call at once"):
        template.render([message.for_template() for message in request.messages])


@pytest.mark.parametrize(
    ("style", "parser", "marks", "has_reasoning"),
    [
        ("HERMES_STYLE", "hermes", False, False),
        ("THINKING_STYLE", "hermes", False, True),
        ("LLAMA_STYLE", "llama3_json", True, False),
        ("MISTRAL_STYLE", "mistral_list", True, False),
        ("HARMONY_STYLE", "harmony", True, True),
        ("DEEPSEEK_V3_STYLE", "deepseek_v3", False, False),
        ("DEEPSEEK_V31_STYLE", "deepseek_v31", False, True),
        ("GLM_STYLE", "glm45", False, True),
        ("KIMI_STYLE", "kimi_k2", False, False),
    ],
)
def test_a_templates_format_is_found(style: str, parser: str, marks: bool, has_reasoning: bool) -> None:
    added = {"<tool_call>": (300, False), "<|python_tag|>": (301, True), "[TOOL_CALLS]": (302, True)}
    dialect = Dialect.of(STYLES[style], {**added, "<|channel|>": (303, True)})
    assert dialect is not None
    assert dialect.format is TOOL_FORMATS[parser]
    assert (dialect.has_special_marks, dialect.has_reasoning, dialect.takes_tools) == (marks, has_reasoning, True)


@pytest.mark.parametrize(
    ("template", "knows_tools", "tool_parser", "is_generic"),
    [
        (CHATML, False, None, True),
        (CHATML, True, None, True),  # in an unknown format
        (tool_templates.HERMES_STYLE, True, None, False),
        (tool_templates.HERMES_STYLE, False, None, True),  # DeepSeek's: renders calls, but not tools
        (tool_templates.THINKING_STYLE, False, None, True),
        (tool_templates.HERMES_STYLE, True, "generic", True),
        (CHATML, False, "llama3_json", False),
        (CHATML, False, "none", False),
        (tool_templates.HARMONY_STYLE, False, None, False),
        ("", False, None, False),  # a completion model
    ],
)
def test_the_generic_format_is_for_templates_without_tools(
    template: str, knows_tools: bool, tool_parser: str | None, is_generic: bool
) -> None:
    dialect = Dialect.of(template, {}, knows_tools=knows_tools, tool_parser=tool_parser)
    assert (dialect is not None and dialect.is_generic) == is_generic
    if dialect is not None and is_generic:
        assert dialect.format is TOOL_FORMATS["generic"]
        assert dialect.takes_tools
        assert dialect.has_reasoning == ("think" in template)


def test_only_kimis_calls_end_its_reasoning() -> None:
    thinks = tool_templates.KIMI_STYLE + "{# <think></think> #}"
    dialects = [Dialect.of(template, {}) for template in (thinks, tool_templates.GLM_STYLE)]
    assert [bool(dialect and dialect.thinking and dialect.thinking.ended_by) for dialect in dialects] == [True, False]


def test_settings_take_precedence() -> None:
    hermes, harmony = tool_templates.HERMES_STYLE, tool_templates.HARMONY_STYLE
    assert Dialect.of(CHATML, {}, tool_parser="none") is None
    assert Dialect.of("", {}) is None
    coder = Dialect.of(hermes.replace('{\\"name', "<function=…>"), {})
    assert coder is not None
    assert coder.format is TOOL_FORMATS["qwen3_coder"]
    assert Dialect.of(hermes, {}, tool_parser="none") is None
    chosen = Dialect.of(CHATML, {}, tool_parser="llama3_json", reasoning_parser="qwen3")
    assert chosen is not None
    assert chosen.format is TOOL_FORMATS["llama3_json"]
    assert chosen.thinking is not None
    assert Dialect.of(harmony, {}, reasoning_parser="none") is None
    without_tools = Dialect.of(harmony, {}, tool_parser="none")
    assert without_tools is not None
    assert (without_tools.takes_tools, without_tools.has_reasoning) == (False, True)
