"""The attention kernel's supported heads."""

import pytest
import torch

from engine.cpu.attention_kernel import attention_kernel


@pytest.mark.parametrize(("head_dim", "dtype"), [(40, torch.float32), (64, torch.bfloat16)])
def test_unsupported_heads_use_torch(head_dim: int, dtype: torch.dtype) -> None:
    assert attention_kernel(head_dim, dtype) is None
