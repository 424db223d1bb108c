"""Logprobs of the prompt's own tokens, compared with transformers' logits."""

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, PreTrainedModel

from engine import GenerationRequest, LLMEngine, PromptLogprob, RequestRejected, ResumePoint, SamplingParams
from engine.sampler import NOT_FINITE
from tests.unit.engine.tiny_models import (
    SHAPE,
    VOCAB_SIZE,
    Answer,
    Answers,
    collect,
    drain,
    llama,
    make_engine,
    make_model,
    run,
)

TOLERANCE = 1e-3
_random = random.Random(7)
LONG = tuple(_random.randrange(20, VOCAB_SIZE) for _ in range(100))  # a little more than four steps of 24 tokens
OTHERS = [tuple(_random.randrange(20, VOCAB_SIZE) for _ in range(length)) for length in (1, 2, 23, 24, 25, 60)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


def request(name: str = "r", prompt: tuple[int, ...] = LONG, **params: Any) -> GenerationRequest:
    params = {"max_tokens": 3, "ignore_eos": True, "temperature": 0.0, "prompt_logprobs": 3} | params
    return GenerationRequest(name, prompt, SamplingParams(**params))


@torch.inference_mode()
def expect_scores(model: PreTrainedModel, prompt: tuple[int, ...], scores: list[PromptLogprob], top: int = 3) -> None:
    assert [score.token_id for score in scores] == list(prompt)
    assert (scores[0].logprob, scores[0].rank, scores[0].top) == (None, None, ())
    if len(prompt) == 1:
        return
    logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1].float(), dim=-1)
    own = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])
    got = torch.tensor([score.logprob for score in scores[1:]])
    torch.testing.assert_close(got, own[:, 0], atol=TOLERANCE, rtol=1e-4)
    ranks = torch.tensor([score.rank for score in scores[1:]])
    assert bool((ranks > (logprobs > own + TOLERANCE).sum(dim=-1)).all()), "near ties may be either way round"
    assert bool((ranks <= 1 + (logprobs > own - TOLERANCE).sum(dim=-1)).all())
    if top:
        best = torch.tensor([[entry[2] for entry in score.top] for score in scores[1:]])
        torch.testing.assert_close(best, logprobs.topk(top).values, atol=TOLERANCE, rtol=1e-4)
        ids = torch.tensor([[entry[0] for entry in score.top] for score in scores[1:]])
        torch.testing.assert_close(best, logprobs.gather(1, ids), atol=TOLERANCE, rtol=1e-4)


