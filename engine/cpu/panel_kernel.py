"""Multiplies rows by weights in oneDNN's packed layout, with the compiled functions of panels.c."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from engine.cpu.native import INTEGER, LANES, POINTER, compiled

PANELS_SOURCE: Final = "panels.c"
_PANEL: Final = 64  # outputs per panel in oneDNN's layout for 512-bit registers
_MATRICES: Final[Sequence[type[Any]]] = [POINTER, INTEGER, INTEGER, POINTER, INTEGER]  # rows, weights, outputs


class PanelKernel:
    """The compiled functions. Rows (…, in) are float32; weights are addresses of oneDNN's packed memory."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._multiply_float = library.multiply_float
        self._multiply_float.argtypes = [*_MATRICES, *[POINTER] * 2]
        # Missing on a CPU without AVX-512 VNNI, where int8 is refused.
        self._multiply_int8 = getattr(library, "multiply_int8", None)
        if self._multiply_int8 is not None:
            self._multiply_int8.argtypes = [*_MATRICES, *[POINTER] * 6]

    def multiply_float(self, rows: Tensor, weights: int, outputs: int, bias: Tensor | None) -> Tensor:
        """Return rows · weightsᵀ + bias: (…, in) → (…, outputs)."""
        rows = rows.contiguous()
        inputs = rows.shape[-1]
        output = torch.empty(*rows.shape[:-1], outputs)
        self._multiply_float(
            *(rows.data_ptr(), rows.numel() // inputs, inputs, weights, outputs),
            *(None if bias is None else bias.data_ptr(), output.data_ptr()),
        )
        return output

    def multiply_int8(self, rows: Tensor, weights: int, offsets: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """Return rows · weightsᵀ + bias, in integers; offsets and scales [outputs] as panels.c has them."""
        assert self._multiply_int8 is not None  # noqa: S101
        rows = rows.contiguous()
        inputs, outputs = rows.shape[-1], scales.shape[0]
        count = rows.numel() // inputs
        rounded, largest = torch.empty(count, inputs, dtype=torch.uint8), torch.empty(count)
        output = torch.empty(*rows.shape[:-1], outputs)
        self._multiply_int8(
            *(rows.data_ptr(), count, inputs, weights, outputs, offsets.data_ptr(), scales.data_ptr()),
            *(None if bias is None else bias.data_ptr(), rounded.data_ptr(), largest.data_ptr(), output.data_ptr()),
        )
        return output


def panel_kernel(packed: int, weight: Tensor) -> PanelKernel | None:
    """Return the kernel if it can read oneDNN's memory at `packed` for a weight [outputs, inputs], float32 or int8.

    oneDNN's layout depends on the CPU and is not documented, so its first and last panel are compared.
    """
    outputs, inputs = weight.shape
    if outputs % _PANEL or inputs % LANES:
        return None
    together = 4 // weight.itemsize  # adjacent inputs of one output
    panel_bytes = _PANEL * inputs * weight.itemsize
    for panel in (0, outputs // _PANEL - 1):
        own = weight[panel * _PANEL : (panel + 1) * _PANEL]
        expected = own.view(_PANEL, inputs // together, together).transpose(0, 1).reshape(-1)
        memory = (ctypes.c_char * panel_bytes).from_address(packed + panel * panel_bytes)
        if not torch.equal(torch.frombuffer(memory, dtype=weight.dtype), expected):
            return None
    return _kernel()


@cache
def _kernel() -> PanelKernel | None:
    library = compiled(PANELS_SOURCE)
    return None if library is None else PanelKernel(library)
