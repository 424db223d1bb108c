"""Models that the engine would compute wrongly are refused while loading, with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    PhimoeConfig,
    PreTrainedConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from engine import ConfigError, UnsupportedModel
from tests.unit.engine.tiny_models import SHAPE, VOCAB_SIZE, llama, make_engine, make_model

REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "state_space": (
        MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, state_size=8),
        "does not allow its attention to be replaced",
    ),
    "alibi": (
        BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=4),
        "does not allow its attention to be replaced",
    ),
    "latent_attention": (
        DeepseekV3Config(
            **SHAPE | {"num_key_value_heads": 4},
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=32,
        ),
        "latent attention",
    ),
    "convolution_layers": (
        Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
        "layers of kind conv",
    ),
    "window_only_in_its_mask": (
        PhimoeConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=9),
        "does not pass its window to its attention",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_architectures_are_refused(kind: str) -> None:
    config, reason = REFUSED[kind]
    with pytest.raises(UnsupportedModel, match=reason):
        make_engine(make_model(config))


def test_state_outside_the_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each token mixes with the previous token of the batch, as in a short convolution: right for a single sequence,
    # wrong for a packed batch. Only a comparison with the model's own forward can detect this.
    plain: Callable[..., torch.Tensor] = LlamaDecoderLayer.forward

    def with_convolution(self: LlamaDecoderLayer, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return plain(self, hidden_states + torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1], **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", with_convolution)
    with pytest.raises(UnsupportedModel, match="outside its attention"):
        make_engine(llama())


def test_rotary_scaling_that_depends_on_the_batch_limits_the_context() -> None:
    # "dynamic" frequencies follow the longest sequence of the batch, so one request would change another's output.
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    model = make_model(LlamaConfig(**SHAPE | {"rope_parameters": rope}))
    assert make_engine(model).info.max_model_len == 64
    with pytest.raises(ConfigError, match="max_model_len"):
        make_engine(model, max_model_len=65)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kv_bytes": 100}, "kv_bytes"),
        ({"max_model_len": 257}, "max_model_len"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_batched_tokens": 7}, "max_batched_tokens"),
        ({"device": "cuda:99"}, "device"),
        ({"device": "tpu"}, "device"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ],
)
def test_impossible_configurations_name_the_field(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_engine(llama(), **settings)
    assert caught.value.field == field
