"""Turns logits into tokens: penalties, bias, temperature, truncation, the draw, and logprobs.

Order: logit_bias, penalties, allowed_token_ids, bad_words, grammar, min_tokens, temperature, min_p, top_k, top_p, draw.
Logprobs are of the raw logits. Every random row is drawn by inverting its cumulative distribution at one uniform number
keyed by (seed, choice, position), so rows do not influence each other.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.device import to_device
from engine.errors import GrammarTooComplex
from engine.scheduler import Sequence
from engine.text.grammar import GrammarError, Matcher
from protocol.generation import SamplingParams

# --- noise ------------------------------------------------------------------------------------------------------------
#
# The sampler's randomness: one uniform number per (seed, choice, position).
#
# Keyed, not drawn from a running generator: a request's numbers depend on its own key only, so neither the rest of the
# batch, nor its size, nor a resumption on another worker can change them.

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, index: int, position: int) -> float:
    """Return a number in [0, 1) for output token `position` (from 0) of choice `index`.

    SplitMix64's finalizer chained over the three keys (Steele, Lea and Flood, OOPSLA 2014). 52 bits, so that the
    product with a total probability mass rounds to strictly less than the mass.
    """
    state = seed & _MASK
    for key in (index, position):
        state = _mix((state + _GOLDEN * (key + 1)) & _MASK)
    return (_mix((state + _GOLDEN) & _MASK) >> 12) * 2.0**-52


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


# --- bad words --------------------------------------------------------------------------------------------------------
#
# Bans words from an answer. Imports no torch.


class BadWords:
    """The words as token ids: a word's last token is forbidden after its other tokens.

    As in vLLM, a word is banned both at the beginning of a text and after a space; other tokenizations of it are not
    banned.
    """

    def __init__(self, words: tuple[str, ...], encode: Callable[[str], list[int]]) -> None:
        spellings = [spelling for word in words for spelling in (word.lstrip(), f" {word.lstrip()}")]
        self._words = list(dict.fromkeys(tuple(encode(spelling)) for spelling in spellings))

    def forbidden(self, output_ids: list[int]) -> list[int]:
        """Return the tokens that must not come next."""
        return [word[-1] for word in self._words if word and _ends_with(output_ids, word[:-1])]


def _ends_with(token_ids: list[int], end: tuple[int, ...]) -> bool:
    return len(end) <= len(token_ids) and tuple(token_ids[len(token_ids) - len(end) :]) == end


# --- prompt logprobs --------------------------------------------------------------------------------------------------
#
# The logprobs of a prompt's tokens, each given those before it.

SLICE_ROWS: Final = 64  # in memory at once for the softmax


class LogitsNotFinite(Exception):
    """The model has no probabilities for a prompt."""

    def __init__(self) -> None:
        super().__init__(NOT_FINITE)


@dataclass(frozen=True, slots=True)
class RawPromptLogprob:
    """One prompt token under the model's raw distribution."""

    logprob: float  # natural logarithm
    rank: int  # 1 + the number of more probable tokens
    top: list[tuple[int, float]]  # (token id, logprob), most probable first


def prompt_logprobs(logits: Tensor, token_ids: list[int], count: int) -> list[RawPromptLogprob]:
    """Describe each token by the float32 row of `logits` [R, V] of the token before it, with the `count` most probable.

    Raises LogitsNotFinite.
    """
    described: list[RawPromptLogprob] = []
    for rows, ids in zip(
        torch.split(logits, SLICE_ROWS), torch.split(torch.tensor(token_ids), SLICE_ROWS), strict=True
    ):
        described += _describe(rows, ids.to(rows.device)[:, None], min(count, rows.shape[1]))
    return described


def _describe(logits: Tensor, token_ids: Tensor, count: int) -> list[RawPromptLogprob]:
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    if not bool(torch.isfinite(normalizer).all()):
        raise LogitsNotFinite
    own = logits.gather(1, token_ids)
    ranks = (logits > own).sum(dim=-1) + 1
    top = logits.topk(count, dim=-1)
    columns = (
        (own - normalizer)[:, 0].tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        (top.values - normalizer).tolist(),
    )
    return [
        RawPromptLogprob(logprob, rank, list(zip(ids, values, strict=True)))
        for logprob, rank, ids, values in zip(*columns, strict=True)
    ]


# --- sampler ----------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
NOT_FINITE = "the model's logits are not finite"
_CACHED_LOGITS = 1 << 18  # of rows processed together on a CPU: 1 MiB, and some copies of it
_TOP_P_CANDIDATES = 256  # tokens sorted at first to find the cut of top_p; few rows need a full sort


