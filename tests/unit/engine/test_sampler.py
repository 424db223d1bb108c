"""Sampling, with transformers' warpers and processors as the oracle for draws, and arithmetic for the rest."""

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine import SamplingParams
from engine.sampler import Sample, SamplingRow, sample, uniform
from engine.scheduler import Sequence

VOCAB = 2000  # more than the tokens that top_p sorts at first
PROMPT = [5, 9, 9]


def row(output: tuple[int, ...] = (), index: int = 0, **params: Any) -> SamplingRow:
    sequence = Sequence([*PROMPT, *output], prompt_tokens=len(PROMPT), max_total_tokens=1000)
    return SamplingRow(SamplingParams(**params), index, sequence, frozenset({1}), VOCAB)


def logits_of(rows: int, *, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * spread


def draws(logits: torch.Tensor, count: int, **params: Any) -> list[int]:
    rows = [row(seed=number, **params) for number in range(count)]
    return [int(one.token_id or 0) for one in sample(logits.expand(count, -1).clone(), rows)]


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.3}, [TopPLogitsWarper(0.3)]),
        ({"top_p": 0.98}, [TopPLogitsWarper(0.98)]),  # needs more than the first candidates
        ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        (
            {"temperature": 0.5, "top_k": 9, "top_p": 0.8},
            [TemperatureLogitsWarper(0.5), TopKLogitsWarper(9), TopPLogitsWarper(0.8)],
        ),
    ],
)
def test_truncated_draws_follow_the_distribution(params: dict[str, Any], warpers: list[LogitsProcessor]) -> None:
    logits = logits_of(1)
    expected = logits.clone()
    for warper in warpers:
        expected = warper(torch.tensor([PROMPT]), expected)
    probabilities = torch.softmax(expected[0], dim=-1)
    count = 4000
    drawn = torch.bincount(torch.tensor(draws(logits, count, **params)), minlength=VOCAB)
    assert not drawn[probabilities == 0].any(), "a truncated token was drawn"
    deviation = (drawn / count - probabilities).abs()
    assert (deviation < 5 * torch.sqrt(probabilities * (1 - probabilities) / count) + 1e-3).all()


def test_rows_with_different_parameters_do_not_mix() -> None:
    logits = logits_of(5, spread=0.5)
    kinds: list[dict[str, Any]] = [
        {"top_p": 0.99, "seed": 1},
        {"temperature": 0.0},
        {"top_k": 1, "seed": 2},
        {"temperature": 2.0, "seed": 3},
        {"top_p": 0.1, "min_p": 0.5, "top_k": 50, "seed": 4},
    ]
    together = [one.token_id for one in sample(logits.clone(), [row(**kind) for kind in kinds])]
    alone = [sample(logits[i : i + 1].clone(), [row(**kind)])[0].token_id for i, kind in enumerate(kinds)]
    assert together == alone
    assert together[1] == int(logits[1].argmax())
    assert together[2] == int(logits[2].argmax())


def processed(logits: torch.Tensor, output: tuple[int, ...], **params: Any) -> torch.Tensor:
    changed = logits[0].clone()
    row(output, **params).process(changed)
    return changed


def test_penalties_and_bias() -> None:
    logits = logits_of(1)
    repetition = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*PROMPT, 7, 7, 8]]), logits.clone())[0]
    assert torch.allclose(processed(logits, (7, 7, 8), repetition_penalty=1.7), repetition)
    change = processed(logits, (7, 7, 8), frequency_penalty=0.5, presence_penalty=0.25) - logits[0]
    assert change[7].item() == pytest.approx(-1.25, abs=1e-5)
    assert change[8].item() == pytest.approx(-0.75, abs=1e-5)
    assert change.count_nonzero() == 2, "the prompt is not penalised"
    assert draws(logits, 20, logit_bias={11: 100.0}) == [11] * 20


def test_penalties_count_sampled_tokens() -> None:
    one = row(temperature=0.0, presence_penalty=1.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4] = 5.0, 4.5
    assert [sample(logits.clone(), [one])[0].token_id for _ in range(3)] == [3, 4, 3]


def test_min_tokens_bans_every_stop_token() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = 50.0
    assert sample(logits.clone(), [row(temperature=0.0, min_tokens=2)])[0].token_id != 1
    assert sample(logits.clone(), [row((8, 8), temperature=0.0, min_tokens=2)])[0].token_id == 1


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = logits_of(2)
    expected = torch.log_softmax(logits, dim=-1)
    biased = row(temperature=0.3, logit_bias={11: 100.0}, top_k=2, logprobs=3)
    [first, second] = sample(logits.clone(), [biased, row(temperature=0.0, logprobs=0)])
    assert first.token_id == 11
    assert first.logprobs is not None
    assert first.logprobs.logprob == pytest.approx(expected[0, 11].item(), abs=1e-5)
    assert [token_id for token_id, _ in first.logprobs.top] == expected[0].topk(3).indices.tolist()
    assert second.logprobs is not None
    assert second.logprobs.top == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = logits_of(3)
    logits[1, 40] = bad
    rows = [row(seed=1), row(seed=1, logprobs=1), row(temperature=0.0)]
    good = logits_of(3)
    samples = sample(logits, rows)
    assert samples[1].token_id is None
    assert samples[0] == sample(good[:1], [row(seed=1)])[0]
    assert samples[2] == Sample(int(good[2].argmax()), None)


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = logits_of(1, spread=50.0)
    assert set(draws(logits, 10, temperature=1e-30)) == {int(logits.argmax())}


def test_uniform_numbers_are_keyed_and_uniform() -> None:
    numbers = torch.tensor([uniform(7, 0, position) for position in range(5000)], dtype=torch.float64)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert torch.histc(numbers, bins=10, min=0, max=1).sub(500).abs().max() < 100
    keys = {uniform(seed, index, position) for seed in range(-5, 5) for index in range(10) for position in range(10)}
    assert len(keys) == 1000
    assert uniform(7, 0, 3) == uniform(7, 0, 3)
