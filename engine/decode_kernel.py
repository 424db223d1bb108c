"""Attention of decoding sequences by decode_attention.c; torch's own does where it cannot be compiled."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from engine.native import compiled

_LANES: Final = 16  # a head dimension is a multiple of it
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS: Final[Sequence[type[Any]]] = [
    *(_POINTER, _INTEGER, _INTEGER) * 3,  # query, key, value: each with the strides of heads and rows
    *(_POINTER, _POINTER, _INTEGER),  # the pool's keys and values, its slots
    *[_POINTER] * 4,  # rows, new slots, first parts, parts
    *[_INTEGER] * 3,  # sequences, key/value heads, query heads of each
    *(ctypes.c_float, _POINTER, _POINTER),  # scale, output, log-sum-exps
]


class NewRows(NamedTuple):
    """A layer's queries, keys and values of a step's rows, whatever their strides."""

    query: Tensor  # (1, Hq, T, D)
    key: Tensor  # (1, Hkv, T, D)
    value: Tensor  # (1, Hkv, T, D)


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """What the sequences that decode in a step see of the pool. Tensors are int64."""

    rows: Tensor  # [N]: each sequence's row in the step
    new_slots: Tensor  # [N]: where its new token goes
    first_parts: Tensor  # [N + 1]: sequence n sees parts first_parts[n] … first_parts[n + 1] - 1
    parts: Tensor  # [parts, 2]: slots that follow each other, first and end

    @classmethod
    def of(cls, rows: list[int], new_slots: list[int], parts: list[list[range]]) -> "DecodeTables":
        """Put together what each sequence's row, slot and parts are."""
        first_parts = [0]
        for own in parts:
            first_parts.append(first_parts[-1] + len(own))
        spans = [(part.start, part.stop) for own in parts for part in own]
        return cls(torch.tensor(rows), torch.tensor(new_slots), torch.tensor(first_parts), torch.tensor(spans))


class DecodeKernel:
    """The compiled function for one head dimension."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def attend(
        self, new: NewRows, pool_keys: Tensor, pool_values: Tensor, tables: DecodeTables, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of the decoding sequences in the pool (1, Hkv, slots, D), then attend.

        All is float32. Returns the output (N, Hkv, Hq / Hkv, D) and the scores' log-sum-exps (N, Hkv, Hq / Hkv).
        """
        _, query_heads, _, dim = new.query.shape
        sequences, kv_heads = len(tables.rows), new.key.shape[1]
        group = query_heads // kv_heads
        output, lse = torch.empty(sequences, kv_heads, group, dim), torch.empty(sequences, kv_heads, group)
        dense = [rows if rows.stride(3) == 1 else rows.contiguous() for rows in new]
        self._function(
            *(number for rows in dense for number in (rows.data_ptr(), rows.stride(1), rows.stride(2))),
            *(pool_keys.data_ptr(), pool_values.data_ptr(), pool_keys.shape[2]),
            *(table.data_ptr() for table in (tables.rows, tables.new_slots, tables.first_parts, tables.parts)),
            *(sequences, kv_heads, group, scale, output.data_ptr(), lse.data_ptr()),
        )
        return output, lse


@cache
def decode_kernel(head_dim: int, dtype: torch.dtype) -> DecodeKernel | None:
    """Return the kernel for heads of this dimension, or None where torch's own attention has to do."""
    if head_dim % _LANES or dtype is not torch.float32:
        return None
    library = compiled("decode_attention.c", f"HEAD_DIM={head_dim}")
    if library is None:
        return None
    function = library.decode_attention
    function.argtypes = _ARGUMENTS
    function.restype = None
    return DecodeKernel(function)
