"""Norms, gated layers and rotary embeddings on a CPU, in one pass over their rows (rows.c) instead of torch's many.

They are recognised by their output on random rows: a module that does not compute the formula is kept.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from types import FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine.cpu.native import INTEGER, LANES, POINTER, compiled

ROWS_SOURCE: Final = "rows.c"
_PROBE_ROWS: Final = 3
_SEED: Final = 1
_TOLERANCE: Final = 1e-5  # of the largest output
_NORM_ARGUMENTS: Final[Sequence[type[Any]]] = [POINTER, INTEGER, INTEGER, POINTER, ctypes.c_float, POINTER]
_ROTARY_ARGUMENTS: Final[Sequence[type[Any]]] = [POINTER, *[INTEGER] * 5, *[POINTER] * 3]
_GATED_ARGUMENTS: Final[Sequence[type[Any]]] = [*(POINTER, INTEGER) * 2, INTEGER, INTEGER, POINTER]


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


class RotaryEmbedding:
    """The function that transformers' models call `apply_rotary_pos_emb`."""

    NAME: Final = "apply_rotary_pos_emb"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._compute = library.rotate

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query (1, Hq, T, D) and key (1, Hkv, T, D) by cos and sin (1, T, D)."""
        cos, sin = cos.contiguous(), sin.contiguous()
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = heads if heads.stride(3) == 1 else heads.contiguous()
        _, count, rows, dim = heads.shape
        output = torch.empty(1, rows, count, dim)
        self._compute(
            *(heads.data_ptr(), heads.stride(1), heads.stride(2), count, rows, dim),
            *(cos.data_ptr(), sin.data_ptr(), output.data_ptr()),
        )
        return output.transpose(1, 2)


def _as_rows(projected: Tensor) -> Tensor:
    """Reshape (…, width) to (rows, width), without a copy where it is a part of a wider product."""
    rows = projected.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def speed_up_rows(model: nn.Module) -> None:
    """Replace the recognised modules in place; the model's results stay the same.

    Does nothing where there is no C compiler, or for models that are not float32 on a CPU.
    """
    kinds = {(parameter.device.type, parameter.dtype) for parameter in model.parameters()}
    library = _library() if kinds == {("cpu", torch.float32)} else None
    if library is None:
        return
    rotary = RotaryEmbedding(library)
    for name, module in list(model.named_modules()):
        replacement = _rms_norm(library, module) or _gated_layer(library, module)
        if replacement is not None:
            model.set_submodule(name, replacement)
        else:
            _bind_rotary(rotary, module)


def _rms_norm(library: ctypes.CDLL, module: nn.Module) -> RmsNorm | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    if len(weight) % LANES:
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
    if gate.out_features % LANES or not _computes_the_same(module, layer, gate.in_features):
        return None
    return layer


def _bind_rotary(rotary: RotaryEmbedding, attention: nn.Module) -> None:
    """Make a layer's forward call `rotary` instead of its module's function, if they compute the same.

    transformers has no hook for it, and other models of the process keep theirs: the name is rebound for this layer's
    forward only.
    """
    forward, dim = type(attention).forward, getattr(attention, "head_dim", None)
    if not isinstance(forward, FunctionType) or rotary.NAME not in forward.__code__.co_names:
        return
    original = forward.__globals__.get(rotary.NAME)
    if original is None or not isinstance(dim, int) or dim % (2 * LANES):
        return
    query, key = _random(1, _PROBE_ROWS, 4, dim).transpose(1, 2), _random(1, _PROBE_ROWS, 2, dim).transpose(1, 2)
    cos, sin = _random(1, _PROBE_ROWS, dim), _random(1, _PROBE_ROWS, dim) + 1
    try:
        expected = original(query, key, cos, sin)
    except (TypeError, RuntimeError):  # it asks for something else
        return
    if not all(map(_is_close, rotary(query, key, cos, sin), expected)):
        return
    names = {**forward.__globals__, rotary.NAME: rotary}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    attention.forward = MethodType(own, attention)


def _computes_the_same(module: nn.Module, other: nn.Module, width: int) -> bool:
    rows = _random(_PROBE_ROWS, width)
    try:
        expected = module(rows)
    except (TypeError, RuntimeError):  # it asks for something else than rows
        return False
    return isinstance(expected, Tensor) and _is_close(other(rows), expected)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))


def _is_close(computed: Tensor, expected: Tensor) -> bool:
    if computed.shape != expected.shape:
        return False
    return torch.allclose(computed, expected, rtol=0, atol=_TOLERANCE * float(expected.abs().max()))


@cache
def _library() -> ctypes.CDLL | None:
    library = compiled(ROWS_SOURCE)
    if library is not None:
        library.rms_norm.argtypes, library.rms_norm.restype = _NORM_ARGUMENTS, None
        library.rotate.argtypes, library.rotate.restype = _ROTARY_ARGUMENTS, None
        library.silu_multiply.argtypes, library.silu_multiply.restype = _GATED_ARGUMENTS, None
    return library
