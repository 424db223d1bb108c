"""Products of a few rows with weights that oneDNN has packed, by few_rows.c where that is faster than oneDNN's own."""

import ctypes
from functools import cache
from typing import Final

import torch
from torch import Tensor

from engine.native import compiled

MOST_ROWS: Final = 48  # measured: at 48 rows a fifth faster than oneDNN in float32, at 64 a tenth, in int8 slower
_PANEL: Final = 64  # outputs that oneDNN lays out together where registers have 512 bits
_LANES: Final = 16  # inputs come in multiples of it
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64


class FewRowsKernel:
    """The compiled functions. Rows are float32, of any leading dimensions; weights are addresses that oneDNN packed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._multiply = library.float_few_rows
        self._multiply.argtypes = [_POINTER, _INTEGER, _INTEGER, _POINTER, _INTEGER, _POINTER, _POINTER]
        self._round = library.round_rows
        self._round.argtypes = [_POINTER, _INTEGER, _INTEGER, _POINTER, _POINTER]
        # Not there on a CPU without AVX-512 VNNI, where int8 is refused.
        self._multiply_int8 = getattr(library, "int8_few_rows", None)
        if self._multiply_int8 is not None:
            self._multiply_int8.argtypes = [*[_POINTER] * 2, *[_INTEGER] * 2, _POINTER, _INTEGER, *[_POINTER] * 3]

    def multiply(self, rows: Tensor, weights: int, outputs: int, bias: Tensor | None) -> Tensor:
        """Return rows · weightsᵀ + bias."""
        rows = rows.contiguous()
        inputs = rows.shape[-1]
        output = torch.empty(*rows.shape[:-1], outputs)
        bias_address = None if bias is None else bias.data_ptr()
        self._multiply(
            rows.data_ptr(), rows.numel() // inputs, inputs, weights, outputs, bias_address, output.data_ptr()
        )
        return output

    def round_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows as unsigned bytes around 128, and each row's largest magnitude (…, 1), which is 127 steps."""
        rows = rows.contiguous()
        rounded, largest = torch.empty(rows.shape, dtype=torch.uint8), torch.empty(*rows.shape[:-1], 1)
        self._round(rows.data_ptr(), largest.numel(), rows.shape[-1], rounded.data_ptr(), largest.data_ptr())
        return rounded, largest

    def multiply_int8(self, rounded: Tensor, largest: Tensor, weights: int, offsets: Tensor, scales: Tensor) -> Tensor:
        """Return the product of `round_rows`' result; offsets and scales [outputs] as few_rows.c has them."""
        assert self._multiply_int8 is not None  # noqa: S101
        output = torch.empty(*rounded.shape[:-1], len(scales))
        self._multiply_int8(
            *(rounded.data_ptr(), largest.data_ptr(), largest.numel(), rounded.shape[-1]),
            *(weights, len(scales), offsets.data_ptr(), scales.data_ptr(), output.data_ptr()),
        )
        return output


def few_rows_kernel(packed: int, weight: Tensor) -> FewRowsKernel | None:
    """Return the kernel if it can read what oneDNN keeps at `packed` for a weight [outputs, inputs], float32 or int8.

    How oneDNN lays weights out depends on the CPU and is nowhere promised, so its first and last panel are looked at.
    """
    outputs, inputs = weight.shape
    if outputs % _PANEL or inputs % _LANES:
        return None
    together = 4 // weight.itemsize  # inputs of an output that lie side by side
    panel_bytes = _PANEL * inputs * weight.itemsize
    for panel in (0, outputs // _PANEL - 1):
        own = weight[panel * _PANEL : (panel + 1) * _PANEL]
        expected = own.view(_PANEL, inputs // together, together).transpose(0, 1).reshape(-1)
        memory = (ctypes.c_char * panel_bytes).from_address(packed + panel * panel_bytes)
        if not torch.equal(torch.frombuffer(memory, dtype=weight.dtype), expected):
            return None
    return _kernel()


@cache
def _kernel() -> FewRowsKernel | None:
    library = compiled("few_rows.c")
    return None if library is None else FewRowsKernel(library)
