"""Fixtures of the engine's tests."""

import pytest
import torch

from engine.attention.attention import KVMemory
from engine.attention.paged_attention import PagedKVPool


def paged_memory(
    layer_shapes: dict[int, tuple[int, int]], slots: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVMemory:
    return PagedKVPool(layer_shapes, slots, block_size, dtype, device)


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give engines created from here on the memory that they would have on a GPU."""
    monkeypatch.setattr("engine.engine.make_kv_memory", paged_memory)
    monkeypatch.setattr("engine.model.model_loader.make_kv_memory", paged_memory)
