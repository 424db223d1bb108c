"""Calls and reasoning of each family are separated from content, however the text is cut."""

import json
import random
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokens.tools.base import Tool
from tokens.tools.dialect import AnswerForm, Dialect
from tokens.tools.source import MAX_HELD_CHARS, MAX_LAYOUT_CHARS, Kind

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
Told = list[tuple[str, str]]


def form_of(
    tool_parser: str, reasoning_parser: str = "none", *, tools: tuple[Tool, ...] = TOOLS, **rest: bool
) -> AnswerForm:
    dialect = Dialect.of("", {}, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    assert dialect is not None
    return AnswerForm(dialect, tools, **rest)


def told(form: AnswerForm, parts: Iterable[str]) -> Told:
    """All pieces, neighbours of one kind put together."""
    parser = form.parser()
    pieces = [piece for part in parts for piece in parser.push(part, is_last=False)]
    together: Told = []
    for kind, text, _ in [*pieces, *parser.push("", is_last=True)]:
        name = SHORT[kind]
        if together and together[-1][0] == name != "call":
            together[-1] = (name, together[-1][1] + text)
        else:
            together.append((name, text))
    return together


def check_every_cut(form: AnswerForm, text: str, expected: Told) -> None:
    assert told(form, [text]) == expected
    assert told(form, text) == expected
    for place in range(len(text)):
        assert told(form, [text[:place], text[place:]]) == expected
    source = random.Random(3)
    for _ in range(20):
        places = sorted(source.sample(range(len(text) + 1), min(5, len(text))))
        assert told(form, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]) == expected