class NothingAllowed(Exception):
    """The request's restrictions leave no token to sample."""

    def __init__(self) -> None:
        super().__init__(self.__doc__)


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
        bad_words: BadWords | None = None,
        device: torch.device = CPU,
    ) -> None:
        """`stop_ids` may not be sampled before min_tokens; `device` is where the logits will be."""
        self.params = params
        self._matcher = matcher
        self._bad_words = bad_words
        self._allowed_ids = to_device(list(params.allowed_token_ids), torch.long, device)
        self.sequence = sequence
        self._seed = random.getrandbits(63) if params.seed is None else params.seed
        self._index = index
        self._min_tokens_banned = to_device(sorted(stop_ids) if params.min_tokens else [], torch.long, device)
        self._bias_ids = to_device(list(params.logit_bias.keys()), torch.long, device)
        self._bias = to_device(list(params.logit_bias.values()), torch.float32, device)
        self._output_counts: Tensor | None = None
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            prompt = torch.tensor(sequence.token_ids[: sequence.prompt_tokens])
            output = torch.tensor(sequence.token_ids[sequence.prompt_tokens :], dtype=torch.long)
            self._in_prompt = torch.bincount(prompt, minlength=vocab_size).bool().to(device)
            self._output_counts = torch.bincount(output, minlength=vocab_size).float().to(device)
        self.is_greedy = params.temperature == 0.0 or params.top_p == 0.0
        self._has_mask = bool(params.allowed_token_ids or bad_words or matcher)
        self.is_plain = not (
            params.logit_bias or params.min_tokens or self._output_counts is not None or self._has_mask
        )

    def uniform(self, ahead: int) -> float:
        """Return the uniform number for the next token, or for the one `ahead` tokens later."""
        return uniform(self._seed, self._index, self.sequence.output_tokens + ahead)

    def process(self, logits: Tensor) -> None:
        """Apply bias, penalties and bans to this row's logits [V], in place.

        Raises GrammarError, GrammarTooComplex or NothingAllowed.
        """
        params = self.params
        logits[self._bias_ids] += self._bias
        if self._output_counts is not None:
            seen = self._in_prompt | (self._output_counts > 0)
            penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
            logits.copy_(torch.where(seen, penalised, logits))
            logits -= params.frequency_penalty * self._output_counts
            logits -= params.presence_penalty * (self._output_counts > 0)
        if self._has_mask:
            self._forbid(logits)
        if self.sequence.output_tokens < params.min_tokens:
            ends = logits[self._min_tokens_banned]
            logits[self._min_tokens_banned] = float("-inf")
            if self._has_mask:  # it may allow nothing else
                logits[self._min_tokens_banned] = torch.where(logits.max() == float("-inf"), ends, float("-inf"))

    def _forbid(self, logits: Tensor) -> None:
        if self.params.allowed_token_ids:
            allowed = logits[self._allowed_ids]
            logits.fill_(float("-inf"))
            logits[self._allowed_ids] = allowed
        if self._bad_words is not None:
            logits[self._bad_words.forbidden(self.sequence.token_ids[self.sequence.prompt_tokens :])] = float("-inf")
        if self._matcher is not None:
            self._matcher.forbid(logits)
        if (self.params.allowed_token_ids or self._bad_words) and logits.max() == float("-inf"):
            raise NothingAllowed

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
    """The sampled token of one row; `token_id` is None if `error` gives the reason."""

    token_id: int | None
    logprobs: RawLogprobs | None
    error: str | None = None


def sample(logits: Tensor, rows: list[SamplingRow], ahead: list[int] | None = None) -> list[Sample]:
    """Choose one token per row of float32 logits [R, V].

    `ahead` [R] gives each row's distance in tokens from the end of its sequence: above 0 for draft rows.
    """
    ahead = ahead or [0] * len(rows)
    largest, chosen = logits.max(dim=-1)
    failed: dict[int, str] = {}
    processed = [i for i, row in enumerate(rows) if not (row.is_greedy and row.is_plain)]
    for some in _parts(processed, logits):
        at = to_device(some, torch.long, logits.device)
        chosen[at], errors = _sample_processed(logits[at], [rows[i] for i in some], [ahead[i] for i in some])
        failed |= {some[number]: error for number, error in errors.items()}
    logprobs = _raw_logprobs(logits, rows, chosen)
    # NaN and +inf are the largest; so is a row of only -inf. On a GPU, everything above is queued while the forward
    # pass still runs; here the host waits for it, once.
    tokens: list[int] = chosen.where(torch.isfinite(largest), -1).tolist()
    samples = []
    for i, (row, token_id) in enumerate(zip(rows, tokens, strict=True)):
        if token_id < 0 or i in failed:
            samples.append(Sample(None, None, NOT_FINITE if token_id < 0 else failed[i]))
        else:
            row.record(token_id)
            samples.append(Sample(token_id, logprobs.get(i)))
    return samples


