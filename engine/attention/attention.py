"""Attention over the KV pool, called by transformers' models through its AttentionInterface.

The pool and the batch here are those of a CPU; `paged_attention` has those of other devices.

The model is called once per step with all sequences' new tokens packed into one row, `input_ids[1, T]`, and a
`PackedBatch` as keyword, which transformers hands through to the attention function untouched. There, the new keys
and values go into the pool and each sequence's queries see its own tokens only.

Shapes: T rows in the step, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head dimension, L context length.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.torch_attention import Attended, AttentionOptions, apply_sinks, attend, merge
from engine.cpu.attention_kernel import AttentionKernel, ChunkTable, DecodeTables, NewRows, attention_kernel
from engine.errors import UnsupportedModel

ATTENTION_NAME = "spillway_packed"  # what the function is registered as
MIN_SHARED_TOKENS = 64  # from this length on, reading a prefix once for several sequences outweighs merging the parts
MAX_PARTS = 4  # of a fragmented context; a more fragmented one is copied together first


class AttentionBatch(Protocol):
    """The interface that the registered attention function needs of the object passed through the model."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Take query (1, Hq, T, D), key and value (1, Hkv, T, D); return (1, T, Hq, D)."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as the model takes it, on the model's device."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    sampled_rows: Tensor  # [R]: the rows whose logits are wanted
    batch: AttentionBatch


