"""Norms and gated layers in one pass: only modules that compute the formula are replaced, with equal results."""

import pytest
import torch
from torch import nn
from transformers import CohereConfig, GlmConfig, LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from engine.model.row_modules import GatedLayer, RmsNorm, RotaryEmbedding, row_kernels_for, speed_up_rows
from tests.unit.engine.tiny_models import SHAPE, make_model


@pytest.fixture(params=["cpu", "gpu"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with the CPU's kernels, then with a GPU's in Triton's interpreter."""
    if request.param == "gpu":
        pytest.importorskip("triton", reason="has no build for this system")
        from engine.model.triton_rows import TritonRowKernels

        monkeypatch.setattr("engine.model.row_modules.row_kernels_for", lambda *_: TritonRowKernels())


def norm(kind: type[nn.Module], width: int) -> nn.Module:
    module = kind(width, 1e-5)
    assert isinstance(module.weight, nn.Parameter)
    nn.init.normal_(module.weight, mean=0.5)
    return module


def sped_up(module: nn.Module) -> nn.Module:
    """Return the module's replacement after `speed_up_rows`."""
    holder = nn.Sequential(module)
    with torch.inference_mode():
        speed_up_rows(holder)
    return holder[0]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 300, 64), (1, 5, 3, 64), (0, 64)])
