"""Turns logits into tokens: penalties, bias, temperature, truncation, the draw, and logprobs.

Order: logit_bias, penalties, grammar, min_tokens, temperature, min_p, top_k, top_p, draw. Logprobs are of the raw
logits. Every random row is drawn by inverting its cumulative distribution at one uniform number keyed by (seed, choice,
position), so rows do not influence each other.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.grammar import GrammarError, Matcher
from engine.noise import uniform
from engine.scheduler import Sequence
from engine.types import SamplingParams

NOT_FINITE = "the model's logits are not finite"
_TOP_P_CANDIDATES = 256  # tokens sorted at first to find where top_p cuts; the few rows that need more are sorted whole


class SamplingRow:
    """One choice's sampling parameters and state, for its row of the logits."""

    def __init__(
        self,
        params: SamplingParams,
        index: int,
        sequence: Sequence,
        stop_ids: frozenset[int],
        vocab_size: int,
        *,
        matcher: Matcher | None = None,
    ) -> None:
        """`stop_ids` may not be sampled before min_tokens."""
        self.params = params
        self._matcher = matcher
        self.sequence = sequence
        self._seed = random.getrandbits(63) if params.seed is None else params.seed
        self._index = index
        self._min_tokens_banned = sorted(stop_ids) if params.min_tokens else []
        self._bias_ids = torch.tensor(list(params.logit_bias.keys()), dtype=torch.long)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._output_counts: Tensor | None = None
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            self._output_counts = torch.zeros(vocab_size)
            self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
            self._in_prompt[torch.tensor(sequence.token_ids[: sequence.prompt_tokens])] = True
            for token_id in sequence.token_ids[sequence.prompt_tokens :]:
                self._output_counts[token_id] += 1
        self.is_greedy = params.temperature == 0.0
        self.is_plain = not (params.logit_bias or params.min_tokens or self._output_counts is not None or matcher)

    def uniform(self, ahead: int) -> float:
        """Return the uniform number for the next token, or for one so many tokens `ahead` of it."""
        return uniform(self._seed, self._index, self.sequence.output_tokens + ahead)

    def process(self, logits: Tensor) -> None:
        """Apply bias, min_tokens, penalties and grammar to this row's logits [V], in place. Raises GrammarError."""
        params = self.params
        logits[self._bias_ids] += self._bias
        if self._output_counts is not None:
            seen = self._in_prompt | (self._output_counts > 0)
            penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(seen, penalised, logits))
            logits -= params.frequency_penalty * self._output_counts
            logits -= params.presence_penalty * (self._output_counts > 0)
        if self._matcher is not None:
            self._matcher.forbid(logits)
        if self.sequence.output_tokens < params.min_tokens:
            ends = logits[self._min_tokens_banned]
            logits[self._min_tokens_banned] = float("-inf")
            if self._matcher is not None and logits.max() == float("-inf"):  # the grammar lets nothing else follow
                logits[self._min_tokens_banned] = ends

    def record(self, token_id: int) -> None:
        """Count a sampled token."""
        if self._output_counts is not None:
            self._output_counts[token_id] += 1


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """One sampled token under the raw distribution."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), most probable first


@dataclass(frozen=True, slots=True)
class Sample:
    """What was sampled for one row; `token_id` is None where `error` says why there is none."""

    token_id: int | None
    logprobs: RawLogprobs | None
    error: str | None = None


def sample(logits: Tensor, rows: list[SamplingRow], ahead: list[int] | None = None) -> list[Sample]:
    """Choose one token per row of float32 logits [R, V].

    `ahead` says for each row how many tokens it is ahead of its sequence: more than 0 for what follows a guess.
    """
    ahead = ahead or [0] * len(rows)
    largest, greedy = logits.max(dim=-1)
    is_finite = torch.isfinite(largest).tolist()  # NaN and +inf surface as the largest; so does a row of only -inf
    tokens: list[int] = greedy.tolist()
    errors = {i: NOT_FINITE for i, is_fine in enumerate(is_finite) if not is_fine}
    chosen = [i for i, row in enumerate(rows) if is_finite[i] and not (row.is_greedy and row.is_plain)]
    if chosen:
        sampled, failed = _sample_processed(logits[chosen], [rows[i] for i in chosen], [ahead[i] for i in chosen])
        for i, token_id in zip(chosen, sampled, strict=True):
            tokens[i] = token_id
        errors |= {chosen[at]: error for at, error in failed.items()}
    logprobs = _raw_logprobs(logits, rows, tokens)
    samples = []
    for i, row in enumerate(rows):
        if i in errors:
            samples.append(Sample(None, None, errors[i]))
        else:
            row.record(tokens[i])
            samples.append(Sample(tokens[i], logprobs.get(i)))
    return samples


def _sample_processed(logits: Tensor, rows: list[SamplingRow], ahead: list[int]) -> tuple[list[int], dict[int, str]]:
    """Sample rows that are random or have processors; `logits` is theirs to change.

    Returns a token for each row, and why for those that have none.
    """
    failed: dict[int, str] = {}
    for i, row in enumerate(rows):
        if not row.is_plain:
            try:
                row.process(logits[i])
            except GrammarError as error:
                failed[i] = f"the grammar could not be followed: {error}"
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
    if drawn:
        params = [rows[i].params for i in drawn]
        noise = torch.tensor([rows[i].uniform(ahead[i]) for i in drawn], dtype=torch.float64)
        for i, token_id in zip(drawn, _draw(logits[drawn], params, noise), strict=True):
            tokens[i] = token_id
    return tokens, failed


def _draw(logits: Tensor, params: list[SamplingParams], noise: Tensor) -> list[int]:
    """Draw one token per row [R, V] after temperature and truncation."""
    # The largest logit becomes 0 first, so that a tiny temperature cannot overflow.
    logits -= logits.max(dim=-1, keepdim=True).values
    logits /= torch.tensor([[max(p.temperature, 1e-6)] for p in params])
    _truncate_min_p(logits, torch.tensor([p.min_p for p in params]))
    _truncate_top_k(logits, [p.top_k for p in params])
    _truncate_top_p(logits, torch.tensor([p.top_p for p in params]), _TOP_P_CANDIDATES)
    cumulative = torch.softmax(logits, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    targets = noise[:, None] * cumulative[:, -1:]
    tokens: list[int] = torch.searchsorted(cumulative, targets, right=True)[:, 0].tolist()
    return tokens


def _truncate_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Drop tokens less probable than min_p times the most probable one (whose logit is 0)."""
    if bool((min_p > 0).any()):
        logits.masked_fill_(logits < torch.log(min_p)[:, None], float("-inf"))


