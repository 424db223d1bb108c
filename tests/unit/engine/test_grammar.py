"""Answers follow their grammar at any temperature, even if resumed anywhere."""

import json
import random
import re
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from transformers import LlamaConfig, PreTrainedModel

from engine import GenerationRequest, LLMEngine, RequestRejected, ResumePoint, SamplingParams, SequenceOutput
from engine.text.grammar import COMPILING_THREADS, CompiledGrammar, Family, GrammarCompiler, Matcher
from engine.text.grammar import _source as grammar_source
from engine.types import GrammarKind, Refusal
from protocol.dialects.lark import LarkGrammar
from protocol.generation import Grammar
from tests.unit.engine.tiny_models import (
    EOS_ID,
    SHAPE,
    Answer,
    Answers,
    byte_level_tokenizer,
    collect,
    drain,
    make_engine,
    make_model,
    run,
)
from tests.waiting import HANGS_S

SCHEMAS = 50
VOCABULARY = byte_level_tokenizer().get_vocab()
# A model of random weights would fill pages with white space, which JSON allows nearly everywhere.
SPARING = {id_: -4.0 for text, id_ in VOCABULARY.items() if not text.strip("\u0120\u010a\u010d\u0109")}
PROMPT = tuple(byte_level_tokenizer()("hello world", add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model(LlamaConfig(**SHAPE | {"max_position_embeddings": 4096, "num_hidden_layers": 1}))


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> LLMEngine:
    return make_engine(model, max_sequences=64, max_batched_tokens=512, kv_bytes=32 << 20)


def request(name: str, kind: GrammarKind, source: str, **params: Any) -> GenerationRequest:
    resume = params.pop("resume", ())
    usual: dict[str, Any] = {"max_tokens": 1500, "temperature": 1.5, "seed": 7, "logit_bias": SPARING}
    return GenerationRequest(name, PROMPT, SamplingParams(**usual | params, grammar=Grammar(kind, source)), resume)


def answer_of(engine: LLMEngine, kind: GrammarKind, source: str, **params: Any) -> Answer:
    return run(engine, request("r", kind, source, **params))["r", 0]


def schema_of(source: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose values are finite, so that a random answer ends."""
    leaves = ["string", "integer", "boolean", "null", "enum", "const", "pattern"]
    kind = source.choice(leaves if depth > 2 else [*leaves, "object", "object", "array", "anyOf"])
    if kind == "object" or depth == 0:
        names = source.sample(["a", "name", "größe", "x y", 'quo"te', "0"], source.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: schema_of(source, depth + 1) for name in names},
            "required": source.sample(names, source.randint(0, len(names))),
            "additionalProperties": False,
        }
    if kind == "array":
        most = source.randint(0, 3)
        return {"type": "array", "items": schema_of(source, depth + 1), "minItems": min(1, most), "maxItems": most}
    if kind == "anyOf":
        return {"anyOf": [schema_of(source, depth + 1) for _ in range(2)]}
    low = source.randint(-1000, 1000)
    schemas: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "minLength": source.randint(0, 2), "maxLength": source.randint(2, 9)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 5000)},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": ["red", 3, None, "grün"]},
        "const": {"const": {"k": [1, True]}},
        "pattern": {"type": "string", "pattern": "^[a-f]{1,4}-[0-9]{2}$"},
    }
    return schemas[kind]


def test_json_always_validates(engine: LLMEngine) -> None:
    source = random.Random(2)
    schemas = {f"s{number}": schema_of(source) for number in range(SCHEMAS)}
    answers = run(engine, *(request(name, "json_schema", json.dumps(schema)) for name, schema in schemas.items()))
    for (name, _), answer in answers.items():
        assert answer.finish_reason == "stop", answer
        jsonschema.validate(json.loads(answer.text), schemas[name])
    assert len({answer.text for answer in answers.values()}) > SCHEMAS // 2


def test_any_object(engine: LLMEngine) -> None:
    # An unbounded answer ends at max_tokens; a bias makes an earlier end likely here.
    bias = dict.fromkeys(byte_level_tokenizer()("}", add_special_tokens=False)["input_ids"], 50.0)
    assert json.loads(answer_of(engine, "json_object", "", logit_bias=bias).text) == {}


@pytest.mark.parametrize("pattern", ["ab", "[0-9]{3}-[a-f]+x", "(yes|no|vielleicht ünd)"])
def test_regular_expressions(engine: LLMEngine, pattern: str) -> None:
    for seed in range(4):
        answer = answer_of(engine, "regex", pattern, seed=seed)
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern, answer.text)


def test_context_free_grammars(engine: LLMEngine) -> None:
    nested = 'start: "(" start ")" | "x"\n'
    for seed in range(4):
        text = answer_of(engine, "lark", nested, seed=seed).text
        assert text.count("(") == text.count(")")
        assert text.strip("()") == "x"


BOUNDED = {
    "type": "object",
    "properties": {"level": {"type": "integer", "minimum": 0, "maximum": 555}, "gate": {"enum": ["open", "closed"]}},
    "required": ["level", "gate"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0, "repetition_penalty": 1.2}, {"stop": ("5",)}])
def test_a_grammars_answer_resumed_anywhere_equals_the_undisturbed_one(
    engine: LLMEngine, params: dict[str, Any]
) -> None:
    schema = json.dumps(BOUNDED)
    whole = answer_of(engine, "json_schema", schema, **params)
    points = [ResumePoint(0, tuple(whole.token_ids[:position]), 0) for position in range(len(whole.token_ids) + 1)]
    requests = [request(str(n), "json_schema", schema, **params, resume=(point,)) for n, point in enumerate(points)]
    answers = run(engine, *requests)
    for position in range(len(points)):
        resumed = answers[str(position), 0]
        assert whole.token_ids[:position] + resumed.token_ids == whole.token_ids
        assert (resumed.text, resumed.finish_reason) == (whole.text, whole.finish_reason)


def test_a_grammars_answer_is_the_same_with_little_memory_drafts_and_resumes(
    model: PreTrainedModel, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = json.dumps(BOUNDED)
    whole = run(engine, request("r", "json_schema", schema, n=3))
    assert len({answer.text for answer in whole.values()}) == 3
    for answer in whole.values():
        jsonschema.validate(json.loads(answer.text), BOUNDED)
    monkeypatch.setattr("engine.choice.NgramDrafts.guess", lambda _drafts, most_tokens: [20, 21][:most_tokens])
    longest = max(len(answer.token_ids) for answer in whole.values())
    small = make_engine(model, draft_tokens=4, lookahead_tokens=0, kv_bytes=1024 * (longest // 2))
    mate = GenerationRequest("mate", PROMPT * 10, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    for position in range(0, longest, 5):  # each choice at another one
        points = tuple(ResumePoint(i, tuple(whole["r", i].token_ids[: position + i]), 0) for i in range(3))
        params: dict[str, Any] = {"n": 3, "resume": points, "max_tokens": longest}
        answers = run(small, mate, request("r", "json_schema", schema, **params))
        for index in range(3):
            assert answers["r", index].text == whole["r", index].text
    assert small.counters.preemptions > 0
    assert small.counters.guessed_tokens > 0


def test_other_requests_of_the_batch_are_unaffected_by_a_grammar(model: PreTrainedModel, engine: LLMEngine) -> None:
    alone = run(make_engine(model), free("free"))["free", 0]
    together = run(engine, request("bound", "regex", "[ab]{30}"), free("free"), request("other", "regex", "[cd]{30}"))
    assert together["free", 0] == alone
    assert re.fullmatch("[ab]{30}", together["bound", 0].text)


def test_a_complete_answer_ends_even_before_min_tokens(engine: LLMEngine) -> None:
    answer = answer_of(engine, "regex", "ab", min_tokens=20, ignore_eos=True)
    assert (answer.text, answer.finish_reason) == ("ab", "stop")


def test_an_optional_rest_ends_with_the_models_end_token(engine: LLMEngine) -> None:
    answer = answer_of(engine, "regex", "ab*", logit_bias={EOS_ID: 100.0})
    assert (answer.text, answer.finish_reason) == ("a", "stop")


@pytest.mark.parametrize(
    ("kind", "source", "because"),
    [
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", "{", "json"),
        ("regex", "(", "unclosed"),
        ("lark", "start: nothing", "nothing"),
    ],
)
def test_an_invalid_grammar_is_refused_with_its_field(
    engine: LLMEngine, kind: GrammarKind, source: str, because: str
) -> None:
    for _ in range(2):  # the second time it is known at once
        engine.add_request(request("r", kind, source, n=2))
        [refusal] = steps_until(engine, bool)
        assert isinstance(refusal, Refusal)
        assert refusal.param == "response_format"
        assert because in str(refusal.error)
        assert not engine.has_unfinished()


def test_a_grammar_that_is_too_long_is_refused_at_once(engine: LLMEngine) -> None:
    with pytest.raises(RequestRejected, match="200000") as refused:
        engine.add_request(request("r", "regex", "a" * 200_001))
    assert refused.value.field == "response_format"
    assert not engine.has_unfinished()


def steps_until(engine: LLMEngine, enough: Any) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while not enough(outputs):
        assert engine.has_unfinished()
        outputs += engine.step()
    return outputs


class Gate:
    """Compiles grammars only once it is opened, and records which."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.opened = threading.Event()

    def passed(self, source: str) -> None:
        assert self.opened.wait(30)
        self.compiled.append(source)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate, usual = Gate(), GrammarCompiler._compile

    def compile_later(compiler: GrammarCompiler, grammar: Grammar, *others: Any) -> Any:
        gate.passed(grammar.source)
        return usual(compiler, grammar, *others)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_later)
    return gate


def free(name: str, max_tokens: int = 40) -> GenerationRequest:
    return GenerationRequest(
        name, PROMPT, SamplingParams(temperature=1.5, seed=3, max_tokens=max_tokens, ignore_eos=True)
    )


def test_the_batch_continues_while_a_grammar_is_compiled(model: PreTrainedModel, gate: Gate) -> None:
    engine = make_engine(model)
    engine.add_request(request("bound", "regex", "[ab]{30}", n=2))
    assert engine.load().waiting == 2
    engine.add_request(free("free"))
    outputs = steps_until(engine, lambda outputs: any(output.finish_reason for output in outputs))
    assert {output.request_id for output in outputs} == {"free"}
    assert (engine.load().running, engine.load().waiting) == (0, 2)
    gate.opened.set()
    waited = min(one.added_s for one in engine._compiling.values())
    answers: Answers = defaultdict(Answer)
    while engine._compiling:
        collect(answers, engine.step())
    assert engine._choices["bound"][0].sequence.clock.added_s == waited, "its grammar's time is time in the queue"
    drain(engine, answers)
    assert [bool(re.fullmatch("[ab]{30}", answers["bound", index].text)) for index in range(2)] == [True, True]
    expected = run(make_engine(model), request("bound", "regex", "[ab]{30}", n=2))
    assert answers == expected, "whenever it was admitted"


def test_a_grammar_is_compiled_once_for_all_waiting_requests(model: PreTrainedModel, gate: Gate) -> None:
    engine = make_engine(model)
    for number in range(5):
        engine.add_request(request(f"r{number}", "regex", "[ab]{3}" if number < 4 else "x"))
    engine.step()
    gate.opened.set()
    answers = drain(engine)
    assert {answers[f"r{number}", 0].text for number in range(4)} == {answers["r0", 0].text}
    assert sorted(gate.compiled) == ["[ab]{3}", "x"]


def test_a_request_canceled_while_its_grammar_is_compiled(model: PreTrainedModel, gate: Gate) -> None:
    engine = make_engine(model)
    before = engine.load()
    sources = [f"a{{{number}}}" for number in range(COMPILING_THREADS + 3)]
    for source in sources:
        engine.add_request(request(source, "regex", source, n=2))
        engine.add_request(request(f"{source} too", "regex", source))
    with pytest.raises(RequestRejected, match="already"):
        engine.add_request(request(sources[0], "regex", "b"))
    for source in sources[:-1]:
        engine.abort(source)
        engine.abort(source)
        engine.abort(f"{source} too")
    engine.abort(sources[-1])
    ended = [(output.request_id, output.index, output.finish_reason) for output in engine.step()]
    assert ended[:3] == [
        (sources[0], 0, "cancelled"),
        (sources[0], 1, "cancelled"),
        (f"{sources[0]} too", 0, "cancelled"),
    ]
    assert len(ended) == 3 * len(sources) - 1
    gate.opened.set()
    assert drain(engine)[f"{sources[-1]} too", 0].text == "a" * (len(sources) - 1)
    assert engine.load() == before
    assert sources[-1] in gate.compiled
    assert set(gate.compiled) <= {*sources[:COMPILING_THREADS], sources[-1]}, "compiled although no request waits"


def test_masks_are_made_while_the_forward_pass_runs(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    made = threading.Semaphore(0)
    forward, make_mask = engine._runner.forward, Matcher.make_mask

    def note(matcher: Matcher) -> None:
        make_mask(matcher)
        made.release()

    def wait_for_masks(chunks: Any) -> Any:
        for _ in chunks:
            assert made.acquire(timeout=HANGS_S)
        return forward(chunks)

    monkeypatch.setattr(Matcher, "make_mask", note)
    monkeypatch.setattr(engine._runner, "forward", wait_for_masks)
    answers = run(engine, *(request(f"r{number}", "regex", "[ab]{9}", seed=number) for number in range(4)))
    assert all(re.fullmatch("[ab]{9}", answer.text) for answer in answers.values())


@pytest.mark.parametrize("special", [True, False])
def test_a_constant_may_hold_the_text_of_an_added_token(special: bool) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=special)], special_tokens=special)
    schema = {
        "type": "object",
        "properties": {"a": {"const": "say <tool_call>!"}},
        "required": ["a"],
        "x-guidance": {"whitespace_pattern": ""},
        "additionalProperties": False,
    }
    compiler = GrammarCompiler(tokenizer, len(tokenizer), (EOS_ID,))
    matcher = compiler.compile(Grammar("json_schema", json.dumps(schema))).matcher()
    token_ids: list[int] = []
    while not matcher.is_complete:
        matcher.make_mask()
        logits = torch.zeros(len(tokenizer))
        matcher.forbid(logits)
        token_ids.append(int(logits.argmax()))
        matcher.consume(token_ids[-1])
    assert json.loads(str(tokenizer.decode(token_ids))) == {"a": "say <tool_call>!"}