HERMES = [
    ("Just text, a < b.\n", [("content", "Just text, a < b.\n")]),
    ("", []),
    (" \n", [("content", " \n")]),
    (
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"</tool_call>", "b": [1, {}]}}\n</tool_call>',
        [("content", "Let me see."), ("call", "f"), ("arguments", '{"a": "x}\\"</tool_call>", "b": [1, {}]}')],
    ),
    (
        '\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"f","arguments":"ü"}</tool_call>\n',
        [("call", "f"), ("arguments", "{}"), ("call", "f"), ("arguments", "ü")],
    ),
    (  # text between and after calls is content
        '<tool_call>{"name":"f","arguments":{}}</tool_call> and <tool_call>{"name":"f"}</tool_call> so',
        [("call", "f"), ("arguments", "{}"), ("content", "and"), ("call", "f"), ("arguments", "{}"), ("content", "so")],
    ),
    (  # the name last, or keys of nobody's
        '<tool_call>{"arguments": {"q": [1]}, "id": 7, "name": "f"}</tool_call>',
        [("call", "f"), ("arguments", '{"q": [1]}')],
    ),
    (  # arguments as text
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [("call", "f"), ("arguments", '{"a": 1}')],
    ),
    (  # the end mark forgotten, or a brace
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n<tool_call>{"name": "f", "arguments": {}}',
        [("call", "f"), ("arguments", '{"a": 1}'), ("call", "f"), ("arguments", "{}")],
    ),
    (  # a brace too many
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
        [("call", "f"), ("arguments", "{}"), ("content", "}")],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": tru', [("call", "f"), ("arguments", '{"a": tru')]),  # cut off
    ('Hm <tool_call>\n{"name": "get_wea', [("content", 'Hm <tool_call>\n{"name": "get_wea')]),
    ("so <tool_c", [("content", "so <tool_c")]),
    ("<tool_call>no call</tool_call> x", [("content", "<tool_call>no call</tool_call> x")]),
    ('<tool_call>{"nam": "f"}</tool_call>', [("content", '<tool_call>{"nam": "f"}</tool_call>')]),
    ('<tool_call>{"name": 5, "arguments": {}}', [("content", '<tool_call>{"name": 5, "arguments": {}}')]),
    ("<tool_call>{}", [("content", "<tool_call>{}")]),
    ('<tool_call>["name"]', [("content", '<tool_call>["name"]')]),
    (
        'a\n<tool_call>oops <tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [("content", "a\n<tool_call>oops"), ("call", "f"), ("arguments", "{}")],
    ),
]
LLAMA = [
    ("Hello {", [("content", "Hello {")]),
    (' {"name": "f", "parameters": {"a": 1}} ', [("call", "f"), ("arguments", '{"a": 1}')]),
    (
        '{"name": "f", "parameters": {}}; {"name": "f", "arguments": {}};{"name": "get_weather", "parameters": {}}',
        [("call", "f"), ("arguments", "{}")] * 2 + [("call", "get_weather"), ("arguments", "{}")],
    ),
    ('<|python_tag|>{"name": "f", "parameters": {}}', [("call", "f"), ("arguments", "{}")]),
    (
        'Sure. <|python_tag|>{"name": "f", "parameters": {}}',
        [("content", "Sure."), ("call", "f"), ("arguments", "{}")],
    ),
    ('\n{"name": "Bob", "parameters": {}}', [("content", '\n{"name": "Bob", "parameters": {}}')]),  # no tool: an answer
    ('{"a": 1}', [("content", '{"a": 1}')]),
    ("<|python_tag|>print(1)", [("content", "<|python_tag|>print(1)")]),
    ('{"name": "f", "parameters": {}}; or', [("call", "f"), ("arguments", "{}"), ("content", "or")]),
]
MISTRAL = [
    ("Hello [TOOL", [("content", "Hello [TOOL")]),
    (
        'Sure.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{}',
        [("content", "Sure."), ("call", "f"), ("arguments", '{"a": 1}'), ("call", "get_weather"), ("arguments", "{}")],
    ),
    ('[TOOL_CALLS]f{"a": 1}', [("call", "f"), ("arguments", '{"a": 1}')]),
    (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "get_weather", "arguments": {}}]\n',
        [("call", "f"), ("arguments", '{"a": "]"}'), ("call", "get_weather"), ("arguments", "{}")],
    ),
    ("[TOOL_CALLS] well, no", [("content", "[TOOL_CALLS] well, no")]),
    ("[TOOL_CALLS][1]", [("content", "[TOOL_CALLS][1]")]),
    ("[TOOL_CALLS]" + "x" * 300, [("content", "[TOOL_CALLS]" + "x" * 300)]),
]
CALL_HEAD = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
HARMONY = [
    (
        "<|channel|>analysis<|message|>They want …<|end|><|start|>assistant<|channel|>final<|message|>Hi!\n",
        [("reasoning", "They want …"), ("content", "Hi!\n")],
    ),
    (
        f'<|channel|>analysis<|message|>So.<|end|><|start|>assistant{CALL_HEAD}{{"a": 1}}<|call|>',
        [("reasoning", "So."), ("call", "f"), ("arguments", '{"a": 1}')],
    ),
    (
        "<|channel|>commentary<|message|>I look.<|end|><|start|> to=functions.f<|channel|>commentary<|message|>{}",
        [("content", "I look."), ("call", "f"), ("arguments", "{}")],
    ),
    ("<|channel|>analysis<|message|>Hm, ", [("reasoning", "Hm, ")]),  # cut off
    ("<|channel|>anal", [("content", "<|channel|>anal")]),
    ("Hello", [("content", "Hello")]),
    ("<|channel|>commentary to=python<|message|>1+1", [("reasoning", "1+1")]),  # its own tool, which is not here
]
XML_CALL = '<tool_call>\n<function=f>\n<parameter=city>\n  a "b"\n\n</parameter>\n<parameter=a>\n5\n</parameter>\n'
XML_HEAD = "<tool_call><function=f><parameter=b>True</parameter><parameter=z>1</parameter>"
QWEN_CODER = [
    ("Hi <tool", [("content", "Hi <tool")]),
    (
        f"So.\n\n{XML_CALL}</function>\n</tool_call>\n<tool_call><function=get_weather></function></tool_call>\n",
        [
            ("content", "So."),
            ("call", "f"),
            ("arguments", '{"city": "  a \\"b\\"\\n", "a": 5}'),
            ("call", "get_weather"),
            ("arguments", "{}"),
        ],
    ),
    (
        f"{XML_HEAD}<parameter=o>{{'x'}}</parameter><parameter=s>7</parameter><parameter=s>null</parameter></function>.",
        [
            ("call", "f"),
            ("arguments", '{"b": true, "z": "1", "o": "{\'x\'}", "s": "7", "s": null}'),
            ("content", "."),
        ],
    ),
    (XML_CALL[:-30], [("call", "f"), ("arguments", '{"city": "  a \\"b\\"\\n"')]),  # cut off
    (f"{XML_CALL}</tool_call>", [("call", "f"), ("arguments", '{"city": "  a \\"b\\"\\n", "a": 5}')]),
    (XML_CALL.partition('"b')[0], [("call", "f"), ("arguments", '{"city": "  a ')]),
    ("<tool_call>\n{}", [("content", "<tool_call>\n{}")]),
    ("<tool_call>\n<function=f", [("content", "<tool_call>\n<function=f")]),
]
CITY, A = "<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>", "<arg_key>a</arg_key>\n<arg_value>5</arg_value>"
GLM_CALL = f"<tool_call>f\n{CITY}\n{A}\n"
GLM_TEXTS = """<tool_call>f
<arg_key>city</arg_key>
<arg_value>
"<tool_call></tool_call><arg_key>"
</arg_value>
<arg_key>s</arg_key>
<arg_value>12345678901234567890</arg_value>
<arg_key>maybe</arg_key>
<arg_value>{"b": 1}</arg_value>
</tool_call>"""
GLM_TOLD = (
    r"""{"city": "\n\"<tool_call></tool_call><arg_key>\"\n", "s": "12345678901234567890", "maybe": "{\"b\": 1}"}"""
)
GLM = [
    ("Hi <tool_call>no call", [("content", "Hi <tool_call>no call")]),
    ("Use <tool_call>this thing\nso", [("content", "Use <tool_call>this thing\nso")]),
    (
        f"So.\n{GLM_CALL}</tool_call>\n<tool_call>get_weather\n</tool_call>",
        [
            ("content", "So."),
            ("call", "f"),
            ("arguments", '{"city": "Köln", "a": 5}'),
            ("call", "get_weather"),
            ("arguments", "{}"),
        ],
    ),
    (  # as 4.7 writes them: without line ends, and nothing after the name where there are no arguments
        "<tool_call>f<arg_key>a</arg_key><arg_value>5</arg_value></tool_call><tool_call>f</tool_call>",
        [("call", "f"), ("arguments", '{"a": 5}'), ("call", "f"), ("arguments", "{}")],
    ),
    (GLM_TEXTS, [("call", "f"), ("arguments", GLM_TOLD)]),  # as they are: line ends, marks, and what looks like JSON
    *(
        (
            f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
            [("call", "f"), ("arguments", f'{{"{key}": {expected}}}')],
        )
        for key, value, expected in [
            ("city", "42", '"42"'),
            ("city", "true", '"true"'),
            ("city", "", '""'),
            ("a", " 42 ", "42"),
            ("a", "many", '"many"'),
            ("n", "1e3", "1e3"),
            ("n", "NaN", '"NaN"'),  # Python takes it for a number, JSON does not
            ("n", "-Infinity", '"-Infinity"'),
            ("b", "False", "false"),
            ("o", '{"x": [1]}', '{"x": [1]}'),
            ("l", '["</x>", 1 ]', '["</x>", 1 ]'),
            ("s", "null", "null"),
            ("maybe", "None", "null"),
            ("maybe", "12", '"12"'),
            ("maybe", "nullify it all", '"nullify it all"'),
            ("unit", "1", '"1"'),
            ("mixed", "12", "12"),
            ("mixed", "1.5", '"1.5"'),
            ("mixed", "so", '"so"'),
            ("parts", "2", '"2"'),
            ("endless", "2", "2"),
            ("any", "12", "12"),
            ("any", "so", '"so"'),
            ("unknown", "12", '"12"'),
        ]
    ),
    (GLM_CALL, [("call", "f"), ("arguments", '{"city": "Köln", "a": 5')]),  # cut off
    (f"<tool_call>f\n{CITY}\n", [("call", "f"), ("arguments", '{"city": "Köln"')]),
    (GLM_CALL.partition("öln")[0], [("call", "f"), ("arguments", '{"city": "K')]),
    ("<tool_call>f", [("content", "<tool_call>f")]),
]
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALLED = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
TRICKY = '{"a": "}</tool_call>' + CALLED + '```\\" {' + END + CALL + '", "b": [{}, "[", true]}'
V3_CALL = f"function{SEP}f\n```json\n{TRICKY}\n```"
DEEPSEEK = [
    (f"Hi {BEGIN[:-3]}", [("content", f"Hi {BEGIN[:-3]}")]),
    (  # V3 and R1
        f"Let me see.\n{BEGIN}{CALL}{V3_CALL}{CALLED}\n{CALL}function{SEP}get_weather\n```json\n{{}}\n```{CALLED}{END}",
        [
            ("content", "Let me see."),
            ("call", "f"),
            ("arguments", TRICKY),
            ("call", "get_weather"),
            ("arguments", "{}"),
        ],
    ),
    (  # V3.1
        f"Let me see.{BEGIN}{CALL}f{SEP}{TRICKY}{CALLED}{CALL}get_weather{SEP}{{}}{CALLED}{END}",
        [
            ("content", "Let me see."),
            ("call", "f"),
            ("arguments", TRICKY),
            ("call", "get_weather"),
            ("arguments", "{}"),
        ],
    ),
    (f"{CALL}f{SEP}{{}}{CALLED}.", [("call", "f"), ("arguments", "{}"), ("content", ".")]),  # its section forgotten
    (f"{BEGIN}{CALL}f{SEP}{CALLED}{END}", [("call", "f"), ("arguments", "{}")]),
    (f"{BEGIN}{CALL}function{SEP}{{}}", [("call", "function"), ("arguments", "{}")]),  # a tool of this name
    (f"{BEGIN}{CALL}function{SEP}f\n{{}}\n{CALLED}{END}", [("call", "f"), ("arguments", "{}")]),  # no fence
    (f'{BEGIN}{CALL}f{SEP}{{"a": "x', [("call", "f"), ("arguments", '{"a": "x')]),  # cut off
    (f"{BEGIN}{CALL}f{SEP}", [("content", f"{BEGIN}{CALL}f{SEP}")]),
    (f"{BEGIN}none{END}", [("content", f"{BEGIN}none{END}")]),
    (f"{CALL}a b{SEP}{{}}{CALLED}", [("content", f"{CALL}a b{SEP}{{}}{CALLED}")]),
    (f"{CALL}f {{}}", [("content", f"{CALL}f {{}}")]),
    (  # a mark after the end of its section is a text like any other
        f"{BEGIN}{CALL}f{SEP}{{}}{CALLED}{END}x{END}",
        [("call", "f"), ("arguments", "{}"), ("content", f"x{END}")],
    ),
]
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_SEP, KIMI_CALLED = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
KIMI_TRICKY = '{"a": "}' + KIMI_CALLED + KIMI_END + '\\" {"}'
KIMI_SECOND = f"{KIMI_CALL}functions.get-it.now:1{KIMI_SEP}{{}}{KIMI_CALLED}"
KIMI = [
    (
        f"Sure.{KIMI_BEGIN}{KIMI_CALL}functions.f:0{KIMI_SEP}{KIMI_TRICKY}{KIMI_CALLED}{KIMI_SECOND}{KIMI_END} Then",
        [
            ("content", "Sure."),
            ("call", "f"),
            ("arguments", KIMI_TRICKY),
            ("call", "get-it.now"),
            ("arguments", "{}"),
            ("content", "Then"),
        ],
    ),
    (  # the mark of a section in its other spelling; white space and line ends anywhere
        f"<|tool_call_section_begin|>\n{KIMI_CALL} functions.f:12\n{KIMI_SEP} {{}} {KIMI_CALLED}\n{KIMI_END}",
        [("call", "f"), ("arguments", "{}")],
    ),
    (f"{KIMI_CALL}functions.f:0{KIMI_SEP}{{}}{KIMI_CALLED}", [("call", "f"), ("arguments", "{}")]),  # without section
    (f"{KIMI_BEGIN}{KIMI_CALL}f{KIMI_SEP}{KIMI_CALLED}{KIMI_END}", [("call", "f"), ("arguments", "{}")]),
    (f"{KIMI_CALL}functions.f:0{KIMI_SEP}{{", [("call", "f"), ("arguments", "{")]),  # cut off
    (f"{KIMI_BEGIN}{KIMI_CALL}functions.f:0", [("content", f"{KIMI_BEGIN}{KIMI_CALL}functions.f:0")]),
    (f"{KIMI_BEGIN}{KIMI_END}", [("content", f"{KIMI_BEGIN}{KIMI_END}")]),
]
CASES = [
    *(("glm45", *case) for case in GLM),
    *(("deepseek_v3", *case) for case in DEEPSEEK),
    *(("kimi_k2", *case) for case in KIMI),
    *(("qwen3_coder", *case) for case in QWEN_CODER),
    *(("hermes", *case) for case in HERMES),
    *(("llama3_json", *case) for case in LLAMA),
    *(("mistral", *case) for case in MISTRAL),
    *(("harmony", *case) for case in HARMONY),
]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_calls(parser: str, text: str, expected: Told) -> None:
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
def test_reasoning(text: str, expected: Told, begins_in_reasoning: bool) -> None:
    form = form_of("hermes", "deepseek_r1", begins_in_reasoning=begins_in_reasoning)
    check_every_cut(form, text, expected)


