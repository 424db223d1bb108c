"""With every feature on and very little memory, every answer still equals transformers' `generate`.

Prefix cache, chunked prompts, preemption and drafts at once, while requests arrive and are canceled at random. After
every step the engine's invariants must hold.
"""

import random
from collections import defaultdict
from typing import Any, Final

import pytest
from msgspec.structs import replace
from transformers import PreTrainedModel

from engine import GenerationRequest, LLMEngine, SamplingParams
from engine.choice import NgramDrafts
from tests.conformance.engine.test_families import FAMILIES
from tests.unit.engine.invariants import check_engine
from tests.unit.engine.tiny_models import (
    VOCAB_SIZE,
    Answer,
    Answers,
    collect,
    greedy_reference,
    make_engine,
    make_model,
    run,
)

Expected = dict[tuple[str, int], list[int]]  # tokens by request and choice

REQUESTS: Final = 13
LONGEST: Final = 40  # tokens of an answer
BLOCKS: Final = 31  # of 4 tokens: one request needs up to 28
STORM: Final[dict[str, Any]] = {
    "kv_bytes": BLOCKS * 2048,
    "lookahead_tokens": 0,
    "max_batched_tokens": 12,
    "max_sequences": 6,
}


def requests_of(source: random.Random) -> list[GenerationRequest]:
    """Return prompts of three kinds, most with a common prefix; greedy ones and seeded ones."""
    shared = [source.randrange(20, 40) for _ in range(60)]
    requests = []
    for number in range(REQUESTS):
        prompt = shared[: source.choice([0, 22, 60])] + source.choices(range(20, VOCAB_SIZE), k=source.randint(1, 12))
        params = SamplingParams(temperature=0.0, max_tokens=source.randint(LONGEST // 2, LONGEST))
        if number % 4 == 3:
            params = replace(params, temperature=0.4, seed=number, n=2, top_p=0.95)
        requests.append(GenerationRequest(f"r{number}", prompt, params))
    return requests


def expected_of(
    model: PreTrainedModel, plain: LLMEngine, request: GenerationRequest
) -> dict[tuple[str, int], list[int]]:
    """Return the output of `generate`; for a seeded request, of an engine that runs one request at a time."""
    if request.sampling.temperature == 0:
        reference = greedy_reference(model, list(request.prompt_ids), request.sampling.max_tokens)
        return {(request.request_id, 0): reference}
    return {name: answer.token_ids for name, answer in run(plain, request).items()}


class HalfRightDrafts(NgramDrafts):
    """Drafts that are right about half of the time, for any model."""

    continuations: dict[tuple[int, ...], list[int]]  # prompt and answer so far → what follows
    source: random.Random

    def guess(self, max_tokens: int) -> list[int]:
        right = self.continuations.get(tuple(self._token_ids), [])[: min(self._max_tokens, max_tokens)]
        wrong = self.source.randrange(len(right) + 1)
        return [*right[:wrong], *(token_id ^ 1 for token_id in right[wrong:])]


def guess_half_right(requests: list[GenerationRequest], expected: Expected, source: random.Random) -> None:
    HalfRightDrafts.source = source
    HalfRightDrafts.continuations = {
        (*one.prompt_ids, *ids[:position]): ids[position:]
        for one in requests
        for (name, _), ids in expected.items()
        for position in range(len(ids))
        if name == one.request_id
    }


@pytest.mark.parametrize(
    ("family", "seed", "draft_tokens"),
    [
        *(("llama", 0, 4), ("llama", 2, 0), ("qwen2", 0, 4)),
        *(("gemma2", 1, 4), ("gemma3", 0, 4), ("gpt_oss_sinks", 1, 4)),
    ],
)
def test_in_a_storm_every_answer_equals_generate(
    family: str, seed: int, draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(f"{family} {seed}")
    model = make_model(FAMILIES[family])
    requests = requests_of(source)
    plain = make_engine(model, prefix_cache=False, max_batched_tokens=200)
    expected = {name: ids for one in requests for name, ids in expected_of(model, plain, one).items()}
    guess_half_right(requests, expected, source)
    monkeypatch.setattr("engine.choice.NgramDrafts", HalfRightDrafts)
    engine = make_engine(model, **STORM, draft_tokens=draft_tokens)
    answers: Answers = defaultdict(Answer)
    coming, cancelled = list(requests), 0
    while coming or engine.has_unfinished():
        if coming and source.random() < 0.8:
            engine.add_request(coming.pop(0))
        if engine._choices and cancelled < 3 and source.random() < 0.03:
            engine.abort(source.choice(list(engine._choices)))
            cancelled += 1
        collect(answers, engine.step())
        check_engine(engine)
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        assert answer.token_ids == expected[name][: len(answer.token_ids)]
        assert answer.finish_reason == "cancelled" or answer.token_ids == expected[name]
    counters = engine.counters
    assert min(counters.preemptions, counters.cached_tokens) > 0, "it was no storm"
    assert (0 < counters.right_tokens < counters.guessed_tokens) == (draft_tokens > 0)
    assert engine._block_pool.used_blocks == 0
