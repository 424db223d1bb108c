"""Calls forced by a grammar always parse and match their schemas, even from a model with random weights."""

import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from msgspec.structs import replace
from transformers import LlamaConfig, PreTrainedTokenizerFast

from engine import GenerationRequest, LLMEngine, ResumePoint, SamplingParams
from protocol.dialects.base import Tool
from protocol.dialects.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from protocol.dialects.dialect import AnswerForm, Dialect
from protocol.dialects.kimi import KIMI_K2
from protocol.dialects.sections import SectionFormat
from protocol.dialects.source import Kind
from protocol.generation import Grammar
from tests.unit.engine.tiny_models import EOS_ID, SHAPE, Answer, byte_level_tokenizer, make_engine, make_model, run

pytestmark = pytest.mark.slow
PROMPT = (5, 6, 7)
SPECIAL = ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # as in Qwen's vocabulary
PLAIN += [*SectionFormat(DEEPSEEK_V3).marks, *SectionFormat(KIMI_K2).marks, "<arg_key>", "</arg_key>", "<arg_value>"]
PLAIN += ["</arg_value>"]
PLACE = {"type": "object", "properties": {"lat": {"type": "integer", "minimum": -90, "maximum": 90}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", 'Qu"o', "Köln"]}, "place": {"$ref": "#/$defs/Place"}},
        "required": ["city", "place"],
        "additionalProperties": False,
        "$defs": {"Place": {**PLACE, "required": ["lat"], "additionalProperties": False}},
    },
    "get": {"type": "object", "properties": {}, "additionalProperties": False},
    "set-it": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}, "why": {"type": "string", "maxLength": 12}},
        "required": ["why"],
        "additionalProperties": False,
    },
}
TOOLS = tuple(Tool(name, schema, is_strict=True) for name, schema in SCHEMAS.items())
FAMILIES = [
    ("hermes", "none"),
    ("hermes", "think"),
    ("llama3_json", "none"),
    ("qwen3_coder", "think"),
    ("glm45", "think"),
    ("deepseek_v3", "think"),
    ("deepseek_v31", "none"),
    ("kimi_k2", "kimi_k2"),
    ("mistral", "mistral"),
    ("mistral_list", "none"),
    ("harmony", "harmony"),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(PLAIN)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    return tokenizer


def engine_of(tokenizer: PreTrainedTokenizerFast) -> LLMEngine:
    shape = SHAPE | {"max_position_embeddings": 2048, "vocab_size": len(tokenizer), "num_hidden_layers": 1}
    model = make_model(LlamaConfig(**shape), seed=4)
    return make_engine(model, tokenizer, max_sequences=64, max_batched_tokens=512, kv_bytes=32 << 20)


@pytest.fixture(scope="module")
def engine(tokenizer: PreTrainedTokenizerFast) -> LLMEngine:
    return engine_of(tokenizer)


@pytest.fixture(scope="module")
def engine_without_marks() -> LLMEngine:
    return engine_of(byte_level_tokenizer())


def dialect_of(tool_parser: str, reasoning_parser: str, tokenizer: PreTrainedTokenizerFast | None) -> Dialect:
    added = {} if tokenizer is None else tokenizer.added_tokens_decoder
    tokens = {str(token): (token_id, token.special) for token_id, token in added.items()}
    dialect = Dialect.of("", tokens, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    assert dialect is not None
    return dialect


def likely(tokenizer: PreTrainedTokenizerFast, biases: Mapping[str, float]) -> dict[int, float]:
    return {id_of(tokenizer, text): bias for text, bias in biases.items()}


def id_of(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    token_id = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(token_id, int)
    return token_id


def sampling_of(grammar: Grammar | None, bias: dict[int, float], **rest: Any) -> SamplingParams:
    assert grammar is not None
    assert grammar.kind == "lark"
    wanted = Grammar("lark", grammar.source, grammar.field)
    spare = {id_: -6.0 for text, id_ in byte_level_tokenizer().get_vocab().items() if not text.strip("ĠĊĉč")}
    usual: dict[str, Any] = {"max_tokens": 1500, "temperature": 1.2, "skip_special_tokens": False}
    return SamplingParams(**usual | rest | {"logit_bias": spare | bias, "grammar": wanted})


def answers(
    engine: LLMEngine, grammar: Grammar | None, count: int, bias: dict[int, float], **rest: Any
) -> list[Answer]:
    sampling = sampling_of(grammar, bias, **rest)
    requests = [GenerationRequest(str(seed), PROMPT, replace(sampling, seed=seed)) for seed in range(count)]
    return [answer for _, answer in sorted(run(engine, *requests).items())]


def calls_in(form: AnswerForm, text: str) -> tuple[list[tuple[str, str]], str, str]:
    """Return the calls, the content and the reasoning of an answer."""
    calls: list[tuple[str, str]] = []
    rest = {Kind.CONTENT: "", Kind.REASONING: ""}
    for kind, part, _ in form.parser().push(text, is_last=True):
        if kind is Kind.CALL:
            calls.append((part, ""))
        elif kind is Kind.ARGUMENTS:
            calls[-1] = (calls[-1][0], calls[-1][1] + part)
        else:
            rest[kind] += part
    return calls, rest[Kind.CONTENT], rest[Kind.REASONING]


def check_calls(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize(("tool_parser", "reasoning_parser"), FAMILIES)
def test_forced_calls_always_parse_and_validate(
    engine: LLMEngine, tokenizer: PreTrainedTokenizerFast, tool_parser: str, reasoning_parser: str
) -> None:
    # Random weights never end an unquoted string, as in Qwen Coder's format.
    tools = TOOLS[:2] if tool_parser in {"qwen3_coder", "glm45"} else TOOLS
    form = AnswerForm(dialect_of(tool_parser, reasoning_parser, tokenizer), tools)
    # Reasoning may precede; keep it short.
    bias = likely(tokenizer, {"</think>": 12, "[/THINK]": 12, "<|end|>": 12, "</s>": 6})
    found = answers(engine, form.grammar(must_call=True, content=None), 9, bias)
    assert len(check_answers(form, found)) > 1


@pytest.mark.parametrize("tool_parser", ["hermes", "llama3_json", "mistral_list", "deepseek_v31", "kimi_k2"])
def test_forced_marks_may_be_spelled_out(engine_without_marks: LLMEngine, tool_parser: str) -> None:
    is_long = tool_parser in {"deepseek_v31", "kimi_k2"}  # its marks are long in single bytes
    form = AnswerForm(dialect_of(tool_parser, "none", None), TOOLS, is_single_call=is_long)
    found = answers(engine_without_marks, form.grammar(must_call=True, content=None), 4, {EOS_ID: 6.0})
    assert check_answers(form, found)


def check_answers(form: AnswerForm, found: list[Answer]) -> set[str]:
    """Check that answers have only calls and reasoning; return their tools."""
    names: set[str] = set()
    for answer in found:
        calls, content, reasoning = calls_in(form, answer.text)
        assert answer.finish_reason == "stop", answer
        assert calls, answer.text
        assert content == ""
        assert not reasoning or form.dialect.has_reasoning
        check_calls(calls)
        names |= {name for name, _ in calls}
    return names


def test_a_named_tool_is_called_once_after_reasoning_that_the_prompt_began(
    engine: LLMEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    dialect = dialect_of("hermes", "think", tokenizer)
    form = AnswerForm(dialect, TOOLS[:1], is_single_call=True, begins_in_reasoning=True)
    grammar = form.grammar(must_call=True, content=None)
    for answer in answers(engine, grammar, 5, likely(tokenizer, {"</think>": 8})):
        calls, content, _ = calls_in(form, answer.text)
        assert (answer.text.count("</think>"), len(calls), content) == (1, 1, "")
        assert not answer.text.startswith("<tool_call>")
        check_calls(calls)


@pytest.mark.parametrize(
    ("tool_parser", "reasoning_parser", "begin"),
    [
        ("hermes", "think", "<tool_call>"),
        ("mistral", "none", "[TOOL_CALLS]"),
        ("mistral_list", "none", "[TOOL_CALLS]"),
        ("llama3_json", "none", "{"),
        ("harmony", "harmony", "<|channel|>"),
        ("deepseek_v3", "think", DEEPSEEK_V3.opens[0]),
        ("deepseek_v31", "none", DEEPSEEK_V3.call),
        ("kimi_k2", "none", KIMI_K2.opens[0]),
        ("kimi_k2", "kimi_k2", KIMI_K2.call),
    ],
)
def test_strict_tools_make_every_begun_call_valid(
    engine: LLMEngine, tokenizer: PreTrainedTokenizerFast, tool_parser: str, reasoning_parser: str, begin: str
) -> None:
    form = AnswerForm(dialect_of(tool_parser, reasoning_parser, tokenizer), TOOLS)
    grammar = form.grammar(must_call=False, content=None)
    # Harmony's channel of calls begins with a "c".
    channel = {"c": 5.0} if tool_parser == "harmony" else {}
    bias = likely(tokenizer, {begin: 12.0, "</think>": 10.0, "<|end|>": 10.0, "</s>": 11.0, **channel})
    found = answers(engine, grammar, 24, bias, max_tokens=300)
    read = [calls_in(form, answer.text) for answer in found if answer.finish_reason == "stop"]
    for calls, content, _ in read:
        assert begin not in content or begin == "{"
        check_calls(calls)
    assert any(calls for calls, _, _ in read)
    assert any(not calls for calls, _, _ in read)


def test_only_strict_tools_are_constrained_if_the_model_may_choose(
    engine: LLMEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    dialect = dialect_of("hermes", "none", tokenizer)
    loose = tuple(Tool(tool.name, tool.schema, is_strict=False) for tool in TOOLS)
    assert AnswerForm(dialect, loose).grammar(must_call=False, content=None) is None
    mixed = AnswerForm(dialect, (TOOLS[0], *loose[1:])).grammar(must_call=False, content=None)
    assert mixed is not None
    assert '"lat"' in mixed.source
    assert '"why"' not in mixed.source


SHAPE_OF_ANSWER = {
    "type": "object",
    "properties": {"level": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["level"],
    "additionalProperties": False,
}


CALL = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
TO_FINAL = "<|channel|>final<|message|>"
TO_CALL = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>{}"
ANALYSIS = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant"
LEVEL = '{"level": 7}'


def is_answer(tokenizer: PreTrainedTokenizerFast, grammar: Grammar | None, text: str) -> bool:
    """Return whether a grammar accepts a text as a whole answer."""
    assert grammar is not None
    llguidance_tokenizer = from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[EOS_ID])
    matcher = LLMatcher(llguidance_tokenizer, LLMatcher.grammar_from_lark(grammar.source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    is_possible = matcher.consume_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
    return is_possible and matcher.is_accepting()


@pytest.mark.parametrize(
    "content",
    [
        Grammar("json_schema", json.dumps(SHAPE_OF_ANSWER)),
        Grammar("regex", r'\{"level": [0-9]\}'),
        Grammar("lark", 'start: "{\\"level\\": " NUMBER "}"\nNUMBER: /[1-9][0-9]?/'),
    ],
    ids=["schema", "regex", "lark"],
)
@pytest.mark.parametrize(
    ("parser", "with_calls", "without"),
    [
        ("hermes", [CALL, f"<think>So.</think>\n\n{CALL}"], [LEVEL, f"<think>\nSo. {{\n</think>\n\n{LEVEL}"]),
        ("harmony", [TO_CALL, ANALYSIS + TO_CALL], [TO_FINAL + LEVEL, ANALYSIS + TO_FINAL + LEVEL]),
    ],
)
def test_an_answer_has_its_form_or_is_a_call(
    tokenizer: PreTrainedTokenizerFast, content: Grammar, parser: str, with_calls: list[str], without: list[str]
) -> None:
    dialect = dialect_of(parser, "think" if parser == "hermes" else parser, tokenizer)
    for tools, field in (((), "response_format"), (TOOLS, "tools")):
        grammar = AnswerForm(dialect, tools).grammar(must_call=False, content=content)
        assert grammar is not None
        assert grammar.field == field
        for text in without:
            assert is_answer(tokenizer, grammar, text)
            assert not is_answer(tokenizer, grammar, text.replace("7", "x"))
        for text in with_calls:
            assert is_answer(tokenizer, grammar, text) == bool(tools)


def test_unquoted_strings(tokenizer: PreTrainedTokenizerFast) -> None:
    properties = {"why": {"type": "string"}, "days": {"type": "integer"}}
    tool = Tool("f", {"type": "object", "properties": properties, "required": ["why"]}, is_strict=True)
    form = AnswerForm(dialect_of("qwen3_coder", "none", tokenizer), (tool,))
    text = '<tool_call>\n<function=f>\n<parameter=why>\nIt "is"\n</x>\n</parameter>\n'
    days = "<parameter=days>\n7\n</parameter>\n"
    end = "</function>\n</tool_call>"
    for must_call in (True, False):
        grammar = form.grammar(must_call=must_call, content=None)
        assert is_answer(tokenizer, grammar, text + end)
        assert is_answer(tokenizer, grammar, text + days + end)
        assert not is_answer(tokenizer, grammar, text + days.replace("7", "x") + end)
        assert not is_answer(tokenizer, grammar, f"<tool_call>\n<function=f>\n{days}{end}")
    bounded = AnswerForm(form.dialect, TOOLS)
    with pytest.raises(ValueError, match="'why' cannot be enforced"):
        bounded.grammar(must_call=True, content=None)


def test_texts_between_tags(tokenizer: PreTrainedTokenizerFast) -> None:
    schema = {
        "type": "object",
        "properties": {
            "why": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "unit": {"$ref": "#/$defs/Unit"},
            "mixed": {"type": ["integer", "string"]},
        },
        "required": ["why", "unit"],
        "$defs": {"Unit": {"enum": ["C", "F"], "type": "string"}},
    }
    form = AnswerForm(dialect_of("glm45", "none", tokenizer), (Tool("f", schema, is_strict=True),))
    grammar = form.grammar(must_call=True, content=None)

    def call(why: str, unit: str, rest: str = "", end: str = "\n") -> str:
        arguments = [("why", why), ("unit", unit), *([("mixed", rest)] if rest else [])]
        written = [f"<arg_key>{k}</arg_key>{end}<arg_value>{v}</arg_value>{end}" for k, v in arguments]
        return f"<tool_call>f{end}{''.join(written)}</tool_call>"

    for end in ("\n", ""):  # as in 4.5 and in 4.7
        assert is_answer(tokenizer, grammar, call('It "is"\n</x>', "C", end=end))
        assert not is_answer(tokenizer, grammar, call("so", '"C"', end=end))
    assert is_answer(tokenizer, grammar, call("null", "F", '"x"'))
    assert is_answer(tokenizer, grammar, call("", "F", "7"))
    assert not is_answer(tokenizer, grammar, call("", "F", "x"))
    assert not is_answer(tokenizer, grammar, "<tool_call>f\n</tool_call>")
    assert calls_in(form, call("7", "F", '"x"'))[0] == [("f", '{"why": "7", "unit": "F", "mixed": "x"}')]


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"s": {"anyOf": [{"type": "string", "pattern": "a"}, {"type": "null"}]}}, "'s' cannot be enforced"),
        ({"s": {"type": "string", "allOf": [{"maxLength": 3}, {"pattern": "a"}]}}, "'s' cannot be enforced"),
        ({"s": {"type": "string", "anyOf": [{"maxLength": 3}]}}, "'s' cannot be enforced"),
        (["s"], "must be an object"),
    ],
)
def test_bounds_that_cannot_be_enforced_between_tags(properties: object, message: str) -> None:
    tool = Tool("f", {"type": "object", "properties": properties}, is_strict=True)
    form = AnswerForm(dialect_of("glm45", "none", None), (tool,))
    with pytest.raises(ValueError, match=message):
        form.grammar(must_call=True, content=None)
    assert form.parser().push("<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value></tool_call>", is_last=True)


@pytest.mark.parametrize("parser", ["qwen3_coder", "glm45"])
def test_a_lenient_tool_next_to_a_strict_one_takes_any_arguments(
    tokenizer: PreTrainedTokenizerFast, parser: str
) -> None:
    free = Tool("f", {"type": "object", "properties": {"a": {"type": "integer"}}}, is_strict=False)
    grammar = AnswerForm(dialect_of(parser, "none", tokenizer), (free, TOOLS[1])).grammar(must_call=False, content=None)
    glm = "<tool_call>{}\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
    coder = "<tool_call>\n<function={}>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
    text = glm if parser == "glm45" else coder
    assert is_answer(tokenizer, grammar, text.format("f"))
    assert not is_answer(tokenizer, grammar, text.format("get"))


def test_several_calls_up_to_the_allowed_number(tokenizer: PreTrainedTokenizerFast) -> None:
    for parser, section, written in (
        ("deepseek_v3", DEEPSEEK_V3, "function<｜tool▁sep｜>get\n```json\n{}\n```"),
        ("deepseek_v31", DEEPSEEK_V31, "get<｜tool▁sep｜>{}"),
        ("kimi_k2", KIMI_K2, "functions.get:1<|tool_call_argument_begin|>{}"),
    ):
        dialect = dialect_of(parser, "none", tokenizer)
        call = f"{section.call}{written}{section.end_of_call}"
        for most, single in ((2, False), (1, True)):
            grammar = AnswerForm(dialect, TOOLS, is_single_call=single).grammar(must_call=True, content=None)
            for count in (0, 1, 2):
                text = f"{section.opens[0]}{section.between.join([call] * count)}{section.close}"
                assert is_answer(tokenizer, grammar, text) == (0 < count <= most)


def test_slashes_and_line_ends_of_a_pattern(tokenizer: PreTrainedTokenizerFast) -> None:
    form = AnswerForm(dialect_of("hermes", "think", tokenizer), ())
    grammar = form.grammar(must_call=False, content=Grammar("regex", "a/b\\/c\n[/]"))
    assert is_answer(tokenizer, grammar, "a/b/c\n/")
    assert not is_answer(tokenizer, grammar, "a/b/c//")


def test_calls_that_look_like_answers_are_not_mixed_with_them() -> None:
    form = AnswerForm(dialect_of("llama3_json", "none", None), TOOLS)
    with pytest.raises(ValueError, match="calls as JSON"):
        form.grammar(must_call=False, content=Grammar("json_object", ""))
    assert form.grammar(must_call=True, content=Grammar("json_object", "")) is not None


def test_a_forced_call_is_the_same_when_resumed_anywhere(engine: LLMEngine, tokenizer: PreTrainedTokenizerFast) -> None:
    form = AnswerForm(dialect_of("hermes", "none", tokenizer), TOOLS[1:2], is_single_call=True)
    grammar = form.grammar(must_call=True, content=None)
    sampling = sampling_of(grammar, {}, seed=0)
    whole = run(engine, GenerationRequest("whole", PROMPT, sampling))["whole", 0]
    cuts = {str(place): whole.token_ids[:place] for place in range(0, len(whole.token_ids), 3)}
    found = run(
        engine,
        *(
            GenerationRequest(name, PROMPT, sampling, (ResumePoint(0, tuple(before), 0),))
            for name, before in cuts.items()
        ),
    )
    for name, before in cuts.items():
        assert before + found[name, 0].token_ids == whole.token_ids
        assert found[name, 0].text == whole.text