def test_a_parser_error_ends_only_its_answer(engine: LLMEngine) -> None:
    """Another worker's tokens that this worker's grammar does not allow."""
    strange = ResumePoint(0, tuple(byte_level_tokenizer()("zz", add_special_tokens=False)["input_ids"]), 0)
    for _ in range(2):  # the second time the grammar is compiled already
        answers = run(engine, request("r", "regex", "[ab]{8}", resume=(strange,)), free("free"))
        assert answers["r", 0].finish_reason == "error"
        assert "satisfy" in str(answers["r", 0].error)
        assert answers["free", 0].finish_reason == "length"
    assert answer_of(engine, "regex", "ab").text == "ab"


def test_an_answer_without_allowed_tokens_fails_alone(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a vocabulary that lacks some bytes."""
    nothing = SimpleNamespace(compute_bitmask=lambda: bytes(len(VOCABULARY) // 8 + 1), is_error=lambda: False)
    monkeypatch.setattr(
        CompiledGrammar, "matcher", lambda _grammar: Matcher(cast("Any", nothing), "guided_regex", Family())
    )
    answers = run(engine, request("bound", "regex", "x", logprobs=1), free("free", max_tokens=10))
    assert answers["bound", 0].finish_reason == "error"
    assert "no token" in str(answers["bound", 0].error)
    assert len(answers["free", 0].token_ids) == 10


OVERLAPPING = {"oneOf": [{"type": "string"}, {"type": "string"}]}


@pytest.mark.parametrize("schema", [OVERLAPPING, {"pattern": "(?=x)"}, {"$ref": "#/nope"}])
@pytest.mark.parametrize("kind", ["json_schema", "lark"])
def test_errors_show_neither_the_internal_grammar_nor_options(kind: GrammarKind, schema: Any) -> None:
    lark = LarkGrammar({})
    source = json.dumps(schema) if kind == "json_schema" else lark.source(lark.json(schema))
    compiler = GrammarCompiler(byte_level_tokenizer(), len(VOCABULARY), (EOS_ID,))
    with pytest.raises(RequestRejected) as refused:
        compiler.compile(Grammar(kind, source, "tools")).matcher()
    error = refused.value.message
    assert error.startswith("invalid ")
    assert not re.search(r"x-guidance|rule_|TEXT|coerce|%json|\d \|", error)


@pytest.mark.parametrize("extra", [{}, {"description": "</s>"}])
def test_a_schema_cannot_lift_the_white_space_limit(extra: dict[str, str]) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": " *"}, **extra}
    source = grammar_source(Grammar("json_schema", json.dumps(schema)), ("</s>",))
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, source, log_level=0)
    assert matcher.validate_tokens(tokenizer.tokenize_str("{" + " " * 40)) == 21
