"""Drafts save steps and change no answer."""

import random
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine import GenerationRequest, LLMEngine, ResumePoint, SamplingParams
from engine.choice import PAUSE_TOKENS, NgramDrafts
from tests.unit.engine.tiny_models import VOCAB_SIZE, Answers, llama, make_engine, run

REPEATING = tuple(random.Random(4).choices(range(20, 26), k=60))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


def request(name: str, prompt: tuple[int, ...] = REPEATING, **params: Any) -> GenerationRequest:
    resume = params.pop("resume", ())
    usual: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0}
    return GenerationRequest(name, prompt, SamplingParams(**usual | params), resume)


def assert_same(found: Answers, expected: Answers) -> None:
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        assert (found[name].token_ids, found[name].text) == (answer.token_ids, answer.text)
        assert found[name].finish_reason == answer.finish_reason
        assert found[name].stop_reason == answer.stop_reason
        assert len(found[name].logprobs) == len(answer.logprobs)
        for mine, theirs in zip(found[name].logprobs, answer.logprobs, strict=True):
            assert (mine.token_id, mine.text) == (theirs.token_id, theirs.text)
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"logprobs": 2},
        {"temperature": 0.2, "seed": 5},  # little noise: drafts are sometimes right
        {"temperature": 0.3, "seed": 5, "n": 3, "top_p": 0.9},
        {"frequency_penalty": 0.5},  # not a plain row: no draft
    ],
)
def test_drafts_change_no_answer(model: PreTrainedModel, params: dict[str, Any]) -> None:
    requests = [request(f"r{number}", REPEATING[number:], **params) for number in range(4)]
    expected = run(make_engine(model), *requests)
    guessing = make_engine(model, draft_tokens=5)
    assert_same(run(guessing, *requests), expected)
    assert (guessing.counters.guessed_tokens > 0) == ("frequency_penalty" not in params)


def test_a_repetitive_text_takes_fewer_steps(model: PreTrainedModel) -> None:
    def steps(engine: LLMEngine) -> int:
        engine.add_request(request("r", logit_bias={}, max_tokens=100))
        count = 0
        while engine.has_unfinished():
            engine.step()
            count += 1
        return count

    guessing = make_engine(model, draft_tokens=5)
    assert steps(guessing) == steps(make_engine(model)) - guessing.counters.right_tokens
    assert guessing.counters.right_tokens > 0, "nothing repeated itself"


def test_an_answer_may_end_within_a_draft(model: PreTrainedModel) -> None:
    whole = run(make_engine(model), request("r"))["r", 0]
    for params in ({"stop": (whole.text[40:43],)}, {"stop_token_ids": (whole.token_ids[30],)}, {"max_tokens": 31}):
        expected = run(make_engine(model), request("r", **params))
        guessing = make_engine(model, draft_tokens=7)
        assert_same(run(guessing, request("r", **params)), expected)
        assert guessing._block_pool.used_blocks == 0


def test_drafts_after_a_resume_anywhere(model: PreTrainedModel) -> None:
    whole = run(make_engine(model), request("r"))["r", 0]
    guessing = make_engine(model, draft_tokens=5)
    points = [ResumePoint(0, tuple(whole.token_ids[:position]), 0) for position in range(0, len(whole.token_ids), 7)]
    answers = run(guessing, *(request(str(number), resume=(point,)) for number, point in enumerate(points)))
    assert [answer.text for answer in answers.values()] == [whole.text] * len(points)


def test_drafts_with_little_memory_and_in_a_batch(model: PreTrainedModel) -> None:
    source = random.Random(9)
    requests = [request(f"r{number}", REPEATING[number:], max_tokens=source.randrange(90, 150)) for number in range(8)]
    requests.append(request("long", tuple(source.choices(range(20, VOCAB_SIZE), k=120))))
    expected = run(make_engine(model, prefix_cache=False, max_batched_tokens=200), *requests)
    guessing = make_engine(model, draft_tokens=6, kv_bytes=100 * 2048, lookahead_tokens=4)
    assert_same(run(guessing, *requests), expected)
    assert guessing.counters.preemptions > 0
    assert guessing.counters.right_tokens > 0
    guessing._block_pool.check()
    assert not guessing._scheduler._pending_keys


def test_drafts_repeat_earlier_text_and_pause_after_a_wrong_one() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2, 3]
    drafts = NgramDrafts(tokens, 4)
    assert drafts.guess(9) == [4, 5, 1, 2]
    assert drafts.guess(2) == [4, 5]
    assert drafts.guess(0) == []
    drafts.record_result(4, 1)
    tokens += [4, 5, 9]
    assert drafts.guess(9) == []
    tokens += [1, 2, 3]
    assert drafts.guess(9) == [4, 5, 9, 1], "what followed last"
    drafts.record_result(4, 0)
    tokens += [4, 5, 9]
    assert drafts.guess(9) == []
    tokens += [7] * PAUSE_TOKENS
    assert drafts.guess(9) == [7, 7, 7, 7][: len(drafts.guess(9))]


def test_too_little_text_for_a_draft() -> None:
    for tokens in ([], [1], [1, 2], [1, 2, 3], [1, 1, 1]):
        assert NgramDrafts(tokens, 4).guess(9) == []
