"""Texts with calls of each family of models, and the events that a client receives."""

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
    (  # the name last, or unknown keys
        '<tool_call>{"arguments": {"q": [1]}, "id": 7, "name": "f"}</tool_call>',
        [("call", "f"), ("arguments", '{"q": [1]}')],
    ),
    (  # arguments as text
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [("call", "f"), ("arguments", '{"a": 1}')],
    ),
    (  # a missing end mark, or a missing brace
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
    ('Sure. <|python_tag|>{"name": "f", "parameters": {}}', [("content", "Sure."), ("call", "f"), ("arguments", "{}")]),
    (
        '\n{"name": "Bob", "parameters": {}}',
        [("content", '\n{"name": "Bob", "parameters": {}}')],
    ),  # not a tool: an answer
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
    (
        "<|channel|>commentary to=python<|message|>1+1",
        [("reasoning", "1+1")],
    ),  # a built-in tool, which does not exist here
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
        [("call", "f"), ("arguments", '{"b": true, "z": "1", "o": "{\'x\'}", "s": "7", "s": null}'), ("content", ".")],
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
GLM_ARGUMENTS = (
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
    (  # as in 4.7: without line ends, and nothing after the name without arguments
        "<tool_call>f<arg_key>a</arg_key><arg_value>5</arg_value></tool_call><tool_call>f</tool_call>",
        [("call", "f"), ("arguments", '{"a": 5}'), ("call", "f"), ("arguments", "{}")],
    ),
    (GLM_TEXTS, [("call", "f"), ("arguments", GLM_ARGUMENTS)]),  # unchanged: line ends, marks, and text like JSON
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
            ("n", "NaN", '"NaN"'),  # a number in Python, but not in JSON
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
    (f"{CALL}f{SEP}{{}}{CALLED}.", [("call", "f"), ("arguments", "{}"), ("content", ".")]),  # a missing section
    (f"{BEGIN}{CALL}f{SEP}{CALLED}{END}", [("call", "f"), ("arguments", "{}")]),
    (f"{BEGIN}{CALL}function{SEP}{{}}", [("call", "function"), ("arguments", "{}")]),  # a tool with this name
    (f"{BEGIN}{CALL}function{SEP}f\n{{}}\n{CALLED}{END}", [("call", "f"), ("arguments", "{}")]),  # no fence
    (f'{BEGIN}{CALL}f{SEP}{{"a": "x', [("call", "f"), ("arguments", '{"a": "x')]),  # cut off
    (f"{BEGIN}{CALL}f{SEP}", [("content", f"{BEGIN}{CALL}f{SEP}")]),
    (f"{BEGIN}none{END}", [("content", f"{BEGIN}none{END}")]),
    (f"{CALL}a b{SEP}{{}}{CALLED}", [("content", f"{CALL}a b{SEP}{{}}{CALLED}")]),
    (f"{CALL}f {{}}", [("content", f"{CALL}f {{}}")]),
    (  # a mark after the end of its section is plain text
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
    (  # the other spelling of the section's mark; white space and line ends anywhere
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