def _truncate_top_k(logits: Tensor, top_k: list[int]) -> None:
    """Drop all but the k largest logits of each row with 0 < k < V; ties with the k-th stay."""
    vocab_size = logits.shape[1]
    rows = [i for i, k in enumerate(top_k) if 0 < k < vocab_size]
    if rows:
        kth = torch.tensor([[top_k[i] - 1] for i in rows])
        thresholds = logits[rows].topk(int(kth.max()) + 1).values.gather(1, kth)
        logits[rows] = logits[rows].masked_fill(logits[rows] < thresholds, float("-inf"))


def _truncate_top_p(logits: Tensor, top_p: Tensor, candidates: int) -> None:
    """Keep each row's most probable tokens until their mass reaches top_p; the one that reaches it stays."""
    rows = torch.nonzero(top_p < 1.0)[:, 0]
    if not len(rows):
        return
    candidates = min(candidates, logits.shape[1])
    some = logits[rows]
    largest = some.topk(candidates).values
    mass = torch.exp(largest - torch.logsumexp(some, dim=-1, keepdim=True)).cumsum(dim=-1)
    kept = (mass < top_p[rows, None]).sum(dim=-1)  # index of the token that reaches top_p
    found = kept < candidates
    thresholds = largest.gather(1, kept.clamp(max=candidates - 1)[:, None])
    done = rows[found]
    logits[done] = some[found].masked_fill(some[found] < thresholds[found], float("-inf"))
    if not bool(found.all()) and candidates < logits.shape[1]:
        rest = rows[~found]
        unfinished = logits[rest]
        _truncate_top_p(unfinished, top_p[rest], logits.shape[1])
        logits[rest] = unfinished


def _raw_logprobs(logits: Tensor, rows: list[SamplingRow], tokens: list[int]) -> dict[int, RawLogprobs]:
    """Return the logprobs of the rows that asked for them, by row."""
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return {}
    logprobs = torch.log_softmax(logits[wanted], dim=-1)
    chosen = logprobs.gather(1, torch.tensor([[tokens[i]] for i in wanted]))[:, 0].tolist()
    counts = [min(rows[i].params.logprobs or 0, logits.shape[1]) for i in wanted]
    top = logprobs.topk(max(counts), dim=-1)
    top_ids, top_values = top.indices.tolist(), top.values.tolist()
    return {
        i: RawLogprobs(chosen[at], list(zip(top_ids[at][:count], top_values[at][:count], strict=True)))
        for at, (i, count) in enumerate(zip(wanted, counts, strict=True))
    }
