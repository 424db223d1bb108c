"""The Triton kernels of attention over a paged pool; `triton_attention` launches them.

`attend_tiles` runs in two ways. *Chunks* (several rows of a sequence: prompts, drafts): a program takes some rows of
one sequence, with all query heads that share a key/value head, and goes through the keys that these rows see.
*Decoding* (one row of a sequence): as a single row has too few heads to occupy a GPU at long contexts, its keys are
split among programs, and `merge_splits` merges their results (flash decoding, Dao et al. 2023). Within a
program the softmax is computed online, in float32, with base-2 exponentials.

A mixed step launches both ways over all its sequences; each skips the other's. Which program has which rows follows
from tensors alone, so that launches can be recorded in a CUDA graph.

Shapes: T rows, S sequences, Hq query heads, Hkv key/value heads, D head dimension.
"""

from typing import Final

import triton
import triton.language as tl

_LOG2_E: Final = tl.constexpr(1.4426950408889634)
# Values that change from step to step must not select kernel variants: compiling one takes a second.
_VARYING: Final = ("starts", "contexts", "tables", "table_stride", "sequences", "splits")


@triton.jit(do_not_specialize=_VARYING)
def attend_tiles(
    query,  # [T, Hq, D]
    keys,  # [pages, page size, Hkv, D]
    values,
    output,  # [T, Hq, D]; where is_partial [S, Hq, splits, D] in float32
    lses,  # [S, Hq, splits] where is_partial
    sinks,  # [Hq] where has_sinks
    starts,  # [S + 1]
    contexts,  # [S]
    tables,  # [S, …]
    table_stride,
    sequences,  # S
    splits,
    query_row_stride,
    query_head_stride,
    scale,
    softcap,
    window: tl.constexpr,  # 0: none
    page_size: tl.constexpr,
    kv_heads: tl.constexpr,
    groups: tl.constexpr,  # Hq / Hkv
    dim: tl.constexpr,
    padded_dim: tl.constexpr,  # a power of two
    tile_rows: tl.constexpr,  # rows of one sequence per program
    tile: tl.constexpr,  # tile_rows · groups, padded to a power of two
    tile_keys: tl.constexpr,  # keys processed at once
    is_decoding: tl.constexpr,
    is_partial: tl.constexpr,  # whether the keys are split
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Attend with some rows of one sequence and the heads of one key/value head: program (tile, Hkv, split)."""
    number = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if is_decoding:
        sequence = number
        first = 0
    else:
        # Programs starts[s] // tile_rows + s and following belong to sequence s: enough for it, and found by bisection.
        low = 0
        high = sequences
        while high - low > 1:
            middle = (low + high) // 2
            if tl.load(starts + middle) // tile_rows + middle <= number:
                low = middle
            else:
                high = middle
        sequence = low
        first = (number - tl.load(starts + sequence) // tile_rows - sequence) * tile_rows
    start = tl.load(starts + sequence)
    rows = tl.load(starts + sequence + 1) - start
    context = tl.load(contexts + sequence)
    if rows != 1 if is_decoding else (rows == 1) | (first >= rows):
        return

    member = tl.arange(0, tile)
    row = first + member // groups
    head = kv_head * groups + member % groups
    is_row = (member < tile_rows * groups) & (row < rows)
    position = context - rows + row
    dims = tl.arange(0, padded_dim)
    is_dim = dims < dim
    own = tl.load(
        query + (start + row)[:, None] * query_row_stride + head[:, None] * query_head_stride + dims[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )

    # The keys that any row of the tile sees, and this split's share of them.
    end = context - rows + tl.minimum(first + tile_rows, rows)
    begin = end * 0
    if window > 0:
        begin = tl.maximum(context - rows + first + 1 - window, 0)
    if is_partial:
        share = tl.cdiv(tl.cdiv(end - begin, splits), tile_keys) * tile_keys
        begin += split * share
        end = tl.minimum(begin + share, end)

    largest = tl.full([tile], float("-inf"), tl.float32)
    total = tl.zeros([tile], tl.float32)
    if has_sinks and split == 0:  # an additional logit without a value
        largest = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
        total += 1.0
    found = tl.zeros([tile, padded_dim], tl.float32)
    for at in range(begin, end, tile_keys):
        key_position = at + tl.arange(0, tile_keys)
        is_key = key_position < end
        page = tl.load(tables + sequence * table_stride + key_position // page_size, mask=is_key, other=0)
        slot = page * page_size + key_position % page_size
        offsets = (slot * kv_heads + kv_head)[:, None] * dim + dims[None, :]
        is_there = is_key[:, None] & is_dim[None, :]
        tile_of_keys = tl.load(keys + offsets, mask=is_there, other=0.0)
        scores = tl.dot(own, tl.trans(tile_of_keys), input_precision="ieee") * scale
        if has_softcap:  # tanh x = 1 - 2 / (e^2x + 1)
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * _LOG2_E / softcap)) + 1.0))
        is_visible = is_key[None, :] & (key_position[None, :] <= position[:, None])
        if window > 0:
            is_visible &= key_position[None, :] > position[:, None] - window
        scores = tl.where(is_visible, scores * _LOG2_E, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # nothing was visible yet
        weights = tl.exp2(scores - reference[:, None])
        kept = tl.exp2(largest - reference)
        total = total * kept + tl.sum(weights, 1)
        tile_of_values = tl.load(values + offsets, mask=is_there, other=0.0)
        found = found * kept[:, None]
        found += tl.dot(weights.to(tile_of_values.dtype), tile_of_values, input_precision="ieee")
        largest = new_largest

    total = tl.where(total == 0.0, 1.0, total)  # nothing was visible
    found = found / total[:, None]
    if is_partial:
        at_head = (sequence * kv_heads * groups + head) * splits + split
        tl.store(lses + at_head, largest + tl.log2(total), mask=is_row)
        tl.store(output + at_head[:, None] * dim + dims[None, :], found, mask=is_row[:, None] & is_dim[None, :])
    else:
        at_row = (start + row) * (kv_heads * groups) + head
        tl.store(
            output + at_row[:, None] * dim + dims[None, :],
            found.to(output.dtype.element_ty),
            mask=is_row[:, None] & is_dim[None, :],
        )


@triton.jit(do_not_specialize=("starts", "splits"))
def merge_splits(
    parts,  # [S, Hq, splits, D], each normalized by its own total
    lses,  # [S, Hq, splits], base 2; -inf if a split saw no keys
    output,  # [T, Hq, D]
    starts,
    splits,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
):
    """Merge the splits of one row and head: program (S, Hq)."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    start = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) - start != 1:
        return
    dims = tl.arange(0, padded_dim)
    is_dim = dims < dim
    at = (sequence * heads + head) * splits
    largest = tl.load(lses + at)  # the first split always has keys
    total = 1.0
    found = tl.load(parts + at * dim + dims, mask=is_dim, other=0.0)
    for split in range(1, splits):
        lse = tl.load(lses + at + split)
        new_largest = tl.maximum(largest, lse)
        kept = tl.exp2(largest - new_largest)
        weight = tl.exp2(lse - new_largest)
        found = found * kept + weight * tl.load(parts + (at + split) * dim + dims, mask=is_dim, other=0.0)
        total = total * kept + weight
        largest = new_largest
    result = found / total
    tl.store(output + (start * heads + head) * dim + dims, result.to(output.dtype.element_ty), mask=is_dim)