def test_prompt_logprobs_of_prompts_longer_than_a_step(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    answers = run(engine, *(request(str(number), prompt) for number, prompt in enumerate([*OTHERS, LONG])))
    plain = run(make_engine(model), request("0", LONG, prompt_logprobs=None))["0", 0]
    for number, prompt in enumerate([*OTHERS, LONG]):
        expect_scores(model, prompt, answers[str(number), 0].prompt_logprobs)
    assert answers[str(len(OTHERS)), 0].token_ids == plain.token_ids
    assert plain.prompt_logprobs == []


def test_prompt_logprobs_of_a_model_that_scales_its_logits() -> None:
    config = Gemma2Config(
        **SHAPE, sliding_window=48, head_dim=16, query_pre_attn_scalar=16, final_logit_softcapping=2.0
    )
    model = make_model(config)
    expect_scores(model, LONG, run(make_engine(model), request())["r", 0].prompt_logprobs)


@pytest.mark.parametrize("rows", [1, 7])
def test_little_memory_for_logits_does_not_delay_other_requests(model: PreTrainedModel, rows: int) -> None:
    engine = make_engine(model, prompt_logits_bytes=rows * 4 * VOCAB_SIZE)
    engine.add_request(request("scored"))
    engine.add_request(request("mate", OTHERS[-1], prompt_logprobs=None, max_tokens=2))
    answers: Answers = defaultdict(Answer)
    while answers["mate", 0].finish_reason is None:
        collect(answers, engine.step())
    assert answers["scored", 0].finish_reason is None
    drain(engine, answers)
    expect_scores(model, LONG, answers["scored", 0].prompt_logprobs)


def test_a_cached_prompt_is_computed_again(model: PreTrainedModel) -> None:
    # Regression: vLLM 42245: with a cached prefix, rows never computed returned the buffer's old contents.
    engine = make_engine(model)
    run(engine, request("fills", prompt_logprobs=None), request("too", OTHERS[-1]))
    for again in range(2):
        answer = run(engine, request(str(again)))[str(again), 0]
        expect_scores(model, LONG, answer.prompt_logprobs)
        assert answer.cached_tokens == 0
    assert run(engine, request("plain", prompt_logprobs=None))["plain", 0].cached_tokens > 0, "its writes are found"


def test_prompt_logprobs_across_a_preemption(model: PreTrainedModel) -> None:
    """Logprobs sent before a preemption are not sent again."""
    kv_bytes = 49 * 4 * 512  # 196 tokens, while the first needs 173 and the second 103
    engine = make_engine(model, kv_bytes=kv_bytes, prompt_logits_bytes=4 * VOCAB_SIZE, max_sequences=4)
    requests = [request("old", OTHERS[2], max_tokens=150), request("new")]
    for one in requests:
        engine.add_request(one)
    answers: Answers = defaultdict(Answer)
    while not engine.counters.preemptions:
        collect(answers, engine.step())
    assert 0 < len(answers["new", 0].prompt_logprobs) < len(LONG)
    drain(engine, answers)
    for one in requests:
        expect_scores(model, tuple(one.prompt_ids), answers[one.request_id, 0].prompt_logprobs)
        alone = run(make_engine(model), one)[one.request_id, 0]
        assert answers[one.request_id, 0].token_ids == alone.token_ids


@pytest.mark.parametrize("held", [0, 1, 2, 23, 24, 25, 99, 100])
def test_a_resumed_request_sends_only_the_rest(model: PreTrainedModel, held: int) -> None:
    engine = make_engine(model)
    whole = run(engine, request("whole"))["whole", 0].prompt_logprobs
    rest = run(engine, replace(request("rest"), scored_tokens=held))["rest", 0]
    expect_scores(model, LONG, whole[:held] + rest.prompt_logprobs)
    point = ResumePoint(0, tuple(rest.token_ids[:1]), 0)
    later = run(engine, replace(request("later"), scored_tokens=len(LONG), resume=(point,)))["later", 0]
    assert later.prompt_logprobs == []
    assert rest.token_ids[:1] + later.token_ids == rest.token_ids


def test_seeds_and_choices(model: PreTrainedModel) -> None:
    params: dict[str, Any] = {"n": 3, "temperature": 1.5, "seed": 4}
    scored = run(make_engine(model), request(**params))
    plain = run(make_engine(model), request(**params, prompt_logprobs=None))
    assert [scored["r", i].token_ids for i in range(3)] == [plain["r", i].token_ids for i in range(3)]
    expect_scores(model, LONG, scored["r", 0].prompt_logprobs)
    assert not scored["r", 1].prompt_logprobs, "once per request"


@pytest.mark.parametrize("prompt", [LONG, *OTHERS], ids=len)
def test_scoring_alone_makes_no_token(model: PreTrainedModel, prompt: tuple[int, ...]) -> None:
    engine = make_engine(model, draft_tokens=3)
    answer = run(engine, request(prompt=prompt, max_tokens=0, prompt_logprobs=0))["r", 0]
    assert (answer.token_ids, answer.text, answer.finish_reason) == ([], "", "length")
    expect_scores(model, prompt, answer.prompt_logprobs, top=0)
    assert engine.counters.computed_tokens == len(prompt)


def test_prompt_logprobs_canceled_midway(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    answers: Answers = defaultdict(Answer)
    engine.add_request(request())
    collect(answers, engine.step())
    engine.abort("r")
    drain(engine, answers)
    assert answers["r", 0].finish_reason == "cancelled"
    assert len(answers["r", 0].prompt_logprobs) == 25


def test_a_prompt_with_logits_that_are_not_finite_fails_alone(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    embedding: Any = engine._runner._model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight[LONG[50]] = float("nan")
    answers = run(engine, request("bad"), request("good", OTHERS[2]))
    assert (answers["bad", 0].finish_reason, answers["bad", 0].error) == ("error", NOT_FINITE)
    assert answers["good", 0].finish_reason == "length"
    assert len(answers["bad", 0].prompt_logprobs) <= 51


def test_out_of_range(model: PreTrainedModel) -> None:
    engine: LLMEngine = make_engine(model)
    with pytest.raises(RequestRejected, match="prompt_logprobs"):
        engine.add_request(request(prompt_logprobs=VOCAB_SIZE + 1))
    with pytest.raises(RequestRejected, match="scored_tokens"):
        engine.add_request(replace(request(), scored_tokens=101))
