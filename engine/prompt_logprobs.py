"""The logprobs of a prompt's tokens, each given those before it."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.sampler import NOT_FINITE

SLICE_ROWS: Final = 64  # whose softmax is in memory at once


class LogitsNotFinite(Exception):
    """The model has no probabilities for a prompt."""

    def __init__(self) -> None:
        super().__init__(NOT_FINITE)


@dataclass(frozen=True, slots=True)
class RawPromptLogprob:
    """One prompt token under the model's raw distribution."""

    logprob: float  # natural logarithm
    rank: int  # 1 + how many tokens are more probable
    top: list[tuple[int, float]]  # (token id, logprob), most probable first


def prompt_logprobs(logits: Tensor, token_ids: list[int], count: int) -> list[RawPromptLogprob]:
    """Describe each token by the float32 row of `logits` [R, V] of the token before it, and `count` most probable ones.

    Raises LogitsNotFinite.
    """
    described: list[RawPromptLogprob] = []
    for rows, ids in zip(
        torch.split(logits, SLICE_ROWS), torch.split(torch.tensor(token_ids), SLICE_ROWS), strict=True
    ):
        described += _describe(rows, ids.to(rows.device)[:, None], min(count, rows.shape[1]))
    return described


def _describe(logits: Tensor, token_ids: Tensor, count: int) -> list[RawPromptLogprob]:
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    if not bool(torch.isfinite(normaliser).all()):
        raise LogitsNotFinite
    own = logits.gather(1, token_ids)
    ranks = (logits > own).sum(dim=-1) + 1
    top = logits.topk(count, dim=-1)
    columns = (
        (own - normaliser)[:, 0].tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        (top.values - normaliser).tolist(),
    )
    return [
        RawPromptLogprob(logprob, rank, list(zip(ids, values, strict=True)))
        for logprob, rank, ids, values in zip(*columns, strict=True)
    ]
