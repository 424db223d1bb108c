"""Keys and values in pages, and attention over them, for every device but the CPU.

A page is one of the scheduler's blocks. A step's sequences are packed as on a CPU (`attention`); a table of pages
locates each one's tokens, so that the work on the device depends on tensors only and a step can be recorded once and
replayed with other contents (`decode_graphs`).

Shapes: T rows in the step, S sequences, P pages of the longest of them, Hq query heads, Hkv key/value heads, D head
dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.attention.attention import Segment, StepInputs
from engine.attention.torch_attention import AttentionOptions
from engine.device import to_device


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The locations of one step's rows and their contexts. Tensors are int64 on the device."""

    slots: Tensor  # [T]: where each row's key and value go; slot = page · page size + offset
    starts: Tensor  # [S + 1]: each sequence's first row, and T
    contexts: Tensor  # [S]: each sequence's tokens in the pool after this step, including the new ones
    tables: Tensor  # [S, P]: each sequence's pages, in order of its tokens
    longest_rows: int  # max rows of one sequence; 1: all of them decode
    longest_context: int  # upper bound of the tokens of one sequence
    has_decoding: bool  # whether any sequence has exactly one row


# (query [T, Hq, D], keys and values [pages, page size, Hkv, D], step, options) → [T, Hq, D]
PagedAttention = Callable[[Tensor, Tensor, Tensor, PagedStep, AttentionOptions], Tensor]