@settings(max_examples=100)
@given(parser=st.sampled_from(["hermes", "harmony"]), is_open=st.booleans(), source=st.randoms(use_true_random=False))
def test_it_is_known_where_reasoning_was(parser: str, is_open: bool, source: random.Random) -> None:
    form = form_of(parser, "harmony" if parser == "harmony" else "think", begins_in_reasoning=is_open)
    text = "".join(source.choice(FRAGMENTS) for _ in range(source.randrange(25)))
    reader, told_reasoning = form.parser(), ""
    for place in range(0, len(text) + 1, 3):
        pieces = reader.push(text[place : place + 3], is_last=place + 3 > len(text))
        told_reasoning += "".join(piece.text for piece in pieces if piece.kind is Kind.REASONING)
    assert "".join(text[begin:end] for begin, end in reader.reasoning) == told_reasoning


def test_calls_within_reasoning_that_was_not_closed() -> None:
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
        (["functions.f:7", "functions.f:8"], ["functions.f:7", "functions.f:8"]),  # it counts over the conversation
        (["functions.f:0", "functions.f:0"], ["functions.f:0", "functions.f:1"]),  # an id is a call's own
        (["f:3", "f"], ["functions.f:3", "functions.f:4"]),
    ],
)
def test_calls_are_known_by_the_ids_that_the_model_gave_them(heads: list[str], expected: list[str]) -> None:
    calls = "".join(f"{KIMI_CALL}{head}{KIMI_SEP}{{}}{KIMI_CALLED}" for head in heads)
    for width in (1, 5, 1000):
        text = f"{KIMI_BEGIN}{calls}{KIMI_END}"
        parser = form_of("kimi_k2").parser()
        pieces = [p for at in range(0, len(text), width) for p in parser.push(text[at : at + width], is_last=False)]
        assert [piece.call_id for piece in pieces if piece.kind is Kind.CALL] == expected


