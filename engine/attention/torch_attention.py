"""Attention by torch, and the post-processing shared by all attention kernels.

Shapes as in `attention`: N rows, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Attended = tuple[Tensor, Tensor]  # of N rows: output (N, Hkv, G, D) and log-sum-exp of the scores (N, Hkv, G)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """A layer's settings for its attention."""

    scale: float
    window: int | None  # a query sees this many last tokens, including itself; None: all
    softcap: float | None  # scores become softcap · tanh(score / softcap) (Gemma 2)
    sinks: Tensor | None  # [Hq]: an additional logit in each head's softmax, without a value (gpt-oss)


def merge(parts: list[Attended]) -> Attended:
    """Merge softmaxes over parts of a context, as flash attention does: each (N, Hkv, G, D) and (N, Hkv, G)."""
    if len(parts) == 1:
        return parts[0]
    total = torch.logsumexp(torch.stack([lse for _, lse in parts]), dim=0)
    output = torch.zeros_like(parts[0][0])
    for part, lse in parts:
        output += part * torch.exp(lse - total)[..., None].to(part.dtype)
    return output, total


def attend(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, *, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend with query (B, H, rows, D) to keys and values (B, H, L, D).

    Returns the output (B, H, rows, D) and the log-sum-exp of the scores (B, H, rows).
    """
    if options.softcap is not None:
        return _attend_softcapped(query, keys, values, options, mask=mask, causal=causal)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]  # noqa: SLF001 - the public wrapper returns no log-sum-exp and does not promise this kernel
        query, keys, values, 0.0, causal, attn_mask=mask, scale=options.scale
    )


def _attend_softcapped(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, *, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attend with softcapped scores, for which a CPU has no fused kernel; shapes as in `attend`."""
    assert options.softcap is not None  # noqa: S101
    scores = torch.tanh((query @ keys.transpose(2, 3)).float() * (options.scale / options.softcap)) * options.softcap
    if causal:
        rows = scores.shape[2]
        scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu_(1), float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1).to(values.dtype) @ values, torch.logsumexp(scores, dim=-1)


def apply_sinks(output: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Scale (rows, Hkv, G, D) by the share of the softmax that does not go to the sink: 1 / (1 + e^(sink - lse))."""
    if sinks is None:
        return output
    share = torch.sigmoid(lse - sinks.view(1, lse.shape[1], lse.shape[2]).float())
    return output * share[..., None].to(output.dtype)