def test_norms_are_recognized_and_compute_the_same(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    module = norm(kind, 64)
    fast = sped_up(module)
    assert isinstance(fast, RmsNorm)
    rows = torch.randn(shape) * 3
    torch.testing.assert_close(fast(rows), module(rows).detach())


@pytest.mark.usefixtures("kernels")
def test_a_norm_takes_rows_that_are_parts_of_wider_ones() -> None:
    module = norm(LlamaRMSNorm, 16)
    rows = torch.randn(1, 4, 96).split([32, 64], dim=-1)[0].view(1, 4, 2, 16)
    torch.testing.assert_close(sped_up(module)(rows), module(rows).detach())


@pytest.mark.parametrize("module", [nn.LayerNorm(64), norm(LlamaRMSNorm, 40)], ids=["layer_norm", "odd_width"])
def test_other_norms_are_kept(module: nn.Module) -> None:
    assert sped_up(module) is module


def mlp(activation: str, width: int = 96) -> nn.Module:
    config = Qwen3Config(hidden_size=32, intermediate_size=width, hidden_act=activation)
    module: nn.Module = Qwen3MLP(config)
    return module


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("scale", [0.1, 30.0])  # gates around 0, and far beyond the range of e^x
def test_gated_layers_are_recognized_and_compute_the_same(scale: float) -> None:
    torch.manual_seed(2)
    module = mlp("silu")
    fast = sped_up(module)
    assert isinstance(fast, GatedLayer)
    rows = torch.randn(1, 200, 32) * scale
    with torch.inference_mode():
        expected = module(rows)
        torch.testing.assert_close(fast(rows), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "module", [mlp("gelu_pytorch_tanh"), mlp("relu"), mlp("silu", 100)], ids=["gelu", "relu", "odd_width"]
)
def test_other_layers_are_kept(module: nn.Module) -> None:
    assert sped_up(module) is module


def attention_of(model: nn.Module) -> nn.Module:
    attention: nn.Module = next(module for name, module in model.named_modules() if name.endswith("self_attn"))
    return attention


def calls_ours(attention: nn.Module) -> bool:
    return isinstance(attention.forward.__globals__["apply_rotary_pos_emb"], RotaryEmbedding)


@pytest.mark.usefixtures("kernels")
def test_rotary_embeddings_are_recognized_and_compute_the_same() -> None:
    torch.manual_seed(3)
    model, other = (make_model(LlamaConfig(**SHAPE | {"head_dim": 32})) for _ in range(2))
    rows = torch.arange(20)[None]
    with torch.inference_mode():
        expected = model(rows).logits
        speed_up_rows(model)
        torch.testing.assert_close(model(rows).logits, expected, rtol=1e-4, atol=1e-4)
    assert calls_ours(attention_of(model))
    assert not calls_ours(attention_of(other))


@pytest.mark.usefixtures("kernels")
def test_a_rotary_embedding_takes_rows_that_are_parts_of_wider_ones() -> None:
    torch.manual_seed(4)
    attention = attention_of(make_model(LlamaConfig(**SHAPE | {"head_dim": 32})))
    sped_up(attention)
    wide = torch.randn(1, 70, 6 * 32)
    query, key = (
        wide[..., :128].view(1, 70, 4, 32).transpose(1, 2),
        wide[..., 128:].view(1, 70, 2, 32).transpose(1, 2),
    )
    cos, sin = torch.randn(2, 1, 70, 32)
    ours = attention.forward.__globals__["apply_rotary_pos_emb"]
    for turned, expected in zip(ours(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        torch.testing.assert_close(turned, expected)


@pytest.mark.parametrize("kind", [CohereConfig, GlmConfig])  # rotated in pairs; partially
def test_other_rotary_embeddings_are_kept(kind: type[PreTrainedConfig]) -> None:
    model = make_model(kind(**SHAPE | {"head_dim": 32}))
    with torch.inference_mode():
        speed_up_rows(model)
    assert not calls_ours(attention_of(model))


@pytest.mark.usefixtures("kernels")
def test_nan_stays_visible() -> None:
    rows = torch.ones(2, 64)
    rows[1, 3] = float("nan")
    assert sped_up(norm(LlamaRMSNorm, 64))(rows).isfinite().all(dim=1).tolist() == [True, False]


def test_a_model_of_another_dtype_or_without_a_compiler_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    half = norm(LlamaRMSNorm, 64).bfloat16()
    assert sped_up(half) is half
    monkeypatch.setattr("engine.model.row_modules.cpu_row_kernels", lambda: None)
    full = norm(LlamaRMSNorm, 64)
    assert sped_up(full) is full


@pytest.mark.usefixtures("kernels")
def test_all_modules_of_a_model_are_found() -> None:
    model = make_model(Qwen3Config(**SHAPE))
    with torch.inference_mode():
        speed_up_rows(model)
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("RmsNorm") == 2 * SHAPE["num_hidden_layers"] + 1 + 2 * SHAPE["num_hidden_layers"]
    assert kinds.count("GatedLayer") == SHAPE["num_hidden_layers"]
    assert not {"Qwen3RMSNorm", "Qwen3MLP"} & set(kinds)


def test_a_gpus_kernels_round_once_to_the_dtype_of_their_rows() -> None:
    pytest.importorskip("triton", reason="has no build for this system")
    from engine.model.triton_rows import TritonRowKernels

    torch.manual_seed(5)
    kernels, weight = TritonRowKernels(), torch.randn(40)
    rows, cos, sin = torch.randn(1, 6, 4, 40), torch.randn(1, 6, 40), torch.randn(1, 6, 40)
    heads = rows.transpose(1, 2)

    def all_of(dtype: torch.dtype) -> list[torch.Tensor]:
        halved = [one.half().to(dtype) for one in (heads, cos, sin)]
        parts = rows.half().to(dtype)[0, :, 0].split(20, dim=1)
        return [
            kernels.rms_norm(rows.half().to(dtype), weight, 1e-5),
            kernels.silu_multiply(*parts),
            *kernels.rotate(halved[0], halved[0][:, :2], *halved[1:]),
        ]

    for found, exact in zip(all_of(torch.float16), all_of(torch.float32), strict=True):
        assert found.dtype is torch.float16
        assert torch.equal(found, exact.half())


def test_a_gpu_without_triton_keeps_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.row_modules.find_spec", lambda _: None)
    assert row_kernels_for(torch.device("cuda"), torch.bfloat16) is None
