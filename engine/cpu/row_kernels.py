"""Norms, gates and rotary embeddings of float32 rows on a CPU: rows.c, called without torch's dispatch."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from engine.cpu.native import INTEGER, LANES, POINTER, compiled

ROWS_SOURCE: Final = "rows.c"
_NORM_ARGUMENTS: Final[Sequence[type[Any]]] = [POINTER, INTEGER, INTEGER, POINTER, ctypes.c_float, POINTER]
_ROTARY_ARGUMENTS: Final[Sequence[type[Any]]] = [POINTER, *[INTEGER] * 5, *[POINTER] * 3]
_GATED_ARGUMENTS: Final[Sequence[type[Any]]] = [*(POINTER, INTEGER) * 2, INTEGER, INTEGER, POINTER]


class CpuRowKernels:
    """The functions of rows.c as `row_modules.RowKernels`."""

    multiple: Final = LANES

    def __init__(self, library: ctypes.CDLL) -> None:
        self._norm, self._rotate, self._silu_multiply = library.rms_norm, library.rotate, library.silu_multiply
        self._norm.argtypes, self._norm.restype = _NORM_ARGUMENTS, None
        self._rotate.argtypes, self._rotate.restype = _ROTARY_ARGUMENTS, None
        self._silu_multiply.argtypes, self._silu_multiply.restype = _GATED_ARGUMENTS, None

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return rows (…, width) / sqrt(mean(rows²) + epsilon) · weight [width]."""
        rows = rows.contiguous()
        output, width = torch.empty_like(rows), rows.shape[-1]
        self._norm(*(rows.data_ptr(), rows.numel() // width, width, weight.data_ptr(), epsilon, output.data_ptr()))
        return output

    def silu_multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) · up for [R, width] whose rows may be parts of wider ones."""
        count, width = gate.shape
        output = torch.empty(count, width)
        self._silu_multiply(
            *(gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), count, width, output.data_ptr())
        )
        return output

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query (1, Hq, T, D) and key (1, Hkv, T, D), whose last stride is 1, by cos and sin (1, T, D)."""
        return self._rotated(query, cos, sin), self._rotated(key, cos, sin)

    def _rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        _, count, rows, dim = heads.shape
        output = torch.empty(1, rows, count, dim)
        self._rotate(
            *(heads.data_ptr(), heads.stride(1), heads.stride(2), count, rows, dim),
            *(cos.data_ptr(), sin.data_ptr(), output.data_ptr()),
        )
        return output.transpose(1, 2)


@cache
def cpu_row_kernels() -> CpuRowKernels | None:
    """Return the compiled kernels; None without a C compiler."""
    library = compiled(ROWS_SOURCE)
    return None if library is None else CpuRowKernels(library)
