"""The Triton kernels of norms, gates and rotary embeddings; `triton_rows` launches them.

All compute in float32, for any dtype of the rows, and round once. Nothing is read back: launches can be recorded in a
CUDA graph.
"""

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    rows,  # row r begins at (r // inner) · outer_stride + (r % inner) · inner_stride
    weight,  # float32 [width]
    output,  # [R, width]
    inner,
    outer_stride,
    inner_stride,
    epsilon,
    width: tl.constexpr,
    padded_width: tl.constexpr,  # a power of two
):
    """Normalize one row: program (R)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, padded_width)
    is_column = columns < width
    start = (row // inner) * outer_stride + (row % inner) * inner_stride
    values = tl.load(rows + start + columns, mask=is_column, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + epsilon)
    normed = values * scale * tl.load(weight + columns, mask=is_column, other=0.0)
    tl.store(output + row * width + columns, normed.to(output.dtype.element_ty), mask=is_column)


@triton.jit
def silu_multiply(
    gate,  # [R, width], rows gate_stride apart
    up,
    output,  # [R, width]
    gate_stride,
    up_stride,
    width: tl.constexpr,
    tile: tl.constexpr,
):
    """Multiply silu(gate) by up for some columns of one row: program (R, tiles)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * tile + tl.arange(0, tile)
    is_column = columns < width
    x = tl.load(gate + row * gate_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + columns, mask=is_column, other=0.0).to(tl.float32)
    product = x / (1.0 + tl.exp(-x)) * y
    tl.store(output + row * width + columns, product.to(output.dtype.element_ty), mask=is_column)


@triton.jit
def rotate(
    query,  # [Hq, T, D] by these strides, and the last is 1
    key,  # [Hkv, T, D]
    cos,  # [T, D]
    sin,
    query_output,  # [T, Hq, D]
    key_output,  # [T, Hkv, D]
    query_head_stride,
    query_row_stride,
    key_head_stride,
    key_row_stride,
    query_heads: tl.constexpr,
    key_heads: tl.constexpr,
    half: tl.constexpr,  # D / 2
    padded_half: tl.constexpr,  # a power of two
    tile_heads: tl.constexpr,
):
    """Rotate the halves of some heads of one row: program (T, tiles of the Hq + Hkv heads)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * tile_heads + tl.arange(0, tile_heads)
    key_head = head - query_heads
    dims = tl.arange(0, padded_half)
    is_dim = dims < half
    at = row * 2 * half + dims
    first_cos = tl.load(cos + at, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + at, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + at + half, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + at + half, mask=is_dim, other=0.0).to(tl.float32)[None, :]

    is_query = (head < query_heads)[:, None] & is_dim[None, :]
    source = query + row * query_row_stride + head[:, None] * query_head_stride + dims[None, :]
    first = tl.load(source, mask=is_query, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=is_query, other=0.0).to(tl.float32)
    target = query_output + (row * query_heads + head[:, None]) * 2 * half + dims[None, :]
    kind = query_output.dtype.element_ty
    tl.store(target, (first * first_cos - second * first_sin).to(kind), mask=is_query)
    tl.store(target + half, (second * second_cos + first * second_sin).to(kind), mask=is_query)

    is_key = ((key_head >= 0) & (key_head < key_heads))[:, None] & is_dim[None, :]
    source = key + row * key_row_stride + key_head[:, None] * key_head_stride + dims[None, :]
    first = tl.load(source, mask=is_key, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=is_key, other=0.0).to(tl.float32)
    target = key_output + (row * key_heads + key_head[:, None]) * 2 * half + dims[None, :]
    tl.store(target, (first * first_cos - second * first_sin).to(kind), mask=is_key)
    tl.store(target + half, (second * second_cos + first * second_sin).to(kind), mask=is_key)
