"""Norms, gated layers and rotary embeddings in one pass over their rows instead of torch's many.

They are recognized by their output on random float32 rows: a module that does not compute the formula is kept.
"""

import copy
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from engine.cpu.row_kernels import cpu_row_kernels

_PROBE_ROWS: Final = 3
_PROBE_WIDTH: Final = 32
_SEED: Final = 1
_TOLERANCE: Final = 1e-5  # of the largest output


class RowKernels(Protocol):
    """Computes rows on one kind of device. Results have the rows' dtype."""

    @property
    def multiple(self) -> int:
        """Widths, and halves of heads, are multiples of it."""

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return rows (…, width) / sqrt(mean(rows²) + epsilon) · weight, float32 [width]."""

    def silu_multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) · up for [R, width] whose rows may be parts of wider ones."""

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query (1, Hq, T, D) and key (1, Hkv, T, D), whose last stride is 1, by cos and sin (1, T, D)."""


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + epsilon) · weight."""

    weight: Tensor

    def __init__(self, kernels: RowKernels, weight: Tensor, epsilon: float) -> None:
        """`weight` is float32, [width]."""
        super().__init__()
        self.register_buffer("weight", weight)
        self._epsilon = epsilon
        self._kernels = kernels

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, width) to the same."""
        return self._kernels.rms_norm(rows, self.weight, self._epsilon)


class GatedLayer(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, kernels: RowKernels, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down  # the names that adapters know them by
        self._kernels = kernels

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        gate, up = _as_rows(self.gate_proj(rows)), _as_rows(self.up_proj(rows))
        product: Tensor = self.down_proj(self._kernels.silu_multiply(gate, up).view(*rows.shape[:-1], -1))
        return product


class RotaryEmbedding:
    """The function that transformers' models call `apply_rotary_pos_emb`."""

    NAME: Final = "apply_rotary_pos_emb"

    def __init__(self, kernels: RowKernels) -> None:
        self._kernels = kernels

    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query (1, Hq, T, D) and key (1, Hkv, T, D) by cos and sin (1, T, D)."""
        query, key = (heads if heads.stride(3) == 1 else heads.contiguous() for heads in (query, key))
        return self._kernels.rotate(query, key, cos.contiguous(), sin.contiguous())


def _as_rows(projected: Tensor) -> Tensor:
    """Reshape (…, width) to (rows, width), without a copy if it is part of a wider product."""
    rows = projected.flatten(0, -2)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def speed_up_rows(model: nn.Module) -> None:
    """Replace the recognized modules in place; the model's results stay the same.

    Does nothing without kernels: without a C compiler or Triton, on other devices, and for models with several dtypes
    or, on a CPU, another one than float32.
    """
    kinds = {(parameter.device, parameter.dtype) for parameter in model.parameters()}
    if len(kinds) != 1:
        return
    ((device, dtype),) = kinds
    kernels = row_kernels_for(device, dtype)
    if kernels is None:
        return
    with device:
        for name, module in list(model.named_modules()):
            replacement = _rms_norm(kernels, module) or _gated_layer(kernels, module)
            if replacement is not None:
                model.set_submodule(name, replacement)
            else:
                _bind_rotary(kernels, module)


def row_kernels_for(device: torch.device, dtype: torch.dtype) -> RowKernels | None:
    """Return the kernels for rows on `device`; None if there are none."""
    if device.type == "cpu" and dtype is torch.float32:
        return cpu_row_kernels()
    if device.type == "cuda" and dtype.is_floating_point and find_spec("triton") is not None:
        from engine.model.triton_rows import TritonRowKernels  # noqa: PLC0415 - only CUDA builds of torch bring triton

        return TritonRowKernels()
    return None


def _rms_norm(kernels: RowKernels, module: nn.Module) -> RmsNorm | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    if len(weight) % kernels.multiple:
        return None
    original = copy.deepcopy(module).float()
    for scale in (weight.detach().float(), 1 + weight.detach().float()):  # Gemma's weights are around 0
        norm = RmsNorm(kernels, scale.contiguous(), epsilon)
        if _computes_the_same(original, norm, len(weight)):
            return norm
    return None


def _gated_layer(kernels: RowKernels, module: nn.Module) -> GatedLayer | None:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
        return None
    if gate.out_features % kernels.multiple:
        return None
    # With small products instead of its weights, which may be gigabytes.
    width = _PROBE_WIDTH
    small = [nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)]
    original = copy.deepcopy(module, {id(own): other for own, other in zip((gate, up, down), small, strict=True)})
    if not _computes_the_same(original, GatedLayer(kernels, *small), width):
        return None
    return GatedLayer(kernels, gate, up, down)


def _bind_rotary(kernels: RowKernels, attention: nn.Module) -> None:
    """Make a layer's forward call a `RotaryEmbedding` instead of its module's function, if they compute the same.

    transformers has no hook for it, and the process's other models keep the function: the name is rebound for this
    layer's forward only.
    """
    rotary = RotaryEmbedding(kernels)
    forward, dim = type(attention).forward, getattr(attention, "head_dim", None)
    if not isinstance(forward, FunctionType) or rotary.NAME not in forward.__code__.co_names:
        return
    original = forward.__globals__.get(rotary.NAME)
    if original is None or not isinstance(dim, int) or dim % (2 * kernels.multiple):
        return
    query, key = _random(1, _PROBE_ROWS, 4, dim).transpose(1, 2), _random(1, _PROBE_ROWS, 2, dim).transpose(1, 2)
    cos, sin = _random(1, _PROBE_ROWS, dim), _random(1, _PROBE_ROWS, dim) + 1
    try:
        expected = original(query, key, cos, sin)
    except (TypeError, RuntimeError):  # it needs other arguments
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
    except (TypeError, RuntimeError):  # it needs other arguments than rows
        return False
    return isinstance(expected, Tensor) and _is_close(other(rows), expected)


def _random(*shape: int) -> Tensor:
    """Draw numbers on the CPU, equal for every device, and move them to the current one."""
    drawn = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(_SEED), device="cpu")
    return drawn.to(torch.get_default_device())


def _is_close(computed: Tensor, expected: Tensor) -> bool:
    if computed.shape != expected.shape:
        return False
    return torch.allclose(computed, expected, rtol=0, atol=_TOLERANCE * float(expected.abs().max()))
