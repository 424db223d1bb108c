"""The choice of device and dtype; nothing is computed on two devices.

The meta device stands for a GPU: it computes nothing, refuses tensors of other devices, and raises where the host would
have to wait for a value.
"""

import traceback
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from engine import ConfigError, EngineConfig, SamplingParams
from engine.attention.attention import ATTENTION_NAME, Segment, packed_attention
from engine.attention.paged_attention import PagedKVPool
from engine.device import choose_device, choose_dtype
from engine.model_runner import compute_logits
from engine.sampler import SamplingRow, sample
from engine.scheduler import Sequence
from tests.conformance.engine.test_families import FAMILIES
from tests.unit.engine.tiny_models import VOCAB_SIZE, make_model

META = torch.device("meta")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Simulate a machine with two GPUs; return which ones were made the thread's current device."""
    chosen: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    return chosen


def test_a_gpu_is_chosen_by_its_number(two_gpus: list[torch.device]) -> None:
    assert [choose_device(EngineConfig(device=name)).index for name in ("cuda", "cuda:1")] == [0, 1]
    assert choose_device(EngineConfig()).type == "cpu"
    assert two_gpus == [torch.device("cuda:0"), torch.device("cuda:1")]
    with pytest.raises(ConfigError, match=r"device: 'cuda:2' is not available: torch finds 2 GPU\(s\)"):
        choose_device(EngineConfig(device="cuda:2"))


@pytest.mark.parametrize(("has_bfloat16", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_gpus_dtype_depends_on_its_support(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: has_bfloat16)
    gpu = torch.device("cuda:0")
    assert choose_dtype(EngineConfig(), gpu) == dtype
    assert choose_dtype(EngineConfig(dtype="float32"), gpu) == torch.float32
    assert choose_dtype(EngineConfig(), torch.device("cpu")) == torch.float32


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"seed": 1, "top_k": 5, "min_p": 0.1},
        {"logit_bias": {3: 1.0}, "min_tokens": 2},
        {"presence_penalty": 1.0, "repetition_penalty": 1.2, "temperature": 0.0},
    ],
    ids=", ".join,
)
def test_sampling_waits_for_its_device_at_the_very_end(params: dict[str, Any]) -> None:
    rows = [
        SamplingRow(SamplingParams(**one), 0, Sequence([5, 6], 1, 9), frozenset({1}), VOCAB_SIZE, device=META)
        for one in (params, {"temperature": 0.0})
    ]
    with pytest.raises((NotImplementedError, RuntimeError)) as caught:
        sample(torch.empty(2, VOCAB_SIZE, device=META), rows)
    place = next(frame for frame in reversed(traceback.extract_tb(caught.tb)) if frame.filename.endswith("sampler.py"))
    assert ".tolist()" in str(place.line)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoding_step_does_not_wait_for_its_device(family: str) -> None:
    """Nothing recorded in a CUDA graph may wait."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    model: Any = make_model(FAMILIES[family])
    model.to(META, torch.bfloat16)
    model.set_attn_implementation(ATTENTION_NAME)
    kv_heads = getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    shapes = dict.fromkeys(range(2), (kv_heads, 16))
    pool = PagedKVPool(shapes, 64, 4, torch.bfloat16, META, attention=lambda query, *_: torch.empty_like(query))
    inputs, _ = pool.make_static_inputs(pool.blank_tables(5, 256), 256)
    assert compute_logits(model, inputs).shape == (5, VOCAB_SIZE)
    staged = pool.stage([0] * 6, [0, 1, 2, 3, 0, 0], [3, 5], [Segment(4, 4, [range(8)]), *[pool.filling] * 2])
    assert compute_logits(model, staged).shape == (2, VOCAB_SIZE)