def test_a_text_that_may_be_null_is_told_as_it_comes() -> None:
    parser = form_of("glm45").parser()
    parser.push("<tool_call>f\n<arg_key>maybe</arg_key>\n<arg_value>", is_last=False)
    for part in ("x" * 30, "y" * MAX_HELD_CHARS):
        pieces = parser.push(part, is_last=False)
        assert "".join(piece.text for piece in pieces).strip('"').startswith(part[:-20])


def test_reasoning_between_other_marks_and_without_tools() -> None:
    form = form_of("mistral", "mistral", tools=())
    text = '[THINK]So.[/THINK]Hi [TOOL_CALLS][{"name": "f", "arguments": {}}]'
    check_every_cut(form, text, [("reasoning", "So."), ("content", 'Hi [TOOL_CALLS][{"name": "f", "arguments": {}}]')])


def test_a_single_call_where_no_more_are_wanted() -> None:
    text = '<tool_call>{"name":"f","arguments":{}}</tool_call><tool_call>{"name":"f","arguments":{"a":1}}</tool_call>.'
    expected = [("call", "f"), ("arguments", "{}"), ("content", ".")]
    check_every_cut(form_of("hermes", is_single_call=True), text, expected)


def test_arguments_are_told_as_they_come_and_marks_never() -> None:
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


