"""Compile the Triton kernels for GPUs that need not be present; print each launch's requirements. Run by a test."""

import warnings
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention import triton_kernels
from engine.attention.triton_attention import MIN_TILE, tile_keys_of
from engine.model import triton_row_kernels
from engine.model.triton_rows import TILE_COLUMNS, TILE_HEADS

SHARED_BYTES = 99 * 1024  # of one block, on every card of compute capability 8.0 and higher
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
KINDS = [  # capability, dtype, groups, dim, decoding, split, window, softcap and sinks
    (80, "bf16", 4, 128, True, True, 0, False),
    (80, "fp32", 8, 256, False, False, 9, True),
    (90, "bf16", 4, 128, False, False, 0, False),
]


def compile_for(capability: int, kernel: Any, types: dict[str, str], constants: dict[str, object]) -> None:
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    assert "tf32" not in compiled.asm["ptx"], "float32 would be rounded to 10 bits"
    assert compiled.metadata.shared <= SHARED_BYTES
    print(capability, kernel.__name__, compiled.metadata.shared)  # noqa: T201


def types_of(kernel: Any, dtype: str, *, is_partial: bool) -> dict[str, str]:
    partial_type = "*fp32" if is_partial else f"*{dtype}"
    return dict.fromkeys(kernel.arg_names, f"*{dtype}") | {
        **dict.fromkeys(("lses", "parts"), partial_type),
        **dict.fromkeys(("starts", "contexts", "tables"), "*i64"),
        **dict.fromkeys(("table_stride", "sequences", "splits", "query_row_stride", "query_head_stride"), "i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
    }


ROWS: list[tuple[Any, dict[str, object]]] = [
    (triton_row_kernels.rms_norm, {"width": 5120, "padded_width": 8192}),
    (triton_row_kernels.silu_multiply, {"width": 14_336, "tile": TILE_COLUMNS}),
    (
        triton_row_kernels.rotate,
        {"query_heads": 40, "key_heads": 8, "half": 64, "padded_half": 64, "tile_heads": TILE_HEADS},
    ),
]


def types_of_rows(kernel: Any) -> dict[str, str]:
    names = ("rows", "output", "gate", "up", "query", "key", "cos", "sin", "query_output", "key_output")
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(names, "*bf16")
    return types | {"weight": "*fp32", "epsilon": "fp32"}


def main() -> None:
    warnings.simplefilter("ignore")  # about Triton's own defaults
    for capability, dtype, groups, dim, is_decoding, is_partial, window, has_extras in KINDS:
        tile_keys = tile_keys_of(dim, BYTES[dtype])
        tile_rows = 1 if is_decoding else max(1, tile_keys // groups)
        shape = {"dim": dim, "padded_dim": triton.next_power_of_2(dim)}
        constants = shape | {
            "window": window,
            "page_size": 16,
            "kv_heads": 4,
            "groups": groups,
            "tile_rows": tile_rows,
            "tile": max(MIN_TILE, triton.next_power_of_2(tile_rows * groups)),
            "tile_keys": tile_keys,
            "is_decoding": is_decoding,
            "is_partial": is_partial,
            "has_softcap": has_extras,
            "has_sinks": has_extras,
        }
        kernel = triton_kernels.attend_tiles
        types = types_of(kernel, dtype, is_partial=is_partial)
        if is_partial:
            types["output"] = "*fp32"
            merge = triton_kernels.merge_splits
            compile_for(capability, merge, types_of(merge, dtype, is_partial=True), shape)
        compile_for(capability, kernel, types, constants)
    for kernel, constants in ROWS:
        compile_for(90, kernel, types_of_rows(kernel), constants)


if __name__ == "__main__":
    main()
