"""Calls and reasoning of each family are separated from content, however the text is split."""

import json
import random
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.dialects.base import Tool
from protocol.dialects.dialect import AnswerForm, Dialect
from protocol.dialects.source import MAX_HELD_CHARS, MAX_LAYOUT_CHARS, Kind
from tests.unit.protocol.dialects.format_cases import (
    BEGIN,
    CALL,
    CALLED,
    CASES,
    END,
    KIMI_BEGIN,
    KIMI_CALL,
    KIMI_CALLED,
    KIMI_END,
    KIMI_SEP,
    SEP,
)

TYPES = {"a": "integer", "city": "string", "b": "boolean", "o": "object", "s": ["string", "null"], "l": "array"}
OTHERS: dict[str, object] = {
    "n": {"type": "number"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},  # as pydantic writes Optional[str]
    "unit": {"$ref": "#/$defs/Unit"},
    "mixed": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "any": {},
    "parts": {"allOf": [{"$ref": "#/$defs/Unit"}], "default": "1"},
    "endless": {"$ref": "#/$defs/Endless"},
}
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in TYPES.items()} | OTHERS,
    "$defs": {"Unit": {"enum": ["1", "2"]}, "Endless": {"anyOf": [{"$ref": "#/$defs/Endless"}] * 99}},
}
TOOLS = tuple(Tool(name, SCHEMA, is_strict=False) for name in ("f", "get_weather"))
SHORT = {Kind.CONTENT: "content", Kind.REASONING: "reasoning", Kind.CALL: "call", Kind.ARGUMENTS: "arguments"}
Events = list[tuple[str, str]]


def form_of(
    tool_parser: str, reasoning_parser: str = "none", *, tools: tuple[Tool, ...] = TOOLS, **rest: bool
) -> AnswerForm:
    dialect = Dialect.of("", {}, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    assert dialect is not None
    return AnswerForm(dialect, tools, **rest)


def read_events(form: AnswerForm, parts: Iterable[str]) -> Events:
    """Return all pieces, with adjacent ones of the same kind joined."""
    parser = form.parser()
    pieces = [piece for part in parts for piece in parser.push(part, is_last=False)]
    together: Events = []
    for kind, text, _ in [*pieces, *parser.push("", is_last=True)]:
        name = SHORT[kind]
        if together and together[-1][0] == name != "call":
            together[-1] = (name, together[-1][1] + text)
        else:
            together.append((name, text))
    return together


def check_every_cut(form: AnswerForm, text: str, expected: Events) -> None:
    assert read_events(form, [text]) == expected
    assert read_events(form, text) == expected
    for place in range(len(text)):
        assert read_events(form, [text[:place], text[place:]]) == expected
    source = random.Random(3)
    for _ in range(20):
        places = sorted(source.sample(range(len(text) + 1), min(5, len(text))))
        assert (
            read_events(form, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]) == expected
        )


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_calls(parser: str, text: str, expected: Events) -> None:
    check_every_cut(form_of(parser, "harmony" if parser == "harmony" else "none"), text, expected)


@pytest.mark.parametrize(
    ("text", "expected", "begins_in_reasoning"),
    [
        ("<think>\nSo.\n\nYes.\n</think>\n\nHi\n", [("reasoning", "So.\n\nYes."), ("content", "Hi\n")], False),
        ("\nSo.\n</think>\n\nHi", [("reasoning", "So."), ("content", "Hi")], True),
        ("<think>\nSo.</think>Hi", [("reasoning", "So."), ("content", "Hi")], True),
        ("<think>So </th", [("reasoning", "So </th")], False),
        ("So far", [("reasoning", "So far")], True),
        ("<think></think>", [], False),
        ("Hi <think>x</think>", [("content", "Hi <think>x</think>")], False),
        ("  <thin", [("content", "  <thin")], False),
        (
            '<think>I <tool_call></think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
            [("reasoning", "I <tool_call>"), ("call", "f"), ("arguments", "{}")],
            False,
        ),
    ],
)
def test_reasoning(text: str, expected: Events, begins_in_reasoning: bool) -> None:
    form = form_of("hermes", "deepseek_r1", begins_in_reasoning=begins_in_reasoning)
    check_every_cut(form, text, expected)