class PagedKVPool:
    """Keys and values of every layer: per layer two tensors [pages, page size, Hkv, D].

    One extra page, which the scheduler never assigns, receives the rows that pad a batch.
    """

    def __init__(
        self,
        layer_shapes: dict[int, tuple[int, int]],
        slots: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        attention: PagedAttention | None = None,
    ) -> None:
        """`layer_shapes` gives (Hkv, D) for each layer; `slots` is a multiple of `page_size`.

        `attention` defaults to the reference.
        """
        self.page_size = page_size
        pages = slots // page_size + 1

        def zeros(heads: int, dim: int) -> Tensor:
            return torch.zeros(pages, page_size, heads, dim, dtype=dtype, device=device)

        self.device = device
        self._layers = {layer: (zeros(*shape), zeros(*shape)) for layer, shape in layer_shapes.items()}
        self._attention = attention or attend_by_reference
        self._page_numbers = np.arange(pages)
        self.filling = Segment(rows=1, context=1, runs=[range(slots, slots + page_size)])  # a padding row

    def stage(
        self, tokens: list[int], positions: list[int], sampled_rows: list[int], segments: list[Segment]
    ) -> StepInputs:
        """Prepare one step as KVMemory describes, in one copy to the device."""
        packed, tables = self.pack(tokens, positions, segments)
        rows = [segment.rows for segment in segments]
        return _step_inputs(
            self,
            packed.to(self.device, non_blocking=True),
            tables.to(self.device, non_blocking=True),
            to_device(sampled_rows, torch.long, self.device),
            longest_rows=max(rows),
            longest_context=max(segment.context for segment in segments),
            has_decoding=1 in rows,
        )

    def pack(self, tokens: list[int], positions: list[int], segments: list[Segment]) -> tuple[Tensor, Tensor]:
        """Write a step's inputs one after the other (`_step_inputs`), and its tables [S, P], on the host."""
        rows = np.array([segment.rows for segment in segments])
        contexts = np.array([segment.context for segment in segments])
        used_pages = -(-contexts // self.page_size)
        packed = self._on_host(3 * len(tokens) + 2 * len(segments) + 1)
        tables = self._on_host(len(segments), int(used_pages.max()))
        self._write_tables(tables.numpy(), segments, used_pages.tolist())
        own = np.array(positions)
        pages = tables.numpy()[np.repeat(np.arange(len(segments)), rows), own // self.page_size]
        slots = pages * self.page_size + own % self.page_size
        np.concatenate((tokens, own, slots, [0], rows.cumsum(), contexts), out=packed.numpy())
        return packed, tables

    def make_static_inputs(self, tables: Tensor, longest_context: int) -> tuple[StepInputs, Tensor]:
        """Return the inputs of a step that decodes len(tables) sequences, and the tensor they are views of.

        The contents, as `pack` returns them, are copied later into that tensor and `tables` [S, P].
        """
        size = len(tables)
        packed = torch.zeros(5 * size + 1, dtype=torch.int64, device=self.device)
        all_rows = torch.arange(size, device=self.device)
        inputs = _step_inputs(
            self, packed, tables, all_rows, longest_rows=1, longest_context=longest_context, has_decoding=True
        )
        return inputs, packed

    def blank_tables(self, sequences: int, longest_context: int) -> Tensor:
        """Return tables [S, P] for `sequences` sequences of at most `longest_context` tokens."""
        pages = -(-longest_context // self.page_size)
        return torch.zeros(sequences, pages, dtype=torch.int64, device=self.device)

    def attend(  # noqa: PLR0917 - those of AttentionBatch, and the step
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, step: PagedStep, options: AttentionOptions
    ) -> Tensor:
        """Store the new keys and values, then attend; shapes as in AttentionBatch."""
        keys, values = self._layers[layer]
        keys.flatten(0, 1).index_copy_(0, step.slots, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, step.slots, value[0].transpose(0, 1))
        return self._attention(query[0].transpose(0, 1), keys, values, step, options)[None]

    def _on_host(self, *shape: int) -> Tensor:
        # Copies from pinned memory are asynchronous; torch keeps the memory until they are done.
        return torch.zeros(shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")

    def _write_tables(self, tables: np.ndarray, segments: list[Segment], used_pages: list[int]) -> None:
        for table, segment, pages in zip(tables, segments, used_pages, strict=True):
            at = 0
            for run in segment.runs:
                if at >= pages:
                    break
                first, count = run.start // self.page_size, min(len(run) // self.page_size, pages - at)
                table[at : at + count] = self._page_numbers[first : first + count]
                at += count


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """One step's sequences over a paged pool; an AttentionBatch."""

    pool: PagedKVPool
    step: PagedStep

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store the new keys and values (1, Hkv, T, D), attend with query (1, Hq, T, D); return (1, T, Hq, D)."""
        return self.pool.attend(layer, query, key, value, self.step, options)


def _step_inputs(
    pool: PagedKVPool,
    packed: Tensor,
    tables: Tensor,
    sampled_rows: Tensor,
    *,
    longest_rows: int,
    longest_context: int,
    has_decoding: bool,
) -> StepInputs:
    """Split the output of `pack` into views: T tokens, T positions, T slots, S + 1 starts, S contexts."""
    sequences = len(tables)
    rows = (len(packed) - 2 * sequences - 1) // 3
    tokens, positions, slots, starts, contexts = torch.split(packed, [rows, rows, rows, sequences + 1, sequences])
    step = PagedStep(
        slots=slots,
        starts=starts,
        contexts=contexts,
        tables=tables,
        longest_rows=longest_rows,
        longest_context=longest_context,
        has_decoding=has_decoding,
    )
    return StepInputs(tokens[None], positions[None], sampled_rows, PagedBatch(pool, step))


def attend_by_reference(
    query: Tensor, keys: Tensor, values: Tensor, step: PagedStep, options: AttentionOptions
) -> Tensor:
    """Attend sequence by sequence with dense float32 softmaxes: the kernels' reference, for any device.

    Takes query [T, Hq, D], keys and values [pages, page size, Hkv, D]; returns [T, Hq, D].
    """
    starts, contexts = step.starts.tolist(), step.contexts.tolist()
    page_size = keys.shape[1]
    outputs = []
    for number, context in enumerate(contexts):
        pages = step.tables[number, : -(-context // page_size)]
        own = query[starts[number] : starts[number + 1]]
        own_keys, own_values = (pool[pages].flatten(0, 1)[:context].float() for pool in (keys, values))
        outputs.append(_attend_densely(own.float(), own_keys, own_values, options).to(query.dtype))
    return torch.cat(outputs)


def _attend_densely(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Attend with the last rows [rows, Hq, D] of a context to its keys and values [L, Hkv, D]; all float32."""
    (rows, query_heads, dim), (context, kv_heads, _) = query.shape, keys.shape
    grouped = query.view(rows, kv_heads, query_heads // kv_heads, dim)
    scores = torch.einsum("rhgd,lhd->rhgl", grouped, keys) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    distance = torch.arange(context - rows, context, device=query.device)[:, None] - torch.arange(
        context, device=query.device
    )
    hidden = distance < 0
    if options.window is not None:
        hidden |= distance >= options.window
    scores = scores.masked_fill(hidden[:, None, None, :], float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(1, kv_heads, -1, 1).expand(rows, -1, -1, 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("rhgl,lhd->rhgd", weights, values).reshape(rows, query_heads, dim)
