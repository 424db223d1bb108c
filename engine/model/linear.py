"""Linear layers in the form that this CPU computes fastest, or in 8-bit integers.

Measured with weights from main memory, as in a real step (2 threads, float32): oneDNN's own layout is 1.1 to 4 times
faster than `nn.Linear` from eight rows on, on Intel and on AMD. The kernel in panels.c reads that layout too: in
float32 it takes 20 to 30 % less time for the few rows of a step that only decodes, and in 8-bit integers half the time
for few rows and a sixth less for hundreds.
"""

from typing import Final

import torch
from torch import Tensor, nn

from engine.config import Quantization
from engine.cpu.panel_kernel import panel_kernel
from engine.errors import ConfigError

FEW_ROWS: Final = 64  # up to here panels.c is clearly faster in float32; from twice as many on, oneDNN is
_PACKED_FOR_ROWS: Final = 32  # oneDNN's layout for so many rows suits one row and hundreds, too; measured 1 … 256


def memory_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the addresses of the weights that oneDNN keeps for a module: the first, and one past the last."""
    if not isinstance(module, PackedLinear | Int8Linear):
        return None
    first = _address_of(module.packed)
    return first, first + int(torch.ops.mkldnn._nbytes(module.packed))  # noqa: SLF001


def _address_of(packed: Tensor) -> int:
    return int(torch.ops.mkldnn.data_ptr(packed))


class PackedLinear(nn.Module):
    """The product with weights that oneDNN has laid out for this CPU.

    The operators are the ones torch.compile uses when it freezes a model's weights.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._outputs, self._inputs = weight.shape
        self._bias = bias
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)  # noqa: SLF001
        self._address = _address_of(self.packed)
        self._kernel = panel_kernel(self._address, weight) if weight.dtype is torch.float32 else None

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        if self._kernel is not None and rows.numel() <= FEW_ROWS * self._inputs:
            return self._kernel.multiply_float(rows, self._address, self._outputs, self._bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self._bias, "none", [], "")  # noqa: SLF001
        return output


class Int8Linear(nn.Module):
    """The product in 8-bit integers: weights rounded once, with a scale per output; rows per call, with a scale each.

    Sums are exact 32-bit integers, so a row's result does not depend on the rest of the batch.
    """

    _ZERO_POINT: Final = 128  # rows are unsigned bytes: the CPU multiplies those with signed weights
    _LARGEST: Final = 127

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scales = weight.float().abs().amax(dim=1).clamp_(min=torch.finfo(torch.float32).tiny) / self._LARGEST
        rounded = torch.round(weight.float() / scales[:, None]).to(torch.int8)
        self.packed: Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._address = _address_of(self.packed)
        self._kernel = panel_kernel(self._address, rounded)
        # A row's own scale, its largest magnitude / 127, is applied after the product.
        self._scales = scales / self._LARGEST
        self._offsets = -self._ZERO_POINT * rounded.sum(dim=1, dtype=torch.int32)
        self._zero_points = torch.zeros(len(weight), dtype=torch.int64)
        self._bias = bias

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, in) to (…, out)."""
        if self._kernel is not None:
            return self._kernel.multiply_int8(rows, self._address, self._offsets, self._scales, self._bias)
        output = self._multiply_by_onednn(rows)
        return output if self._bias is None else output.add_(self._bias)

    def _multiply_by_onednn(self, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(dim=-1, keepdim=True)
        # Half a step is added because the conversion truncates. A row of zeros rounds to anything, times zero.
        shifted = (rows * torch.div(self._LARGEST, largest)).add_(self._ZERO_POINT + 0.5)
        products: Tensor = torch.ops.onednn.qlinear_pointwise(
            shifted.to(torch.uint8), 1.0, self._ZERO_POINT, self.packed, self._scales, self._zero_points,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        products = products.view(*rows.shape[:-1], len(self._scales))  # with no rows, a dimension would be missing
        return products.mul_(largest)


def check_quantization(quantize: Quantization | None, *, device: str, dtype: torch.dtype) -> None:
    """Raise ConfigError if this machine cannot compute in 8-bit integers."""
    if quantize is None:
        return
    if device != "cpu" or dtype is not torch.float32:
        raise ConfigError("quantize", "int8 requires a float32 model on a CPU")
    if not torch.cpu._is_vnni_supported():  # noqa: SLF001 - no public equivalent exists
        raise ConfigError("quantize", "int8 requires a CPU with AVX-512 VNNI; it would be slower than float32 here")


def make_fast_linear(weight: Tensor, bias: Tensor | None, quantize: Quantization | None) -> nn.Module:
    """Return the module that computes rows · weightᵀ + bias fastest; weight is [out, in]."""
    if quantize == "int8":
        return Int8Linear(weight, bias)
    if weight.dtype in _packable_dtypes(weight.device):
        return PackedLinear(weight, bias)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _packable_dtypes(device: torch.device) -> set[torch.dtype]:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return set()
    supported = {
        torch.float32: True,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),  # noqa: SLF001
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),  # noqa: SLF001
    }
    return {dtype for dtype, is_supported in supported.items() if is_supported}