def test_what_is_held_has_a_limit() -> None:
    spaces = " " * (MAX_LAYOUT_CHARS + 10)
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    expected = [("content", " " * 10), ("call", "f"), ("arguments", "{}")]
    assert told(form_of("hermes"), [spaces + call]) == told(form_of("hermes"), spaces + call) == expected
    endless = '<tool_call>{"arguments": [' + "1," * MAX_HELD_CHARS
    assert told(form_of("hermes"), [endless, "2]}"]) == [("content", endless + "2]}")]
    members = "<tool_call>{" + '"a": 1, ' * MAX_HELD_CHARS
    parser = form_of("hermes").parser()
    assert "".join(piece.text for piece in parser.push(members, is_last=False))[:100] == members[:100]


def test_brackets_without_end_are_a_text() -> None:
    nested = "[" * 100_000  # deeper than the JSON parser goes
    text = f"<tool_call><function=f><parameter=a>{nested[: MAX_HELD_CHARS // 2]}</parameter></function></tool_call>"
    arguments = json.loads(told(form_of("qwen3_coder"), [text])[1][1])
    assert arguments == {"a": nested[: MAX_HELD_CHARS // 2]}


def seconds_of(form: AnswerForm, parts: list[str]) -> float:
    """The processor time of this thread that it takes to read a text."""
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
def test_sixteen_times_the_text_takes_nowhere_near_its_square_as_long(
    form: AnswerForm, whole: bool, repeated: str, many: int
) -> None:
    """An answer whose cost grew with the square of its length held up all others for seconds."""
    parts = [
        [repeated * n] if whole else ["<tool_call><function=f><parameter=a>", *[repeated] * n]
        for n in (many // 4, 4 * many)
    ]
    short_s, long_s = (min(seconds_of(form, one) for _ in range(2)) for one in parts)
    assert long_s < 64 * short_s  # between 16 and 256, each four times away: others share caches and cores


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
def test_any_text_is_told_the_same_however_it_is_cut(
    parser: str, begins_in_reasoning: bool, parts: list[str], source: random.Random
) -> None:
    reasoning_parser = "harmony" if parser == "harmony" else source.choice(["none", "think", "kimi_k2"])
    form = form_of(parser, reasoning_parser, begins_in_reasoning=begins_in_reasoning)
    text = "".join(parts)
    whole = told(form, [text])
    assert told(form, text) == told(form, parts) == whole
    places = sorted(source.sample(range(len(text) + 1), min(4, len(text))))
    assert told(form, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]) == whole
    if [kind for kind, _ in whole] == ["content"] and parser != "harmony" and reasoning_parser == "none":
        assert whole[0][1] == text
