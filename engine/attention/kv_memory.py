"""The KV pool of a device: its kind and its size."""

from importlib.util import find_spec
from typing import Final

import torch

from engine.attention.attention import KVMemory, KVPool
from engine.attention.paged_attention import PagedAttention, PagedKVPool, attend_by_reference
from engine.config import EngineConfig
from engine.errors import ConfigError

CPU_KV_BYTES: Final = 1 << 30  # on a CPU, by default


def make_kv_memory(
    layer_shapes: dict[int, tuple[int, int]], slots: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVMemory:
    """Create the pool for `slots` tokens, a multiple of `block_size`; `layer_shapes` gives (Hkv, D) for each layer."""
    if device.type == "cpu":
        return KVPool(layer_shapes, slots, dtype)
    return PagedKVPool(layer_shapes, slots, block_size, dtype, device, attention=paged_attention_on(device))


def paged_attention_on(device: torch.device) -> PagedAttention:
    """Return the attention for a device: Triton's kernels on a GPU that has Triton, else the reference."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from engine.attention.triton_attention import attend  # noqa: PLC0415 - only CUDA builds of torch bring triton

        return attend
    return attend_by_reference


def kv_tokens_within(
    kv_bytes: int,
    config: EngineConfig,
    layer_shapes: dict[int, tuple[int, int]],
    dtype: torch.dtype,
    max_model_len: int,
) -> int:
    """Return the KV pool's capacity in tokens: whole blocks within kv_bytes, at most as many as can ever be used."""
    block_bytes = config.block_size * bytes_per_token(layer_shapes, dtype)
    blocks_per_sequence = -(-max_model_len // config.block_size)
    blocks = min(kv_bytes // block_bytes, blocks_per_sequence * config.max_sequences)
    if blocks < 1:
        raise ConfigError("kv_bytes", f"one block needs {block_bytes} bytes")
    return int(blocks * config.block_size)


def bytes_per_token(layer_shapes: dict[int, tuple[int, int]], dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return sum(2 * heads * dim * dtype.itemsize for heads, dim in layer_shapes.values())