def _parts(rows: list[int], logits: Tensor) -> list[list[int]]:
    """Split the row numbers into parts that are processed together: on a CPU, as many rows [V] as fit its cache."""
    most = max(1, _CACHED_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    return [rows[first : first + most] for first in range(0, len(rows), most)]


def _sample_processed(logits: Tensor, rows: list[SamplingRow], ahead: list[int]) -> tuple[Tensor, dict[int, str]]:
    """Sample rows that are random or have processors; overwrites `logits` [R, V].

    Returns a token for each row, [R], and the errors of rows without one by number (their token is meaningless).
    """
    failed: dict[int, str] = {}
    for i, row in enumerate(rows):
        if not row.is_plain:
            try:
                row.process(logits[i])
            except GrammarError as error:
                failed[i] = f"the grammar cannot be followed: {error}"
            except (GrammarTooComplex, NothingAllowed) as error:
                failed[i] = str(error)
    tokens = logits.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if not row.is_greedy]
    if drawn:
        noise = [rows[i].uniform(ahead[i]) for i in drawn]
        at = to_device(drawn, torch.long, logits.device)
        tokens[at] = _draw(logits[at], [rows[i].params for i in drawn], noise)
    return tokens, failed


def _draw(logits: Tensor, params: list[SamplingParams], noise: list[float]) -> Tensor:
    """Draw one token per row [R, V] after temperature and truncation; return them, [R]."""
    numbers = [[max(p.temperature, 1e-6), p.min_p, p.top_p, u] for p, u in zip(params, noise, strict=True)]
    staged = to_device(numbers, torch.float64, logits.device)
    temperature, min_p, top_p = staged[:, :3].float().unbind(dim=1)
    # The largest logit becomes 0 first, so that a tiny temperature cannot overflow.
    logits -= logits.amax(dim=-1, keepdim=True)
    logits /= temperature[:, None]
    weights = torch.exp(logits)
    lowest = torch.log(min_p)[:, None]  # smallest logit that stays, [R, 1]; the most probable token's is 0
    if cut := [i for i, p in enumerate(params) if 0 < p.top_k < logits.shape[1]]:
        rows = to_device(cut, torch.long, logits.device)
        lowest[rows] = torch.maximum(lowest[rows], _lowest_by_top_k(logits[rows], [params[i].top_k for i in cut]))
    if cut := [i for i, p in enumerate(params) if p.top_p < 1.0]:
        rows = to_device(cut, torch.long, logits.device)
        lowest[rows] = _lowest_by_top_p(logits[rows], weights[rows], lowest[rows], top_p[rows, None], _TOP_P_CANDIDATES)
    if any(p.min_p > 0 or p.top_k > 0 or p.top_p < 1.0 for p in params):
        weights *= logits >= lowest
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    targets = staged[:, 3:] * cumulative[:, -1:]
    # A row that is not finite may yield any index, even one past the end.
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


def _lowest_by_top_k(logits: Tensor, top_k: list[int]) -> Tensor:
    """Return the k-th largest logit of each row [R, V]; ties with it stay."""
    kth = to_device([[k - 1] for k in top_k], torch.long, logits.device)
    return _largest(logits, max(top_k)).gather(1, kth)


def _lowest_by_top_p(logits: Tensor, weights: Tensor, lowest: Tensor, top_p: Tensor, candidates: int) -> Tensor:
    """Return the logit at which, from the largest down, each row's mass [R, V] reaches top_p of the remaining mass.

    Only `candidates` tokens are sorted at first; the host waits only to learn whether they sufficed.
    """
    candidates = min(candidates, logits.shape[1])
    mass = (weights * (logits >= lowest)).sum(dim=-1, keepdim=True)
    largest = _largest(logits, candidates)
    mass_down_to = (torch.exp(largest) * (largest >= lowest)).cumsum(dim=-1)
    kept = (mass_down_to < top_p * mass).sum(dim=-1, keepdim=True)  # index of the token that reaches top_p
    reached = torch.where(kept < candidates, largest.gather(1, kept.clamp(max=candidates - 1)), lowest)
    raised = torch.maximum(lowest, reached)
    if candidates < logits.shape[1] and bool((rest := kept[:, 0] == candidates).any()):
        raised[rest] = _lowest_by_top_p(logits[rest], weights[rest], lowest[rest], top_p[rest], logits.shape[1])
    return raised


def _largest(logits: Tensor, count: int) -> Tensor:
    """Return the `count` largest values of each row [R, V], in falling order."""
    if logits.device.type != "cpu":
        return logits.topk(count).values
    values = logits.numpy()  # numpy sorts with vector instructions, several times faster than torch
    if count < values.shape[1]:
        values = np.partition(values, -count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())


def _raw_logprobs(logits: Tensor, rows: list[SamplingRow], tokens: Tensor) -> dict[int, RawLogprobs]:
    """Return the logprobs of the rows that requested them, by row; `tokens` [R] are the chosen ones."""
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanted:
        return {}
    at = to_device(wanted, torch.long, logits.device)
    logprobs = torch.log_softmax(logits[at], dim=-1)
    chosen = logprobs.gather(1, tokens[at][:, None])[:, 0].tolist()
    counts = [min(rows[i].params.logprobs or 0, logits.shape[1]) for i in wanted]
    top = logprobs.topk(max(counts), dim=-1)
    top_ids, top_values = top.indices.tolist(), top.values.tolist()
    return {
        i: RawLogprobs(chosen[number], list(zip(top_ids[number][:count], top_values[number][:count], strict=True)))
        for number, (i, count) in enumerate(zip(wanted, counts, strict=True))
    }
