"""The cost limits of one request's grammar: above them it fails permanently, and the batch never waits for it."""

import json
import re
import threading
from typing import Any

import pytest
from transformers import LlamaConfig, PreTrainedModel

from engine import GenerationRequest, SamplingParams
from engine.errors import GrammarTooComplex, RequestRejected
from engine.text.grammar import (
    MASK_LIMIT_S,
    MASKS_ALLOWANCE_S,
    MASKS_PER_TOKEN_S,
    SLOW_MASK_S,
    TOKENS_ALLOWANCE_S,
    GrammarCompiler,
    Matcher,
)
from engine.text.grammar_check import GrammarCheck, TooExpensive
from engine.types import GrammarKind, Refusal, SequenceOutput
from protocol.generation import Grammar
from tests.unit.engine.tiny_models import EOS_ID, SHAPE, Answer, byte_level_tokenizer, collect, drain, make_engine, run
from tests.unit.engine.tiny_models import make_model as make_tiny_model

# An ambiguous grammar: a mask takes ten times as long after ten tokens, and half a second after seventy.
HOSTILE = 'start: e\ne: e e e e e e e e e e e e e | e e e e | e e e | e e | /[a-z ]/ | ""'
# llguidance 1.9 takes minutes for it, even with all its limits.
ENDLESS = json.dumps({"type": "object", "patternProperties": {f"^a{i}.*b{i}$": {"type": "string"} for i in range(800)}})
PROMPT = tuple(byte_level_tokenizer()("hello world", add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_tiny_model(LlamaConfig(**SHAPE | {"max_position_embeddings": 1024}))


def bound(name: str, kind: GrammarKind, source: str, **params: Any) -> GenerationRequest:
    usual: dict[str, Any] = {"max_tokens": 100, "seed": 7}
    grammar = Grammar(kind, source, "guided_grammar")
    return GenerationRequest(name, PROMPT, SamplingParams(**usual | params, grammar=grammar))


def free(name: str, max_tokens: int = 40) -> GenerationRequest:
    return GenerationRequest(name, PROMPT, SamplingParams(seed=3, max_tokens=max_tokens, ignore_eos=True))


class Clock:
    """CPU time set by the test: it advances by a fixed amount between two readings."""

    def __init__(self, *costs_s: float) -> None:
        self._costs = list(costs_s)
        self._now_s = 0.0
        self._looks = 0

    def __call__(self) -> float:
        if self._looks % 2:
            self._now_s += self._costs.pop(0)
        self._looks += 1
        return self._now_s


def matcher_of(clock: Clock, source: str = "[ab]{9999}") -> Matcher:
    compiler = GrammarCompiler(byte_level_tokenizer(), len(byte_level_tokenizer()), (EOS_ID,))
    matcher = compiler.compile(Grammar("regex", source, "guided_regex")).matcher()
    matcher._clock = clock
    return matcher


# --- masks ------------------------------------------------------------------------------------------------------------


def test_an_expensive_one_line_grammar_fails_alone_and_permanently(model: PreTrainedModel) -> None:
    engine = make_engine(model, max_sequences=16, kv_bytes=4 << 20)
    letters = {id_: 50.0 for text, id_ in byte_level_tokenizer().get_vocab().items() if re.fullmatch("[a-z]+", text)}
    engine.add_request(bound("hostile", "lark", HOSTILE, max_tokens=900, logit_bias=letters))
    engine.add_request(free("free"))
    outputs: list[SequenceOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    [refusal] = [output for output in outputs if isinstance(output, Refusal)]
    assert (refusal.request_id, refusal.param, refusal.is_too_complex) == ("hostile", "guided_grammar", True)
    assert "too complex" in str(refusal.error)
    assert sum(len(output.token_ids) for output in outputs if output.request_id == "free") == 40


def test_a_mask_that_takes_too_long_ends_the_answer() -> None:
    matcher = matcher_of(Clock(MASK_LIMIT_S * 0.9, MASK_LIMIT_S * 1.1))
    matcher.make_mask()
    before = matcher.too_complex
    assert before is None
    matcher.make_mask()
    assert matcher.too_complex is not None
    assert matcher.too_complex.field == "guided_regex"


def test_repeatedly_slow_masks_end_the_answer() -> None:
    cost_s = MASK_LIMIT_S / 2
    within = int(MASKS_ALLOWANCE_S / (cost_s - MASKS_PER_TOKEN_S))
    matcher = matcher_of(Clock(*[cost_s] * (within + 1)))
    for _ in range(within):
        matcher.make_mask()
        assert matcher.too_complex is None
    matcher.make_mask()
    assert matcher.too_complex is not None


def test_masks_within_their_budget_never_end_the_answer() -> None:
    matcher = matcher_of(Clock(*[MASKS_PER_TOKEN_S] * 5000))
    for _ in range(5000):
        matcher.make_mask()
    assert matcher.too_complex is None


def test_tokens_that_take_too_long_end_the_answer() -> None:
    token_id = byte_level_tokenizer()("a", add_special_tokens=False)["input_ids"][0]
    matcher = matcher_of(Clock(TOKENS_ALLOWANCE_S, TOKENS_ALLOWANCE_S))
    matcher.consume(token_id)
    with pytest.raises(GrammarTooComplex):
        matcher.consume(token_id)


# --- the batch does not wait ------------------------------------------------------------------------------------------


class Gate:
    """Holds back the masks of one grammar until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
        self.opened = threading.Event()
        make_mask = Matcher.make_mask

        def make_later(matcher: Matcher) -> None:
            if matcher._field == field:
                assert self.opened.wait(60)
            make_mask(matcher)

        monkeypatch.setattr(Matcher, "make_mask", make_later)


def test_the_batch_continues_while_a_mask_is_computed(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = run(make_engine(model), bound("slow", "regex", "[ab]{9}"))
    gate = Gate(monkeypatch, "guided_grammar")
    engine = make_engine(model)
    for request in (bound("slow", "regex", "[ab]{9}"), free("free")):
        engine.add_request(request)
    answers: dict[tuple[str, int], Answer] = {("slow", 0): Answer(), ("free", 0): Answer()}
    while answers["free", 0].finish_reason is None:
        collect(answers, engine.step())
    assert answers["slow", 0].token_ids == []
    gate.opened.set()
    assert drain(engine, answers)["slow", 0] == undisturbed["slow", 0]


def test_no_mask_waits_for_a_known_slow_grammar(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "guided_grammar")
    started = Matcher.__init__

    def start_slow(matcher: Matcher, *args: Any, **more: Any) -> None:
        started(matcher, *args, **more)
        matcher.family.is_slow = matcher._field == "guided_grammar"

    monkeypatch.setattr(Matcher, "__init__", start_slow)
    engine = make_engine(model)
    engine.add_request(bound("slow", "regex", "[ab]{9}"))
    quick = SamplingParams(max_tokens=50, grammar=Grammar("regex", "[cd]{9}", "guided_regex"))
    engine.add_request(GenerationRequest("quick", PROMPT, quick))
    answers: dict[tuple[str, int], Answer] = {("slow", 0): Answer(), ("quick", 0): Answer()}
    while answers["quick", 0].finish_reason is None:
        collect(answers, engine.step())
    assert re.fullmatch("[cd]{9}", answers["quick", 0].text)
    engine.abort("slow")
    assert drain(engine, answers)["slow", 0].finish_reason == "cancelled"
    gate.opened.set()


def test_no_token_is_consumed_while_a_slow_mask_of_the_same_grammar_is_computed(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both need llguidance's lock: with one more request of the same grammar, the batch would wait after all."""
    requests = [bound(f"r{number}", "regex", "[ab]{9}", seed=number) for number in range(3)]
    undisturbed = run(make_engine(model), *requests)
    make_mask, consume = Matcher.make_mask, Matcher.consume
    held = threading.Event()
    opened = threading.Event()
    made = 0

    def make_slowly(matcher: Matcher) -> None:
        nonlocal made
        if made == 4:  # each has had its first token
            held.set()
            assert opened.wait(60)
        made += 1
        make_mask(matcher)
        matcher.family.is_slow = True

    def take(matcher: Matcher, token_id: int) -> None:
        assert opened.is_set() or not held.is_set()
        consume(matcher, token_id)

    monkeypatch.setattr(Matcher, "make_mask", make_slowly)
    monkeypatch.setattr(Matcher, "consume", take)
    engine = make_engine(model)
    for request in requests:
        engine.add_request(request)
    answers = {(name, 0): Answer() for name in ("r0", "r1", "r2", "free", "late")}
    while not held.is_set():
        collect(answers, engine.step())
    engine.add_request(free("free"))
    engine.add_request(bound("late", "regex", "[ab]{9}"))
    while answers["free", 0].finish_reason is None:
        collect(answers, engine.step())
    assert not opened.is_set()
    opened.set()
    drain(engine, answers)
    assert {id_: answers[id_] for id_ in undisturbed} == undisturbed
    assert re.fullmatch("[ab]{9}", answers["late", 0].text)


def test_late_masks_change_no_answer(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if memory is short, so that a sequence is preempted while its mask is computed."""
    requests = [bound(f"r{number}", "regex", "[ab]{30}", seed=number, n=2) for number in range(3)]
    undisturbed = run(make_engine(model), *requests, free("free"))
    looks: dict[Matcher, int] = {}

    def is_ready(matcher: Matcher) -> bool:
        looks[matcher] = looks.get(matcher, 0) + 1
        return looks[matcher] % 4 == 0 and (matcher.making is None or matcher.making.done())

    monkeypatch.setattr(Matcher, "is_ready", property(is_ready))
    engine = make_engine(model, kv_bytes=2048 * 30, lookahead_tokens=0)
    assert run(engine, *requests, free("free")) == undisturbed
    assert engine.counters.preemptions > 0


# --- compiling --------------------------------------------------------------------------------------------------------


def test_a_grammar_that_would_take_minutes_to_compile_is_refused() -> None:
    tokenizer = byte_level_tokenizer()
    compiler = GrammarCompiler(tokenizer, len(tokenizer), (EOS_ID,), compile_cpu_s=0.3)
    with pytest.raises(GrammarTooComplex, match="too long") as refused:
        compiler.compile(Grammar("json_schema", ENDLESS)).matcher()
    assert refused.value.field == "response_format"
    assert not compiler.compile(Grammar("json_schema", '{"type": "object"}')).matcher().is_complete


def test_grammar_errors_are_found_before_the_unlimited_compilation() -> None:
    """Otherwise an error missed by the check would take minutes: the check knows all added tokens and all ids."""
    tokenizer = byte_level_tokenizer()
    check = GrammarCheck(tokenizer.backend_tokenizer.to_str(), len(tokenizer), (EOS_ID,), cpu_s=10.0)
    for good in ('start: "a" </s>', f"start: <[{len(tokenizer) - 1}]>", 'start: "größe"'):
        assert check.find_error(json.dumps({"grammars": [{"lark_grammar": good}]})) == "", good
    for bad in ("start: <nothing>", f"start: <[{len(tokenizer)}]>", "start: nothing"):
        assert check.find_error(json.dumps({"grammars": [{"lark_grammar": bad}]})), bad


def test_too_much_memory_ends_only_that_check(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level_tokenizer()
    check = GrammarCheck(tokenizer.backend_tokenizer.to_str(), len(tokenizer), (EOS_ID,), cpu_s=10.0)
    check.find_error('{"grammars": [{"lark_grammar": "start: x"}]}')
    child = check._idle.get_nowait()
    child._process.kill()
    check._idle.put(child)
    with pytest.raises(TooExpensive, match="memory"):
        check.find_error('{"grammars": [{"lark_grammar": "start: x"}]}')
    assert check.find_error('{"grammars": [{"lark_grammar": "start: \\"x\\""}]}') == ""


def test_an_invalid_grammar_is_not_reported_as_complex() -> None:
    tokenizer = byte_level_tokenizer()
    with pytest.raises(RequestRejected, match="unclosed") as refused:
        GrammarCompiler(tokenizer, len(tokenizer), (EOS_ID,)).compile(Grammar("regex", "(")).matcher()
    assert not isinstance(refused.value, GrammarTooComplex)


def test_an_ordinary_mask_is_not_slow() -> None:
    matcher = matcher_of(Clock(SLOW_MASK_S * 0.5, SLOW_MASK_S * 2))
    matcher.make_mask()
    assert not matcher.family.is_slow
    matcher.make_mask()
    assert matcher.family.is_slow
