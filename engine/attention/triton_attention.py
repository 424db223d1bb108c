"""Attention over a paged pool by Triton's kernels (`triton_kernels`): divides a step's work for a GPU.

Not tuned for any card: tiles fit into the shared memory of every GPU since Ampere.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton
from torch import Tensor

from engine.attention import triton_kernels
from engine.attention.paged_attention import PagedStep
from engine.attention.torch_attention import AttentionOptions

MAX_SPLITS: Final = 32
TILE_BYTES: Final = 16_384  # of the keys that a program processes at once
MIN_TILE, MAX_TILE = 16, 64  # rows or keys; tensor cores require at least 16


@dataclass(frozen=True, slots=True)
class _Work:
    """The division of one launch into (tiles, Hkv, splits) programs."""

    tiles: int
    splits: int  # of each row's keys
    tile_rows: int  # rows of one sequence per program
    tile: int  # these rows times the heads that share keys, padded to a power of two
    is_decoding: bool


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PagedStep,
    options: AttentionOptions,
    *,
    splits: int | None = None,
) -> Tensor:
    """Attend as `paged_attention.PagedAttention`: query [T, Hq, D], keys and values [pages, page size, Hkv, D].

    The keys of a decoding row are split among `splits` programs; None: as many as occupy the GPU.
    """
    rows, query_heads, dim = query.shape
    kv_heads = keys.shape[2]
    groups = query_heads // kv_heads
    sequences = len(step.contexts)
    tile_keys = tile_keys_of(dim, keys.element_size())
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if step.has_decoding:
        tile = max(MIN_TILE, triton.next_power_of_2(groups))
        splits = splits or _splits(sequences * kv_heads, step.longest_context, tile_keys, query.device)
        work = _Work(sequences, splits, 1, tile, is_decoding=True)
        _launch(work, query, keys, values, step, options, output)
    if step.longest_rows > 1:
        tile_rows = max(1, tile_keys // groups)
        tile = max(MIN_TILE, triton.next_power_of_2(tile_rows * groups))
        # Each sequence has its share of the rows, rounded up to whole tiles.
        work = _Work(rows // tile_rows + sequences, 1, tile_rows, tile, is_decoding=False)
        _launch(work, query, keys, values, step, options, output)
    return output


def tile_keys_of(dim: int, item_bytes: int) -> int:
    """Return the number of keys that a program processes together, a power of two."""
    fitting = TILE_BYTES // (triton.next_power_of_2(dim) * item_bytes)
    return int(max(MIN_TILE, min(MAX_TILE, fitting)))


def _launch(  # noqa: PLR0917 - what attend was given, and where to put it
    work: _Work,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    step: PagedStep,
    options: AttentionOptions,
    output: Tensor,
) -> None:
    query_heads, dim = query.shape[1:]
    page_size, kv_heads = keys.shape[1:3]
    if query.stride(2) != 1:
        query = query.contiguous()
    is_partial = work.splits > 1
    shape = (len(step.contexts), query_heads, work.splits)
    parts = torch.empty(*shape, dim, dtype=torch.float32, device=query.device) if is_partial else output
    lses = torch.empty(shape, dtype=torch.float32, device=query.device) if is_partial else output
    padded_dim = max(MIN_TILE, triton.next_power_of_2(dim))
    triton_kernels.attend_tiles[work.tiles, kv_heads, work.splits](
        query,
        keys,
        values,
        parts,
        lses,
        output if options.sinks is None else options.sinks,
        step.starts,
        step.contexts,
        step.tables,
        step.tables.stride(0),
        len(step.contexts),
        work.splits,
        query.stride(0),
        query.stride(1),
        options.scale,
        options.softcap or 0.0,
        window=options.window or 0,
        page_size=page_size,
        kv_heads=kv_heads,
        groups=query_heads // kv_heads,
        dim=dim,
        padded_dim=padded_dim,
        tile_rows=work.tile_rows,
        tile=work.tile,
        tile_keys=tile_keys_of(dim, keys.element_size()),
        is_decoding=work.is_decoding,
        is_partial=is_partial,
        has_softcap=options.softcap is not None,
        has_sinks=options.sinks is not None,
    )
    if is_partial:
        triton_kernels.merge_splits[shape[:2]](
            parts, lses, output, step.starts, work.splits, dim=dim, padded_dim=padded_dim
        )


def _splits(programs: int, longest_context: int, tile_keys: int, device: torch.device) -> int:
    """Return the number of programs that share each row's keys, for about two programs per multiprocessor."""
    wanted = 2 * _multiprocessors(device) // programs
    return max(1, min(wanted, -(-longest_context // tile_keys), MAX_SPLITS))


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