class KVMemory(Protocol):
    """The keys and values of all blocks on one device, as the model runner uses them."""

    def stage(
        self, tokens: list[int], positions: list[int], sampled_rows: list[int], segments: list["Segment"]
    ) -> StepInputs:
        """Prepare one step: `tokens` [T] and `positions` [T], one segment after the other, and `sampled_rows` [R]."""


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
    """Attend as transformers' AttentionInterface requires.

    Takes query (1, Hq, T, D), key and value (1, Hkv, T, D); returns (1, T, Hq, D) and no weights.
    """
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
        """Allocate `slots` tokens; `layer_shapes` gives (Hkv, D) for each layer. Pages are committed on first write."""
        self._layer_shapes = layer_shapes
        self._slots = slots
        self._dtype = dtype
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.allocate()

    @property
    def is_released(self) -> bool:
        """True while no memory is allocated."""
        return not self._layers

    def allocate(self) -> None:
        """Allocate the memory. It is zeroed if it was released before."""
        for layer, (heads, dim) in self._layer_shapes.items():
            if layer not in self._layers:
                self._layers[layer] = (self._map(heads, dim), self._map(heads, dim))

    def release(self) -> None:
        """Return the memory to the system until `allocate`; its contents are lost."""
        self._layers.clear()

    def _map(self, heads: int, dim: int) -> Tensor:
        # A separate mapping returns to the system when it is freed; malloc would keep much of it.
        memory = mmap.mmap(-1, heads * self._slots * dim * self._dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=self._dtype).view(1, heads, self._slots, dim)

    def stage(
        self, tokens: list[int], positions: list[int], sampled_rows: list[int], segments: list["Segment"]
    ) -> StepInputs:
        """Prepare one step as KVMemory describes; the tensors stay on the CPU."""
        return StepInputs(
            torch.tensor([tokens]),
            torch.tensor([positions]),
            torch.tensor(sampled_rows, dtype=torch.long),
            PackedBatch(self, segments),
        )

    def kernel(self, layer: int) -> AttentionKernel | None:
        """Return the compiled kernel for a layer; None if only torch's attention is available."""
        return attention_kernel(self._layer_shapes[layer][1], self._dtype)

    def tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values (1, Hkv, slots, D) of all slots."""
        return self._layers[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store the keys and values (1, Hkv, T, D) of tokens at `slots` [T]."""
        keys, values = self._layers[layer]
        keys.index_copy_(2, slots, key)
        values.index_copy_(2, slots, value)

    def read(self, layer: int, runs: list[range], first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values (1, Hkv, end - first, D) of a sequence whose tokens lie in `runs` of slots.

        Usually a view, because one run holds them all; otherwise a copy.
        """
        parts = [self.view(layer, part) for part in _slots(runs, first, end)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([keys for keys, _ in parts], dim=2), torch.cat([values for _, values in parts], dim=2)

    def view(self, layer: int, slots: range) -> tuple[Tensor, Tensor]:
        """Return the keys and values (1, Hkv, len(slots), D) of consecutive slots."""
        keys, values = self._layers[layer]
        return keys.narrow(2, slots.start, len(slots)), values.narrow(2, slots.start, len(slots))


def _overlaps(runs: list[range], first: int, end: int) -> Iterator[tuple[range, int, int]]:
    """Yield each run that holds some of the tokens first … end-1, with the offsets within it."""
    offset = 0
    for run in runs:
        low, high = max(first - offset, 0), min(end - offset, len(run))
        if low < high:
            yield run, low, high
        offset += len(run)


def _slots(runs: list[range], first: int, end: int) -> list[range]:
    """Return the slots of the tokens first … end-1, as runs."""
    return [run[low:high] for run, low, high in _overlaps(runs, first, end)]


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one sequence in a packed batch."""

    rows: int  # its new tokens
    context: int  # its tokens in the pool after this step, including the new ones
    runs: list[range]  # slots of its tokens, in order


class PackedBatch:
    """One step's sequences, packed one after the other.

    Sequences that decode (one row each) and begin with the same slots, because they share a cached prefix, attend to
    these together: the prefix is read once for all. Each sequence's own tokens are attended to separately, and the
    softmaxes over parts of a context are merged by their log-sum-exps.
    """

    def __init__(self, pool: KVPool, segments: list[Segment]) -> None:
        self._pool = pool
        self._segments = segments
        self._rows = [segment.rows for segment in segments]
        self._first_rows = list(accumulate(self._rows, initial=0))
        self._decoding = [number for number, segment in enumerate(segments) if segment.rows == 1]
        self._new_slots = [slot for segment in segments for slot in _new_slots(segment)]
        self._slots = torch.tensor(self._new_slots)
        self._masks: dict[tuple[int, int | None], Tensor] = {}  # by (segment, window): the same in every layer
        self._groups = _sharing([segments[number] for number in self._decoding])
        self._plans: dict[int | None, _DecodePlan] = {}  # by window
        self._new_parts: dict[int, list[range]] = {}  # by segment: the slots of its new tokens
        self._chunks: dict[tuple[int, int | None], ChunkTable] = {}  # by (segment, window)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store the new keys and values (1, Hkv, T, D), attend with query (1, Hq, T, D); return (1, T, Hq, D)."""
        _, query_heads, total_rows, head_dim = query.shape
        kv_heads = key.shape[1]
        kernel = self._pool.kernel(layer) if options.softcap is None else None
        if kernel is None:
            self._pool.write(layer, self._slots, key, value)
        grouped = query.view(kv_heads, query_heads // kv_heads, total_rows, head_dim).permute(2, 0, 1, 3)
        if self._decoding:
            decoded = self._attend_decoding(layer, kernel, NewRows(query, key, value), grouped, options)
        if len(self._decoding) == len(self._segments):
            return decoded.view(1, total_rows, query_heads, head_dim)
        outputs = list(torch.split(grouped, self._rows))
        for number, rows in enumerate(outputs):
            if self._rows[number] > 1 and kernel is not None:
                outputs[number] = self._attend_chunk_by(kernel, layer, number, NewRows(query, key, value), options)
            elif self._rows[number] > 1:
                outputs[number] = self._attend_chunk(layer, number, rows, options)
        for at, number in enumerate(self._decoding):
            outputs[number] = decoded[at : at + 1]
        output = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return output.reshape(1, total_rows, query_heads, head_dim)

    def _attend_decoding(
        self, layer: int, kernel: AttentionKernel | None, new: NewRows, grouped: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend with the rows of the N decoding sequences, of `grouped` (T, Hkv, G, D); return (N, Hkv, G, D)."""
        plan = self._plan(options.window)
        if kernel is None:
            own = [self._attend_own(layer, at, grouped, plan, options) for at in range(len(self._decoding))]
            output, lse = (torch.cat(parts) for parts in zip(*own, strict=True))
        else:
            output, lse = kernel.decode(new, *self._pool.tensors(layer), plan.tables, options.scale)
        for prefix, members in plan.groups:
            rows = grouped[plan.tables.rows[members]]  # (members, Hkv, G, D)
            shared = self._attend_shared(layer, prefix, rows, options)
            output[members], lse[members] = merge([shared, (output[members], lse[members])])
        return apply_sinks(output, lse, options.sinks)

    def _attend_shared(self, layer: int, prefix: range, rows: Tensor, options: AttentionOptions) -> Attended:
        """Attend to a shared prefix with the rows (members, Hkv, G, D) of all sequences that share it."""
        count, kv_heads, groups, dim = rows.shape
        stacked = rows.transpose(0, 1).reshape(1, kv_heads, count * groups, dim)
        output, lse = attend(stacked, *self._pool.view(layer, prefix), options, mask=None, causal=False)
        output, lse = output.view(kv_heads, count, groups, dim), lse.view(kv_heads, count, groups)
        return output.transpose(0, 1), lse.transpose(0, 1)

    def _attend_own(
        self, layer: int, at: int, grouped: Tensor, plan: "_DecodePlan", options: AttentionOptions
    ) -> Attended:
        """Attend with one decoding sequence's row to its unshared slots by torch's kernel; return (1, Hkv, G, D)."""
        number, parts = self._decoding[at], plan.own[at]
        row = self._first_rows[number]
        if len(parts) > MAX_PARTS:
            segment = self._segments[number]
            first = segment.context - sum(map(len, parts))
            keys_and_values = [self._pool.read(layer, segment.runs, first, segment.context)]
        else:
            keys_and_values = [self._pool.view(layer, part) for part in parts]
        # The G query heads that share a key/value head become the rows of one small product.
        query = grouped[row : row + 1]
        return merge(
            [attend(query, keys, values, options, mask=None, causal=False) for keys, values in keys_and_values]
        )

    def _attend_chunk_by(
        self, kernel: AttentionKernel, layer: int, number: int, new: NewRows, options: AttentionOptions
    ) -> Tensor:
        """Store and attend with the rows of one sequence among all of a step's; return (rows, Hkv, G, D)."""
        segment, row = self._segments[number], self._first_rows[number]
        if number not in self._new_parts:
            self._new_parts[number] = _slots(segment.runs, segment.context - segment.rows, segment.context)
        at = row
        for part in self._new_parts[number]:
            for stored, rows in zip(self._pool.view(layer, part), (new.key, new.value), strict=True):
                stored.copy_(rows.narrow(2, at, len(part)))
            at += len(part)
        if (number, options.window) not in self._chunks:
            first = _first_visible(segment, options.window)
            parts = _slots(segment.runs, first, segment.context)
            table = ChunkTable.of(segment.rows, segment.context, first, options.window, parts)
            self._chunks[number, options.window] = table
        table = self._chunks[number, options.window]
        queries = new.query.narrow(2, row, segment.rows)
        output, lse = kernel.attend_chunk(queries, *self._pool.tensors(layer), table, options.scale)
        return apply_sinks(output, lse, options.sinks)

    def _attend_chunk(self, layer: int, number: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attend with the query rows (rows, Hkv, G, D) of one sequence by torch's kernel; return the same shape."""
        segment = self._segments[number]
        first = _first_visible(segment, options.window)
        keys, values = self._pool.read(layer, segment.runs, first, segment.context)
        # Here G is the batch dimension, over which keys and values are merely repeated views.
        groups = query.shape[2]
        causal = segment.rows == segment.context and first == 0 and not _window_cuts(segment, options.window)
        output, lse = attend(
            query.permute(2, 1, 0, 3),
            keys.expand(groups, -1, -1, -1),
            values.expand(groups, -1, -1, -1),
            options,
            mask=None if causal else self._mask(number, first, options.window, query.dtype),
            causal=causal,
        )
        return apply_sinks(output.permute(2, 1, 0, 3), lse.permute(2, 1, 0), options.sinks)

    def _plan(self, window: int | None) -> "_DecodePlan":
        """Return the shared prefixes and each decoding sequence's own slots; the same in all layers."""
        if window not in self._plans:
            decoding = [self._segments[number] for number in self._decoding]
            groups = [
                (prefix, members)
                for prefix, members in self._groups
                if not any(_window_cuts(decoding[at], window) for at in members)
            ]
            shared = {at: len(prefix) for prefix, members in groups for at in members}
            own = [
                _slots(segment.runs, max(_first_visible(segment, window), shared.get(at, 0)), segment.context)
                for at, segment in enumerate(decoding)
            ]
            rows = [self._first_rows[number] for number in self._decoding]
            tables = DecodeTables.of(rows, [self._new_slots[row] for row in rows], own)
            self._plans[window] = _DecodePlan(groups, own, tables)
        return self._plans[window]

    def _mask(self, number: int, first: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask [rows, context - first] of a chunk that has tokens before it or a window."""
        if (number, window) not in self._masks:
            segment = self._segments[number]
            queries = torch.arange(segment.context - segment.rows, segment.context)[:, None]
            keys = torch.arange(first, segment.context)[None, :]
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            self._masks[number, window] = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return self._masks[number, window]


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    """Slots that the decoding sequences read, together and alone. Sequences are numbered among those that decode."""

    groups: list[tuple[range, list[int]]]  # shared slots, and the sequences that share them
    own: list[list[range]]  # by sequence: the slots it reads on its own
    tables: DecodeTables  # the same for the C kernel


def _sharing(segments: list[Segment]) -> list[tuple[range, list[int]]]:
    """Find the segments that begin with the same slots, and the common slots of each group."""
    by_start: dict[int, list[int]] = {}
    for number, segment in enumerate(segments):
        by_start.setdefault(segment.runs[0].start, []).append(number)
    groups = []
    for start, members in by_start.items():
        # The last token's slot is never shared.
        shared = min(min(len(segments[number].runs[0]), segments[number].context - 1) for number in members)
        if len(members) > 1 and shared >= MIN_SHARED_TOKENS:
            groups.append((range(start, start + shared), members))
    return groups


def _new_slots(segment: Segment) -> Iterator[int]:
    for run, low, high in _overlaps(segment.runs, segment.context - segment.rows, segment.context):
        yield from run[low:high]


def _first_visible(segment: Segment, window: int | None) -> int:
    """Return the first token that any of the segment's rows can see."""
    return 0 if window is None else max(0, segment.context - segment.rows + 1 - window)


def _window_cuts(segment: Segment, window: int | None) -> bool:
    return window is not None and segment.context > window