@settings(max_examples=100)
@given(parser=st.sampled_from(["hermes", "harmony"]), is_open=st.booleans(), source=st.randoms(use_true_random=False))
def test_stretches_of_reasoning_are_known(parser: str, is_open: bool, source: random.Random) -> None:
    form = form_of(parser, "harmony" if parser == "harmony" else "think", begins_in_reasoning=is_open)
    text = "".join(source.choice(FRAGMENTS) for _ in range(source.randrange(25)))
    reader, reasoning = form.parser(), ""
    for place in range(0, len(text) + 1, 3):
        pieces = reader.push(text[place : place + 3], is_last=place + 3 > len(text))
        reasoning += "".join(piece.text for piece in pieces if piece.kind is Kind.REASONING)
    assert "".join(text[begin:end] for begin, end in reader.reasoning) == reasoning


def test_calls_within_unclosed_reasoning() -> None:
    call = f"{KIMI_CALL}functions.f:0{KIMI_SEP}{{}}{KIMI_CALLED}"
    expected = [("reasoning", "I look."), ("call", "f"), ("arguments", "{}")]
    form = form_of("kimi_k2", "kimi_k2", begins_in_reasoning=True)
    check_every_cut(form, f"I look.\n{KIMI_BEGIN}{call}{KIMI_END}", expected)
    check_every_cut(form, f"I look. {call}", expected)
    check_every_cut(form, f"I look.</think>{KIMI_BEGIN}{call}{KIMI_END}", expected)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (["functions.f:0", "functions.get_weather:1"], ["functions.f:0", "functions.get_weather:1"]),
        (
            ["functions.f:7", "functions.f:8"],
            ["functions.f:7", "functions.f:8"],
        ),  # the model numbers calls over the conversation
        (["functions.f:0", "functions.f:0"], ["functions.f:0", "functions.f:1"]),  # ids are unique
        (["f:3", "f"], ["functions.f:3", "functions.f:4"]),
    ],
)
def test_calls_keep_the_models_ids(heads: list[str], expected: list[str]) -> None:
    calls = "".join(f"{KIMI_CALL}{head}{KIMI_SEP}{{}}{KIMI_CALLED}" for head in heads)
    for width in (1, 5, 1000):
        text = f"{KIMI_BEGIN}{calls}{KIMI_END}"
        parser = form_of("kimi_k2").parser()
        pieces = [p for at in range(0, len(text), width) for p in parser.push(text[at : at + width], is_last=False)]
        assert [piece.call_id for piece in pieces if piece.kind is Kind.CALL] == expected


def test_a_nullable_string_is_streamed() -> None:
    parser = form_of("glm45").parser()
    parser.push("<tool_call>f\n<arg_key>maybe</arg_key>\n<arg_value>", is_last=False)
    for part in ("x" * 30, "y" * MAX_HELD_CHARS):
        pieces = parser.push(part, is_last=False)
        assert "".join(piece.text for piece in pieces).strip('"').startswith(part[:-20])


def test_reasoning_between_other_marks_and_without_tools() -> None:
    form = form_of("mistral", "mistral", tools=())
    text = '[THINK]So.[/THINK]Hi [TOOL_CALLS][{"name": "f", "arguments": {}}]'
    check_every_cut(form, text, [("reasoning", "So."), ("content", 'Hi [TOOL_CALLS][{"name": "f", "arguments": {}}]')])


def test_only_one_call_if_no_more_are_allowed() -> None:
    text = '<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"f","arguments":{"a":1}}</tool_call>.'
    expected = [("call", "f"), ("arguments", "{}"), ("content", ".")]
    check_every_cut(form_of("hermes", is_single_call=True), text, expected)


def test_arguments_are_streamed_and_marks_are_not() -> None:
    parser = form_of("hermes").parser()
    parts = ["Hi", " <tool", "_call>\n{", '"name": "f", "arg', 'uments": {"a', '": 1', "}}\n</tool", "_call>"]
    seen = [parser.push(part, is_last=False) for part in parts]
    assert [[(SHORT[kind], text) for kind, text, _ in pieces] for pieces in seen] == [
        [("content", "Hi")],
        [],
        [],
        [],
        [("call", "f"), ("arguments", '{"a')],
        [("arguments", '": 1')],
        [("arguments", "}")],
        [],
    ]


