"""Attention over the KV pool, called by transformers' models through its AttentionInterface.

The model is called once per step with all sequences' new tokens packed into one row, `input_ids[1, T]`, and a
`PackedBatch` as keyword, which transformers hands through to the attention function untouched. There, the new keys
and values go into the pool and each sequence's queries see its own tokens only.

Shapes: T rows in the step, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head dimension, L context length.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.errors import UnsupportedModel

ATTENTION_NAME = "spillway_packed"  # what the function is registered as


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer asks of its attention beside queries, keys and values."""

    scale: float
    window: int | None  # a query sees this many last tokens, itself included; None: all
    softcap: float | None  # scores become softcap · tanh(score / softcap) (Gemma 2)
    sinks: Tensor | None  # [Hq]: one more logit in each head's softmax, without a value (gpt-oss)


class AttentionBatch(Protocol):
    """What the registered function needs of the object passed through the model."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Take query (1, Hq, T, D), key and value (1, Hkv, T, D); return (1, T, Hq, D)."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - part of the interface; always None for a packed batch
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_batch: AttentionBatch | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Be the attention function of transformers' AttentionInterface."""
    layer = getattr(module, "layer_idx", None)
    if packed_batch is None or layer is None:
        raise UnsupportedModel(f"{type(module).__name__} does not pass the batch or its layer number to its attention")
    if position_bias is not None:
        raise UnsupportedModel(f"{type(module).__name__} adds a position bias, which this engine does not compute")
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return packed_batch.attend(layer, query, key, value, options), None


class KVPool:
    """Keys and values of every layer: per layer two tensors [Hkv, slots, D]; slot = block · block_size + offset.

    Heads come first because a CPU then reads one head's keys as one stream (at 1,000 tokens, 1.3 to 1.5 times
    faster than [slots, Hkv, D]).
    """

    def __init__(self, layer_shapes: dict[int, tuple[int, int]], slots: int, dtype: torch.dtype) -> None:
        """`layer_shapes` gives (Hkv, D) for each layer. Memory is committed by the system as it is first written."""
        self._layers = {
            layer: (torch.zeros(1, heads, slots, dim, dtype=dtype), torch.zeros(1, heads, slots, dim, dtype=dtype))
            for layer, (heads, dim) in layer_shapes.items()
        }

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store the keys and values (1, Hkv, T, D) of tokens at `slots` [T]."""
        keys, values = self._layers[layer]
        keys.index_copy_(2, slots, key)
        values.index_copy_(2, slots, value)

    def read(self, layer: int, runs: list[range], first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (1, Hkv, end - first, D) of a sequence whose tokens lie in `runs` of slots.

        A view where one run holds them all, which is the usual case; a copy otherwise.
        """
        keys, values = self._layers[layer]
        parts = [(run.start + low, high - low) for run, low, high in _overlaps(runs, first, end)]
        if len(parts) == 1:
            start, length = parts[0]
            return keys.narrow(2, start, length), values.narrow(2, start, length)
        return (
            torch.cat([keys.narrow(2, start, length) for start, length in parts], dim=2),
            torch.cat([values.narrow(2, start, length) for start, length in parts], dim=2),
        )


