"""Attention by attention.c; without a compiler, torch's is used."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from engine.cpu.native import INTEGER, LANES, POINTER, compiled, compiling

_SOURCE: Final = "attention.c"
_NO_WINDOW: Final = 1 << 62
_DECODE_ARGUMENTS: Final[Sequence[type[Any]]] = [
    *(POINTER, INTEGER, INTEGER) * 3,  # query, key, value: each with the strides of heads and rows
    *(POINTER, POINTER, INTEGER),  # the pool's keys and values, its slots
    *[POINTER] * 4,  # rows, new slots, first parts, parts
    *[INTEGER] * 3,  # sequences, key/value heads, query heads of each
    *(ctypes.c_float, POINTER, POINTER),  # scale, output, log-sum-exps
]
_CHUNK_ARGUMENTS: Final[Sequence[type[Any]]] = [
    *(POINTER, INTEGER, INTEGER),  # query with the strides of heads and rows
    *(POINTER, POINTER, INTEGER),  # the pool's keys and values, its slots
    *(POINTER, INTEGER, INTEGER),  # parts, their number, the first token in them
    *[INTEGER] * 5,  # rows, context, window, key/value heads, query heads of each
    *(ctypes.c_float, POINTER, POINTER),  # scale, output, log-sum-exps
]


class NewRows(NamedTuple):
    """A layer's queries, keys and values of a step's rows, with any strides."""

    query: Tensor  # (1, Hq, T, D)
    key: Tensor  # (1, Hkv, T, D)
    value: Tensor  # (1, Hkv, T, D)


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """The pool slots visible to the sequences that decode in a step. Tensors are int64."""

    rows: Tensor  # [N]: each sequence's row in the step
    new_slots: Tensor  # [N]: where its new token goes
    first_parts: Tensor  # [N + 1]: sequence n sees parts first_parts[n] … first_parts[n + 1] - 1
    parts: Tensor  # [parts, 2]: slots that follow each other, first and end

    @classmethod
    def of(cls, rows: list[int], new_slots: list[int], parts: list[list[range]]) -> "DecodeTables":
        """Build the tensors from each sequence's row, new slot and parts."""
        first_parts = [0]
        for own in parts:
            first_parts.append(first_parts[-1] + len(own))
        spans = [(part.start, part.stop) for own in parts for part in own]
        return cls(torch.tensor(rows), torch.tensor(new_slots), torch.tensor(first_parts), torch.tensor(spans))


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """The pool slots visible to the rows of one sequence's chunk."""

    rows: int  # the sequence's last tokens
    context: int  # all its tokens
    first: int  # the first token that any row sees
    window: int | None  # a row sees this many last tokens, including itself
    parts: Tensor  # int64 [parts, 2]: slots that follow each other, first and end, of the tokens from `first` on

    @classmethod
    def of(cls, rows: int, context: int, first: int, window: int | None, parts: list[range]) -> "ChunkTable":
        """Build the table of a chunk's parts."""
        return cls(rows, context, first, window, torch.tensor([(part.start, part.stop) for part in parts]))


class AttentionKernel:
    """The compiled functions for one head dimension. All tensors are float32."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._decode = library.decode_attention
        self._decode.argtypes, self._decode.restype = _DECODE_ARGUMENTS, None
        self._attend_chunk = library.chunk_attention
        self._attend_chunk.argtypes, self._attend_chunk.restype = _CHUNK_ARGUMENTS, None

    def decode(
        self, new: NewRows, pool_keys: Tensor, pool_values: Tensor, tables: DecodeTables, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of the decoding sequences in the pool (1, Hkv, slots, D), then attend.

        Returns the output (N, Hkv, Hq / Hkv, D) and the scores' log-sum-exps (N, Hkv, Hq / Hkv).
        """
        sequences, kv_heads = tables.rows.shape[0], new.key.shape[1]
        group, output, lse = _results(sequences, new.query, kv_heads)
        dense = [rows if rows.stride(3) == 1 else rows.contiguous() for rows in new]
        self._decode(
            *(number for rows in dense for number in (rows.data_ptr(), rows.stride(1), rows.stride(2))),
            *(pool_keys.data_ptr(), pool_values.data_ptr(), pool_keys.shape[2]),
            *(table.data_ptr() for table in (tables.rows, tables.new_slots, tables.first_parts, tables.parts)),
            *(sequences, kv_heads, group, scale, output.data_ptr(), lse.data_ptr()),
        )
        return output, lse

    def attend_chunk(
        self, query: Tensor, pool_keys: Tensor, pool_values: Tensor, table: ChunkTable, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend with a sequence's rows (1, Hq, rows, D), whose keys and values are in the pool (1, Hkv, slots, D).

        Returns the output (rows, Hkv, Hq / Hkv, D) and the scores' log-sum-exps (rows, Hkv, Hq / Hkv).
        """
        kv_heads = pool_keys.shape[1]
        group, output, lse = _results(table.rows, query, kv_heads)
        query = query if query.stride(3) == 1 else query.contiguous()
        self._attend_chunk(
            *(query.data_ptr(), query.stride(1), query.stride(2)),
            *(pool_keys.data_ptr(), pool_values.data_ptr(), pool_keys.shape[2]),
            *(table.parts.data_ptr(), table.parts.shape[0], table.first),
            *(table.rows, table.context, table.window or _NO_WINDOW, kv_heads, group),
            *(scale, output.data_ptr(), lse.data_ptr()),
        )
        return output, lse


def _results(rows: int, query: Tensor, kv_heads: int) -> tuple[int, Tensor, Tensor]:
    """Return G = Hq / Hkv, an empty output (rows, Hkv, G, D) and its empty log-sum-exps (rows, Hkv, G)."""
    group, dim = query.shape[1] // kv_heads, query.shape[3]
    return group, torch.empty(rows, kv_heads, group, dim), torch.empty(rows, kv_heads, group)


def begin_compiling(head_dim: int, dtype: torch.dtype) -> None:
    """Start to compile the kernel for heads of this dimension in the background, if one supports them."""
    if _is_for(head_dim, dtype):
        compiling(_SOURCE, f"HEAD_DIM={head_dim}")


@cache
def attention_kernel(head_dim: int, dtype: torch.dtype) -> AttentionKernel | None:
    """Return the kernel for heads of this dimension; None if torch's attention must be used."""
    library = compiled(_SOURCE, f"HEAD_DIM={head_dim}") if _is_for(head_dim, dtype) else None
    return None if library is None else AttentionKernel(library)


def _is_for(head_dim: int, dtype: torch.dtype) -> bool:
    return head_dim % LANES == 0 and dtype is torch.float32