def test_held_text_has_a_limit() -> None:
    spaces = " " * (MAX_LAYOUT_CHARS + 10)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    expected = [("content", " " * 10), ("call", "f"), ("arguments", "{}")]
    assert read_events(form_of("hermes"), [spaces + call]) == read_events(form_of("hermes"), spaces + call) == expected
    endless = '<tool_call>{"arguments": [' + "1," * MAX_HELD_CHARS
    assert read_events(form_of("hermes"), [endless, "2]}"]) == [("content", endless + "2]}")]
    members = "<tool_call>{" + '"a": 1, ' * MAX_HELD_CHARS
    parser = form_of("hermes").parser()
    assert "".join(piece.text for piece in parser.push(members, is_last=False))[:100] == members[:100]


def test_endless_brackets_are_text() -> None:
    nested = "[" * 100_000  # deeper than the JSON parser's limit
    text = f"<tool_call><function=f><parameter=a>{nested[: MAX_HELD_CHARS // 2]}</parameter></function></tool_call>"
    arguments = json.loads(read_events(form_of("qwen3_coder"), [text])[1][1])
    assert arguments == {"a": nested[: MAX_HELD_CHARS // 2]}


def seconds_of(form: AnswerForm, parts: list[str]) -> float:
    """Return this thread's CPU time for reading a text."""
    parser, started_s = form.parser(), time.thread_time()
    for part in parts:
        parser.push(part, is_last=False)
    parser.push("", is_last=True)
    return time.thread_time() - started_s


@pytest.mark.parametrize(
    ("form", "whole", "repeated", "many"),
    [
        (form_of("hermes"), True, "<tool_call>", 16_000),
        (form_of("qwen3_coder"), False, "1234", 1000),
        (form_of("deepseek_v3"), True, CALL, 4_000),
        (form_of("kimi_k2"), True, KIMI_CALL + "functions.f:0", 4_000),
        (form_of("glm45"), True, "<tool_call>f\n", 4_000),
    ],
)
def test_reading_time_is_not_quadratic(form: AnswerForm, whole: bool, repeated: str, many: int) -> None:
    """Regression: an answer with quadratic cost blocked all others for seconds."""
    parts = [
        [repeated * n] if whole else ["<tool_call><function=f><parameter=a>", *[repeated] * n]
        for n in (many // 4, 4 * many)
    ]
    short_s, long_s = (min(seconds_of(form, one) for _ in range(2)) for one in parts)
    assert long_s < 64 * short_s  # between linear (16) and quadratic (256), with a margin for shared caches and cores


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[", "]", ",", ";", "<|python_tag|>", "<|channel|>final",
    "<|channel|>analysis", "<|message|>", "<|end|>", "<|start|>assistant", " to=functions.f", "<think>", "</think>",
    "\n", " ", "{", "}", '"name": "f"', '"arguments": ', '{"a": 1}', '{"name": "f", "arguments": {"b": "}"}}', '"',
    "\\", "f", "word", ":", "<function=f>", "</function>", "<parameter=a>", "<parameter=city>", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "maybe", "null", BEGIN, END, CALL, SEP, CALLED, "```json",
    "```", "function", KIMI_BEGIN, KIMI_END, KIMI_CALL, KIMI_SEP, KIMI_CALLED, "functions.f:0",
]  # fmt: skip


@settings(max_examples=300)
@given(
    parser=st.sampled_from(
        ["hermes", "llama3_json", "mistral", "qwen3_coder", "glm45", "deepseek_v3", "kimi_k2", "harmony"]
    ),
    begins_in_reasoning=st.booleans(),
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=25),
    source=st.randoms(use_true_random=False),
)
def test_pieces_do_not_depend_on_how_the_text_is_split(
    parser: str, begins_in_reasoning: bool, parts: list[str], source: random.Random
) -> None:
    reasoning_parser = "harmony" if parser == "harmony" else source.choice(["none", "think", "kimi_k2"])
    form = form_of(parser, reasoning_parser, begins_in_reasoning=begins_in_reasoning)
    text = "".join(parts)
    whole = read_events(form, [text])
    assert read_events(form, text) == read_events(form, parts) == whole
    places = sorted(source.sample(range(len(text) + 1), min(4, len(text))))
    assert read_events(form, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]) == whole
    if [kind for kind, _ in whole] == ["content"] and parser != "harmony" and reasoning_parser == "none":
        assert whole[0][1] == text