def _overlaps(runs: list[range], first: int, end: int) -> Iterator[tuple[range, int, int]]:
    """Yield each run that holds some of the tokens first … end-1, with the offsets within it."""
    offset = 0
    for run in runs:
        low, high = max(first - offset, 0), min(end - offset, len(run))
        if low < high:
            yield run, low, high
        offset += len(run)


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one sequence in a packed batch."""

    rows: int  # its new tokens
    context: int  # its tokens in the pool after this step, the new ones included
    runs: list[range]  # slots of its tokens, in order


class PackedBatch:
    """One step's sequences, packed one after the other."""

    def __init__(self, pool: KVPool, segments: list[Segment]) -> None:
        self._pool = pool
        self._segments = segments
        self._rows = [segment.rows for segment in segments]
        self._slots = torch.tensor([slot for segment in segments for slot in _new_slots(segment)])
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # by (segment, window): the same in every layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store the new keys and values, then attend; see AttentionBatch."""
        self._pool.write(layer, self._slots, key, value)
        _, query_heads, total_rows, head_dim = query.shape
        kv_heads = key.shape[1]
        grouped = query.view(kv_heads, query_heads // kv_heads, total_rows, head_dim).permute(2, 0, 1, 3)
        outputs = [
            self._attend_segment(layer, number, rows, options)
            for number, rows in enumerate(torch.split(grouped, self._rows))
        ]
        return torch.cat(outputs).view(1, total_rows, query_heads, head_dim)

    def _attend_segment(self, layer: int, number: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attend with the query rows (rows, Hkv, G, D) of one sequence; return the same shape."""
        segment = self._segments[number]
        first = _first_visible(segment, options.window)
        keys, values = self._pool.read(layer, segment.runs, first, segment.context)
        if segment.rows == 1:
            # The G query heads that share a key/value head become the rows of one small product.
            output, lse = _attend(query, keys, values, options, mask=None, causal=False)
            return _apply_sinks(output, lse, options.sinks)
        # Here G is the batch dimension, over which keys and values are merely repeated views.
        groups = query.shape[2]
        causal = segment.rows == segment.context and first == 0 and not _window_cuts(segment, options.window)
        output, lse = _attend(
            query.permute(2, 1, 0, 3),
            keys.expand(groups, -1, -1, -1),
            values.expand(groups, -1, -1, -1),
            options,
            mask=None if causal else self._mask(number, first, options.window, query.dtype),
            causal=causal,
        )
        return _apply_sinks(output.permute(2, 1, 0, 3), lse.permute(2, 1, 0), options.sinks)

    def _mask(self, number: int, first: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [rows, context - first] of a chunk that has tokens before it or a window."""
        if (number, window) not in self._masks:
            segment = self._segments[number]
            queries = torch.arange(segment.context - segment.rows, segment.context)[:, None]
            keys = torch.arange(first, segment.context)[None, :]
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            self._masks[number, window] = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return self._masks[number, window]


def _new_slots(segment: Segment) -> Iterator[int]:
    for run, low, high in _overlaps(segment.runs, segment.context - segment.rows, segment.context):
        yield from run[low:high]


def _first_visible(segment: Segment, window: int | None) -> int:
    """Return the first token that any of the segment's rows can see."""
    return 0 if window is None else max(0, segment.context - segment.rows + 1 - window)


def _window_cuts(segment: Segment, window: int | None) -> bool:
    return window is not None and segment.context > window


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, *, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the attention output (B, H, rows, D) and the log-sum-exp of the scores (B, H, rows)."""
    if options.softcap is not None:
        return _attend_softcapped(query, keys, values, options, mask=mask, causal=causal)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]  # noqa: SLF001 - the public wrapper returns no log-sum-exp and does not promise this kernel
        query, keys, values, 0.0, causal, attn_mask=mask, scale=options.scale
    )


def _attend_softcapped(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, *, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Softcapped scores have no fused kernel on a CPU."""
    assert options.softcap is not None  # noqa: S101
    scores = torch.tanh((query @ keys.transpose(2, 3)).float() * (options.scale / options.softcap)) * options.softcap
    if causal:
        rows = scores.shape[2]
        scores = scores.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu_(1), float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return torch.softmax(scores, dim=-1).to(values.dtype) @ values, torch.logsumexp(scores, dim=-1)


def _apply_sinks(output: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Scale (rows, Hkv, G, D) by the share of the softmax that does not go to the sink: 1 / (1 + e^(sink - lse))."""
    if sinks is None:
        return output
    share = torch.sigmoid(lse - sinks.view(1, lse.shape[1], lse.shape[2]).float())
    return output * share[..., None].to(output.dtype)
