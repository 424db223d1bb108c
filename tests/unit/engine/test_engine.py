"""The engine's interface: ends, cancellation, seeds, resumption, isolation of failures."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from engine import GenerationRequest, LLMEngine, RequestRejected, ResumePoint, SamplingParams
from engine.attention.attention import KVPool
from tests.unit.engine.tiny_models import (
    EOS_ID,
    VOCAB_SIZE,
    Answer,
    Answers,
    byte_level_tokenizer,
    collect,
    drain,
    llama,
    make_engine,
    run,
)

PROMPT = tuple(byte_level_tokenizer()("hello world", add_special_tokens=False)["input_ids"])
OTHERS = [tuple(range(start, start + 3 + start % 17)) for start in range(20, 90, 10)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture
def engine(model: PreTrainedModel) -> LLMEngine:
    return make_engine(model)


def request(name: str = "r", prompt: tuple[int, ...] = PROMPT, **params: Any) -> GenerationRequest:
    resume = params.pop("resume", ())
    return GenerationRequest(name, prompt, SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | params), resume)


def answer_of(engine: LLMEngine, **params: Any) -> Answer:
    return run(engine, request(**params))["r", 0]


def test_info_and_load(engine: LLMEngine) -> None:
    assert engine.info.max_model_len == 256
    assert engine.info.eos_token_ids == (EOS_ID,)
    assert engine.info.dtype == "float32"
    assert engine.info.kv_tokens == 256 * 8, "no more than the sequences can use"
    empty = engine.load()
    assert (empty.running, empty.waiting, empty.free_sequences) == (0, 0, 8)
    engine.add_request(request(n=9))
    assert engine.load().waiting == 9
    assert engine.load().free_sequences == 0
    engine.step()
    full = engine.load()
    reserved = 9 * -(-(len(PROMPT) + 24) // 4) * 4  # whole blocks
    assert (full.free_kv_tokens, full.running + full.waiting) == (empty.free_kv_tokens - reserved, 9)
    drain(engine)
    assert engine.load() == empty


def test_a_seeded_output_does_not_depend_on_the_batch(model: PreTrainedModel) -> None:
    # Regression: vLLM 51226, where a seed was ignored if another request of the batch had none.
    params: dict[str, Any] = {"seed": 11, "temperature": 1.5, "top_p": 0.9, "presence_penalty": 0.5, "n": 3}
    alone = run(make_engine(model), request(**params))
    assert len({tuple(answer.token_ids) for answer in alone.values()}) == 3, "the choices of one request differ"
    engine = make_engine(model, max_sequences=5)
    mates = [request(f"m{i}", prompt, temperature=2.0) for i, prompt in enumerate(OTHERS)]
    together = run(engine, *mates[:3], request(**params), *mates[3:])
    for index in range(3):
        assert together["r", index] == alone["r", index]
    assert run(engine, request(**params | {"seed": 12}))["r", 0].token_ids != alone["r", 0].token_ids


def test_unseeded_requests_differ(engine: LLMEngine) -> None:
    answers = run(engine, request("a", temperature=2.0), request("b", temperature=2.0))
    assert answers["a", 0].token_ids != answers["b", 0].token_ids


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"seed": 5, "temperature": 1.3, "frequency_penalty": 0.7},
        {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.3},
        {"seed": 2, "temperature": 1.2, "logit_bias": {}, "min_tokens": 9},
        {"temperature": 0.0, "include_stop_str_in_output": True},
    ],
)
def test_a_run_resumed_anywhere_equals_the_undisturbed_one(engine: LLMEngine, params: dict[str, Any]) -> None:
    plain = answer_of(engine, **params)
    params = params | {"stop": (plain.text[-4:-1],)} if "stop" not in params else params
    whole = answer_of(engine, **params)
    assert len(whole.token_ids) > 8
    # The client may have received anything from no text to all text that those tokens had made safe to show.
    places = [
        (position, chars)
        for position in range(len(whole.token_ids) + 1)
        for chars in {0, min(position // 2, len(whole.text))}
    ]
    points = {str(place): ResumePoint(0, tuple(whole.token_ids[: place[0]]), place[1]) for place in places}
    rests = run(engine, *(request(name, **params, resume=(point,)) for name, point in points.items()))
    assert len(rests) == len(places)
    for position, chars in places:
        rest = rests[str((position, chars)), 0]
        assert whole.token_ids[:position] + rest.token_ids == whole.token_ids
        assert whole.text[:chars] + rest.text == whole.text
        assert (rest.finish_reason, rest.stop_reason) == (whole.finish_reason, whole.stop_reason)
        for resumed, original in zip(rest.logprobs, whole.logprobs[position:], strict=False):
            assert resumed.token_id == original.token_id
            assert resumed.logprob == pytest.approx(original.logprob, abs=1e-3)


def test_only_the_named_choice_resumes(engine: LLMEngine) -> None:
    params: dict[str, Any] = {"seed": 5, "temperature": 1.3, "n": 3}
    whole = run(engine, request(**params))
    point = ResumePoint(1, tuple(whole["r", 1].token_ids[:10]), 0)
    resumed = run(engine, request(**params, resume=(point,)))
    assert resumed["r", 0] == whole["r", 0]
    assert resumed["r", 2] == whole["r", 2]
    assert resumed["r", 1].token_ids == whole["r", 1].token_ids[10:]


def test_stop_strings_end_the_text_before_them(engine: LLMEngine) -> None:
    whole = answer_of(engine, temperature=0.0)
    for start, end in ((3, 4), (5, 9), (2, 13)):  # within a token and across several
        stop = whole.text[start:end]
        stopped = answer_of(engine, temperature=0.0, stop=("never", stop))
        assert stopped.text == whole.text[: whole.text.find(stop)]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        # The token that completed the stop counts, and nothing follows it.
        assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
        assert len(stopped.token_ids) < len(whole.token_ids)
    late = answer_of(engine, temperature=0.0, stop=(whole.text[0],), min_tokens=5)
    assert len(late.token_ids) > 5


def test_stop_tokens_count_but_leave_no_text(engine: LLMEngine) -> None:
    whole = answer_of(engine, temperature=0.0)
    stop_id = whole.token_ids[6]
    at = whole.token_ids.index(stop_id)
    stopped = answer_of(engine, temperature=0.0, stop_token_ids=(stop_id,))
    assert stopped.token_ids == whole.token_ids[: at + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop_id)
    assert whole.text.startswith(stopped.text.rstrip("\ufffd"))
    assert len(stopped.text) < len(whole.text)


def test_the_stop_may_be_included_in_the_text(engine: LLMEngine) -> None:
    whole = answer_of(engine, temperature=0.0)
    stop = whole.text[5:9]
    included = answer_of(engine, temperature=0.0, stop=(stop,), include_stop_str_in_output=True)
    assert included.text == whole.text[: whole.text.find(stop) + len(stop)]
    assert (included.finish_reason, included.stop_reason) == ("stop", stop)
    stop_id = whole.token_ids[6]
    by_token = answer_of(engine, temperature=0.0, stop_token_ids=(stop_id,), include_stop_str_in_output=True)
    assert len(by_token.text) > len(answer_of(engine, temperature=0.0, stop_token_ids=(stop_id,)).text)
    assert whole.text.startswith(by_token.text.rstrip("\ufffd"))


def test_the_models_end_token(engine: LLMEngine) -> None:
    to_the_end: dict[str, Any] = {"temperature": 0.0, "logit_bias": {EOS_ID: 1000.0}}
    ended = answer_of(engine, **to_the_end, ignore_eos=False)
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([EOS_ID], "", "stop", None)
    ignored = answer_of(engine, **to_the_end, max_tokens=3)
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS_ID] * 3, "length")
    held_off = answer_of(engine, **to_the_end, ignore_eos=False, min_tokens=4)
    assert held_off.token_ids[4:] == [EOS_ID]
    assert EOS_ID not in held_off.token_ids[:4]


def test_abort_ends_every_choice_once_and_frees_its_blocks(engine: LLMEngine) -> None:
    before = engine.load()
    engine.add_request(request("running", n=2))
    engine.step()
    engine.add_request(request("waiting"))
    engine.abort("running")
    engine.abort("running")
    engine.abort("waiting")
    engine.abort("never heard of")
    assert engine.has_unfinished()
    outputs = engine.step()
    assert [(output.request_id, output.index, output.finish_reason) for output in outputs] == [
        ("running", 0, "cancelled"),
        ("running", 1, "cancelled"),
        ("waiting", 0, "cancelled"),
    ]
    assert not engine.has_unfinished()
    assert engine.load() == before
    assert answer_of(engine, prompt=PROMPT).finish_reason == "length", "its name can be used again"


def test_a_request_whose_logits_are_not_finite_fails_alone(model: PreTrainedModel) -> None:
    # Regression: OpenVINO 4428, mlx-lm 1477, where one bad request ended the batch or the loop.
    poison = 250
    engine = make_engine(model)
    alone = answer_of(engine, temperature=0.0)
    assert poison not in alone.token_ids
    with torch.no_grad():
        embedding: Any = engine._runner._model.get_input_embeddings()
        embedding.weight[poison] = float("nan")
    answers = run(engine, request("bad", (*PROMPT, poison)), request("r", temperature=0.0))
    assert answers["bad", 0].finish_reason == "error"
    assert "not finite" in (answers["bad", 0].error or "")
    assert answers["r", 0] == alone
    assert answer_of(engine, temperature=0.0) == alone, "the blocks it left behind do no harm"


def test_a_request_whose_text_fails_fails_alone(model: PreTrainedModel) -> None:
    class Brittle(PreTrainedTokenizerFast):
        def convert_ids_to_tokens(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
            if ids == [250]:
                raise KeyError("no such token")
            return super().convert_ids_to_tokens(ids, *args, **kwargs)

    tokenizer = Brittle(tokenizer_object=byte_level_tokenizer().backend_tokenizer, eos_token="</s>")
    engine = make_engine(model, tokenizer)
    alone = answer_of(engine, temperature=0.0)
    answers = run(engine, request("bad", logit_bias={250: 1000.0}), request("r", temperature=0.0))
    assert (answers["bad", 0].finish_reason, answers["bad", 0].error) == ("error", "KeyError: 'no such token'")
    assert answers["r", 0] == alone


def test_unwritten_pool_memory_is_never_read(model: PreTrainedModel) -> None:
    # Regression: vLLM 42245, stale values of an uninitialized buffer.
    engine = make_engine(model, max_sequences=4)
    expected = run(engine, *(request(f"{i}", prompt, temperature=0.0) for i, prompt in enumerate(OTHERS)))
    poisoned = make_engine(model, max_sequences=4)
    pool = poisoned._runner._pool
    assert isinstance(pool, KVPool)
    for keys, values in pool._layers.values():
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    assert run(poisoned, *(request(f"{i}", p, temperature=0.0) for i, p in enumerate(OTHERS))) == expected


def test_fragmented_memory_changes_nothing(model: PreTrainedModel) -> None:
    engine = make_engine(model, kv_bytes=40 * 4 * 512, max_model_len=128)  # 40 blocks of 4 tokens
    expected = answer_of(engine, temperature=0.0, max_tokens=60)
    answers: Answers = defaultdict(Answer)
    for number in range(8):  # 8 sequences of 4 blocks each; every other one leaves a hole
        engine.add_request(request(f"{number}", (5, 6, 7, 8), max_tokens=12))
    while engine.load().waiting:
        collect(answers, engine.step())
    for number in range(0, 8, 2):
        engine.abort(f"{number}")
    engine.add_request(request(temperature=0.0, max_tokens=60))
    collect(answers, engine.step())
    assert len(engine._choices["r"][0].sequence.block_runs) > 1
    assert drain(engine, answers)["r", 0] == expected


def test_logprobs_name_the_tokens(engine: LLMEngine) -> None:
    answer = answer_of(engine, temperature=0.0, logprobs=4, max_tokens=5)
    assert [one.token_id for one in answer.logprobs] == answer.token_ids
    for one in answer.logprobs:
        assert one.top[0] == (one.token_id, one.text, one.logprob, one.utf8)
        assert [candidate[2] for candidate in one.top] == sorted((c[2] for c in one.top), reverse=True)
        assert one.text == one.utf8.decode(errors="replace")
    assert answer_of(engine, logprobs=0).logprobs[0].top == ()


OK = request()


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (replace(OK, prompt_ids=()), "prompt_ids"),
        (replace(OK, prompt_ids=(VOCAB_SIZE,)), "prompt_ids"),
        (replace(OK, prompt_ids=(-1,)), "prompt_ids"),
        (request(max_tokens=256), "max_tokens"),
        (request(max_tokens=-1), "max_tokens"),
        (request(temperature=-0.1), "temperature"),
        (request(temperature=float("nan")), "temperature"),
        (request(top_p=-0.1), "top_p"),
        (request(top_k=-1), "top_k"),
        (request(min_p=1.1), "min_p"),
        (request(n=0), "n"),
        (request(n=129), "n"),
        (request(stop=("",)), "stop"),
        (request(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids"),
        (request(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
        (request(logit_bias={5: float("inf")}), "logit_bias"),
        (request(min_tokens=25), "min_tokens"),
        (request(logprobs=-1), "logprobs"),
        (request(repetition_penalty=0.0), "repetition_penalty"),
        (request(resume=(ResumePoint(1, (5,), 0),)), "resume"),
        (request(resume=(ResumePoint(0, (5,), 0), ResumePoint(0, (5,), 0))), "resume"),
        (request(resume=(ResumePoint(0, (5,) * 25, 0),)), "resume"),
        (request(resume=(ResumePoint(0, (VOCAB_SIZE,), 0),)), "resume"),
    ],
)
def test_unservable_requests_are_rejected_by_field(engine: LLMEngine, bad: GenerationRequest, field: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        engine.add_request(bad)
    assert caught.value.field == field
    assert not engine.has_unfinished()


def test_the_pool_and_the_queue_have_limits(model: PreTrainedModel) -> None:
    small = make_engine(model, kv_bytes=10 * 4 * 512, max_waiting=3)
    assert small.info.kv_tokens == 40
    with pytest.raises(RequestRejected, match="KV pool"):
        small.add_request(request(max_tokens=40))
    for number in range(3):
        small.add_request(request(f"{number}"))
    with pytest.raises(RequestRejected, match="waiting"):
        small.add_request(request("3"))
    small.step()
    with pytest.raises(RequestRejected, match="already"):
        small.add_request(request("0"))
