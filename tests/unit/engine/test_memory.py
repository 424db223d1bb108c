"""Caching, sharing, preemption and fragmentation of blocks change no answer."""

import random
import resource
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, PreTrainedModel

from engine import EngineError, GenerationRequest, RequestRejected, SamplingParams, SequenceOutput
from engine.attention.attention import KVPool
from engine.types import ResumePoint
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

SHARED = tuple(random.Random(1).randrange(20, VOCAB_SIZE) for _ in range(90))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


def request(name: str, prompt: tuple[int, ...], **params: Any) -> GenerationRequest:
    return GenerationRequest(
        name, prompt, SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "temperature": 0.0} | params)
    )


def sharing(count: int, **params: Any) -> list[GenerationRequest]:
    """Return requests whose prompts share a prefix."""
    return [request(f"r{number}", (*SHARED, 20 + number, 30 + number), **params) for number in range(count)]


def tokens_of(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {name: answer.token_ids for name, answer in answers.items()}


def alone(model: PreTrainedModel, requests: list[GenerationRequest]) -> dict[tuple[str, int], list[int]]:
    """Return the output of each request alone, in an engine without a cache."""
    found: dict[tuple[str, int], list[int]] = {}
    engine = make_engine(model, prefix_cache=False, max_batched_tokens=200)
    for one in requests:
        found |= tokens_of(run(engine, one))
    return found


SLIDING: dict[str, Any] = SHAPE | {"sliding_window": 48, "head_dim": 16}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE),
        Gemma2Config(**SLIDING, query_pre_attn_scalar=16, attn_logit_softcapping=20.0),  # windows and softcaps
        GptOssConfig(**SLIDING, num_local_experts=2, num_experts_per_tok=1),  # sinks
    ],
    ids=["llama", "gemma2", "gpt-oss"],
)
def test_a_shared_prefix_changes_no_answer(config: Any) -> None:
    model = make_model(config)
    requests = sharing(5)
    expected = alone(model, requests)
    engine = make_engine(model)
    assert tokens_of(run(engine, *requests)) == expected
    assert tokens_of(run(engine, *requests)) == expected, "with everything cached"


def test_cached_tokens_are_reported(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    first, second = sharing(2)
    engine.add_request(first)
    assert {output.cached_tokens for output in engine.step()} <= {0}
    drain(engine)
    engine.add_request(second)
    found = [output.cached_tokens for output in engine.step()]
    assert found == [len(SHARED) // 4 * 4], "its whole blocks"
    drain(engine)


def test_only_requests_of_the_same_salt_share_a_prompt(model: PreTrainedModel) -> None:
    """Otherwise the count of cached tokens would tell a tenant, block by block, which prompts another one sent."""
    engine = make_engine(model)
    [one] = sharing(1)
    whole = len(SHARED) // 4 * 4

    def cached(cache_salt: str) -> int:
        output = run(engine, replace(one, cache_salt=cache_salt))["r0", 0]
        assert output.token_ids == expected
        return min(output.cached_tokens, whole)

    expected = tokens_of(run(make_engine(model, prefix_cache=False), one))["r0", 0]
    assert [cached(salt) for salt in ("theirs", "ours", "", "ours", "theirs", "")] == [0, 0, 0, whole, whole, whole]


def test_a_salted_choice_resumes_on_another_worker(model: PreTrainedModel) -> None:
    [one] = sharing(1)
    whole = tokens_of(run(make_engine(model), one))["r0", 0]
    for salt in ("ours", "another"):
        resumed = replace(one, cache_salt=salt, resume=(ResumePoint(0, tuple(whole[:5]), 0),))
        assert tokens_of(run(make_engine(model), resumed))["r0", 0] == whole[5:]


def test_choices_share_their_prompt(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    params: dict[str, Any] = {"n": 4, "temperature": 1.3, "seed": 5}
    [one] = sharing(1, **params)
    expected = tokens_of(run(make_engine(model, prefix_cache=False), one))
    engine.add_request(one)
    steps = 0
    while not engine.step() and engine.has_unfinished():
        steps += 1
    assert steps == len(one.prompt_ids) // 24, "the prompt was computed once, in chunks"
    rest = drain(engine)
    assert all(expected[name][1:] == ids or expected[name] == ids for name, ids in tokens_of(rest).items())


def test_a_resumed_choice_finds_its_own_tokens(model: PreTrainedModel) -> None:
    """A request returns to the worker that had it: its computed blocks are still cached."""
    engine = make_engine(model)
    [one] = sharing(1)
    whole = tokens_of(run(engine, one))["r0", 0]
    longer = request("again", (*one.prompt_ids, *whole[:11]))
    engine.add_request(longer)
    [output] = engine.step()
    assert output.token_ids == [whole[11]]
    assert output.cached_tokens == (len(one.prompt_ids) + 11 - 1) // 4 * 4
    drain(engine)


def test_blocks_that_are_not_finite_are_never_reused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    first, second = sharing(2)
    forward = engine._runner.forward
    monkeypatch.setattr(engine._runner, "forward", lambda chunks: torch.full_like(forward(chunks), float("nan")))
    assert run(engine, first)["r0", 0].finish_reason == "error"
    monkeypatch.undo()
    engine.add_request(second)
    outputs: list[SequenceOutput] = []
    while not outputs:
        outputs = engine.step()
    assert outputs[0].cached_tokens == 0
    drain(engine)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_sleeping_engine_releases_memory_and_answers_as_before_after_waking(model: PreTrainedModel) -> None:
    run(make_engine(model), *sharing(1))  # loads what the process has not loaded yet
    fresh = resident_bytes()
    pool_bytes = 100 << 20
    engine = make_engine(model, kv_bytes=pool_bytes, max_sequences=1000, max_batched_tokens=1000)
    assert resident_bytes() < fresh + pool_bytes // 2, "what was never written is committed"
    expected = run(engine, *sharing(3))
    pool = engine._runner._pool
    assert isinstance(pool, KVPool)
    for layer in pool._layers:  # as after many long requests
        for tensor in pool._layers[layer]:
            tensor.fill_(1.0)
    del tensor
    full = resident_bytes()
    engine.sleep()
    sleeps = engine.is_sleeping
    assert sleeps
    assert resident_bytes() < full - 0.9 * pool_bytes
    with pytest.raises(RequestRejected):
        engine.add_request(request("bad", ()))
    still_sleeps = engine.is_sleeping
    assert still_sleeps, "it woke up without a request"
    [first, *others] = sharing(3)
    engine.add_request(first)
    assert not engine.is_sleeping
    with pytest.raises(EngineError):
        engine.sleep()
    outputs: list[SequenceOutput] = []
    while not outputs:
        outputs = engine.step()
    assert outputs[0].cached_tokens == 0, "the prefix cache went with the memory"
    answers: Answers = defaultdict(Answer)
    collect(answers, outputs)
    assert drain(engine, answers) | run(engine, *others) == expected


def test_warming_up_leaves_nothing_behind(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    before = engine.load(), engine.stats()
    engine.warm_up()
    assert (engine.load(), engine.stats()) == before
    engine.add_request(request("r", tuple(range(20))))  # shares a prefix with the warm-up
    [output] = engine.step()
    assert output.cached_tokens == 0
    drain(engine)


@pytest.mark.parametrize("config", [{"max_model_len": 3}, {"max_model_len": 4}, {"max_waiting": 1, "max_sequences": 1}])
def test_an_engine_of_any_size_warms_up(model: PreTrainedModel, config: dict[str, Any]) -> None:
    make_engine(model, **config).warm_up()
