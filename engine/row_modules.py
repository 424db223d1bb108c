"""Norms and gated layers of a model on a CPU, in one pass over their rows (rows.c) instead of torch's four to eight.

Which modules these are is seen by what they compute, on random rows: one whose output is not the formula's stays.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine.native import compiled

_LANES: Final = 16  # a row's width is a multiple of it
_PROBE_ROWS: Final = 3
_SEED: Final = 1
_TOLERANCE: Final = 1e-5  # of the largest output
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_NORM_ARGUMENTS: Final[Sequence[type[Any]]] = [_POINTER, _INTEGER, _INTEGER, _POINTER, ctypes.c_float, _POINTER]
_GATED_ARGUMENTS: Final[Sequence[type[Any]]] = [*(_POINTER, _INTEGER) * 2, _INTEGER, _INTEGER, _POINTER]


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + epsilon) · weight."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, epsilon: float) -> None:
        """`weight` is float32, [width]."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._epsilon = epsilon
        self._compute = library.rms_norm

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, width) to the same."""
        rows = rows.contiguous()
        output, width = torch.empty_like(rows), rows.shape[-1]
        self._compute(
            *(rows.data_ptr(), rows.numel() // width, width, self.weight.data_ptr(), self._epsilon, output.data_ptr())
        )
        return output


class GatedLayer(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, library: ctypes.CDLL, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down  # the names that adapters know them by
        self._compute = library.silu_multiply

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        gate, up = _as_rows(self.gate_proj(rows)), _as_rows(self.up_proj(rows))
        count, width = gate.shape
        output = torch.empty(*rows.shape[:-1], width)
        self._compute(*(gate.data_ptr(), gate.stride(0), up.data_ptr(), up.stride(0), count, width, output.data_ptr()))
        product: Tensor = self.down_proj(output)
        return product


def _as_rows(projected: Tensor) -> Tensor:
    """Make (…, width) two dimensions, without a copy where it is a part of a wider product."""
    rows = projected.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def speed_up_rows(model: nn.Module) -> None:
    """Replace what is known, in place; the model computes the same.

    Does nothing where there is no C compiler, or for models that are not float32 on a CPU.
    """
    kinds = {(parameter.device.type, parameter.dtype) for parameter in model.parameters()}
    library = _library() if kinds == {("cpu", torch.float32)} else None
    if library is None:
        return
    for name, module in list(model.named_modules()):
        replacement = _rms_norm(library, module) or _gated_layer(library, module)
        if replacement is not None:
            model.set_submodule(name, replacement)


def _rms_norm(library: ctypes.CDLL, module: nn.Module) -> RmsNorm | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    if len(weight) % _LANES:
        return None
    for scale in (weight, 1 + weight):  # Gemma's weights are around 0
        norm = RmsNorm(library, scale.detach().contiguous(), epsilon)
        if _computes_the_same(module, norm, len(weight)):
            return norm
    return None


def _gated_layer(library: ctypes.CDLL, module: nn.Module) -> GatedLayer | None:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
        return None
    layer = GatedLayer(library, gate, up, down)
    if gate.out_features % _LANES or not _computes_the_same(module, layer, gate.in_features):
        return None
    return layer


def _computes_the_same(module: nn.Module, other: nn.Module, width: int) -> bool:
    rows = torch.randn(_PROBE_ROWS, width, generator=torch.Generator().manual_seed(_SEED))
    try:
        expected = module(rows)
    except (TypeError, RuntimeError):  # it asks for something else than rows
        return False
    if not isinstance(expected, Tensor):
        return False
    computed = other(rows)
    largest = float(expected.abs().max())
    return computed.shape == expected.shape and torch.allclose(computed, expected, rtol=0, atol=_TOLERANCE * largest)


@cache
def _library() -> ctypes.CDLL | None:
    library = compiled("rows.c")
    if library is not None:
        library.rms_norm.argtypes, library.rms_norm.restype = _NORM_ARGUMENTS, None
        library.silu_multiply.argtypes, library.silu_multiply.restype = _GATED_ARGUMENTS, None
    return library
