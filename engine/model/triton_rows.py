"""Norms, gates and rotary embeddings of rows on a GPU: one kernel each (`triton_row_kernels`), not torch's many.

A decoding step of few sequences is a chain of kernels of a few microseconds each, so their number determines its time.
"""

from typing import Final

import torch
import triton
from torch import Tensor

from engine.model import triton_row_kernels

ELEMENTS_PER_WARP: Final = 256
MAX_WARPS: Final = 16
TILE_COLUMNS: Final = 1024
TILE_HEADS: Final = 16


class TritonRowKernels:
    """The kernels as `row_modules.RowKernels`, for rows of any floating dtype."""

    multiple: Final = 1

    def rms_norm(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return rows (…, width) / sqrt(mean(rows²) + epsilon) · weight, float32 [width]."""
        output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        width = rows.shape[-1]
        count = rows.numel() // width
        if rows.dim() == 4 and len(rows) == 1 and rows.stride(3) == 1:  # heads (1, T, H, D), parts of a wider product
            inner, outer_stride, inner_stride = rows.shape[2], rows.stride(1), rows.stride(2)
        else:
            rows = rows.contiguous()
            inner, outer_stride, inner_stride = 1, width, 0
        padded_width = triton.next_power_of_2(width)
        warps = max(1, min(MAX_WARPS, padded_width // ELEMENTS_PER_WARP))
        if count:
            triton_row_kernels.rms_norm[count,](
                *(rows, weight, output, inner, outer_stride, inner_stride, epsilon),
                width=width,
                padded_width=padded_width,
                num_warps=warps,
            )
        return output

    def silu_multiply(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return silu(gate) · up for [R, width] whose rows may be parts of wider ones."""
        output = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        count, width = gate.shape
        if count:
            triton_row_kernels.silu_multiply[count, triton.cdiv(width, TILE_COLUMNS)](
                *(gate, up, output, gate.stride(0), up.stride(0)), width=width, tile=TILE_COLUMNS
            )
        return output

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query (1, Hq, T, D) and key (1, Hkv, T, D), whose last stride is 1, by cos and sin (1, T, D)."""
        _, query_heads, count, dim = query.shape
        key_heads = key.shape[1]
        turned_query = torch.empty(1, count, query_heads, dim, dtype=query.dtype, device=query.device)
        turned_key = torch.empty(1, count, key_heads, dim, dtype=key.dtype, device=key.device)
        if count:
            triton_row_kernels.rotate[count, triton.cdiv(query_heads + key_heads, TILE_HEADS)](
                *(query, key, cos, sin, turned_query, turned_key),
                *(query.stride(1), query.stride(2), key.stride(1), key.stride(2)),
                query_heads=query_heads,
                key_heads=key_heads,
                half=dim // 2,
                padded_half=triton.next_power_of_2(dim // 2),
                tile_heads=TILE_HEADS,
            )
        return turned_query.transpose(1, 2), turned_key.transpose(1, 2)
