"""Fast linear layers: joined if they share their input, and in 8-bit integers."""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, Qwen2Config

from engine import ConfigError, GenerationRequest, SamplingParams
from engine.cpu.panel_kernel import panel_kernel
from engine.model.linear import FEW_ROWS, Int8Linear, PackedLinear, check_quantization
from engine.model.projections import ProjectionPart, SharedProjection, make_fast, watch_siblings
from tests.unit.engine.tiny_models import SHAPE, llama, make_engine, make_model, run

needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="int8 needs AVX-512 VNNI")
JOINED = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]


class Block(nn.Module):
    """`first`, `second` and `plain` (which has no bias) share their input; `twice` also has another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.twice = nn.Linear(8, 4), nn.Linear(8, 6), nn.Linear(8, 3)
        self.plain, self.last = nn.Linear(8, 4, bias=False), nn.Linear(6, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        others = self.first(rows).sum() + self.plain(rows).sum() + self.twice(rows).sum() + self.twice(rows * 2).sum()
        result: torch.Tensor = self.last(self.second(rows)) + others
        return result


def made_fast(model: nn.Module, rows: torch.Tensor) -> list[str]:
    """Make a model fast after one run; return the names of the joined layers."""
    with torch.inference_mode(), watch_siblings(model) as siblings:
        model(rows)
    make_fast(model, siblings, None)
    return [name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, ProjectionPart)]


@pytest.mark.parametrize("model", [llama(), make_model(Qwen2Config(**SHAPE))], ids=["llama", "qwen2_with_biases"])
def test_projections_of_the_same_rows_are_joined_and_compute_the_same(model: PreTrainedModel) -> None:
    rows = torch.arange(12)[None]
    with torch.inference_mode():
        expected = model(rows).logits
        assert made_fast(model, rows) == JOINED * 2  # two layers
        torch.testing.assert_close(model(rows).logits, expected, rtol=1e-4, atol=1e-4)


def test_only_equal_layers_with_the_same_input_are_joined() -> None:
    torch.manual_seed(1)
    model, rows = Block(), torch.randn(3, 8)
    with torch.inference_mode():
        expected = model(rows)
        assert made_fast(model, rows) == ["first", "second"]
        torch.testing.assert_close(model(rows), expected)


def test_a_joined_layer_computes_any_rows() -> None:
    torch.manual_seed(2)
    product = nn.Linear(8, 10)
    shared = SharedProjection(product, [4, 6])
    one, other = torch.randn(3, 8), torch.randn(3, 8)
    with torch.inference_mode():
        for rows, number in ((one, 0), (other, 1), (other, 0), (one, 1), (one, 1), (one, 0)):
            part = slice(0, 4) if number == 0 else slice(4, 10)
            torch.testing.assert_close(shared.part(number, rows), product(rows)[:, part])


# --- few rows, by panels.c --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, torch.randn(192)], ids=["no_bias", "bias"])
@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 13, FEW_ROWS, FEW_ROWS + 1])
def test_few_rows_equal_torchs_result(count: int, bias: torch.Tensor | None) -> None:
    torch.manual_seed(5)
    weight, rows = torch.randn(192, 80), torch.randn(2, count, 80)
    layer = PackedLinear(weight, bias)
    with torch.inference_mode():
        for batch in rows:
            torch.testing.assert_close(layer(batch), nn.functional.linear(batch, weight, bias), rtol=1e-4, atol=1e-4)


def test_each_row_is_independent_of_the_others() -> None:
    torch.manual_seed(5)
    layer, rows = PackedLinear(torch.randn(192, 80), torch.randn(192)), torch.randn(FEW_ROWS, 80)
    if layer._kernel is None:
        pytest.skip("oneDNN lays weights out otherwise here")
    with torch.inference_mode():
        alone = torch.stack([layer(row) for row in rows])
        assert all(torch.equal(layer(rows[:count]), alone[:count]) for count in range(1, FEW_ROWS + 1))


def test_strided_rows_are_computed_in_place() -> None:
    torch.manual_seed(6)
    weight, rows = torch.randn(64, 32), torch.randn(3, 64)[:, ::2]
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(weight, None)(rows), rows @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("outputs", "inputs"), [(100, 64), (64, 40)])
def test_widths_that_do_not_fill_the_panels_are_left_to_onednn(outputs: int, inputs: int) -> None:
    torch.manual_seed(7)
    weight, rows = torch.randn(outputs, inputs), torch.randn(3, inputs)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(weight, None)(rows), rows @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_layout_that_the_kernel_does_not_know_is_left_to_onednn() -> None:
    weight = torch.randn(128, 64)
    other = weight.clone()
    assert panel_kernel(other.data_ptr(), weight) is None  # outputs one after the other, not in panels


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@needs_vnni
def test_int8_keeps_nan_visible(wrong: float) -> None:
    rows = torch.ones(3, 64)
    rows[1, 5] = wrong
    with torch.inference_mode():
        output = Int8Linear(torch.randn(64, 64), None)(rows)
    assert output.isfinite().all(dim=1).tolist() == [True, False, True]


# --- 8-bit integers ---------------------------------------------------------------------------------------------------


@needs_vnni
def test_int8_is_close_to_the_exact_product() -> None:
    torch.manual_seed(3)
    linear = nn.Linear(256, 96)
    rows = torch.randn(1, 40, 256) * torch.logspace(-3, 3, 40)[None, :, None]  # rows of very different magnitudes
    rows[0, 7] = 0
    with torch.inference_mode():
        exact, rounded = linear(rows), Int8Linear(linear.weight, linear.bias)(rows)
        error = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) < 0.02
    torch.testing.assert_close(rounded[0, 7], linear.bias)


@needs_vnni
@pytest.mark.parametrize("outputs", [96, 128], ids=["by_onednn", "few_by_our_kernel"])
def test_int8_results_do_not_depend_on_the_rest_of_the_batch(outputs: int) -> None:
    torch.manual_seed(4)
    layer = Int8Linear(torch.randn(outputs, 256), torch.randn(outputs))
    rows = torch.randn(FEW_ROWS + 5, 256)
    with torch.inference_mode():
        together, few = layer(rows), layer(rows[:FEW_ROWS])
        assert torch.equal(few, together[:FEW_ROWS])
        assert all(torch.equal(layer(rows[number : number + 1])[0], together[number]) for number in range(len(rows)))


@needs_vnni
def test_int8_with_no_rows_returns_none() -> None:
    """A step that only computes part of a prompt needs no logits."""
    with torch.inference_mode():
        assert Int8Linear(torch.randn(96, 256), torch.randn(96))(torch.empty(1, 0, 256)).shape == (1, 0, 96)


@needs_vnni
def test_an_int8_engine_gives_each_request_the_same_answer_alone_and_in_a_batch() -> None:
    model = llama()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    requests = [GenerationRequest(str(n), list(range(3 + n, 20 + 2 * n)), params) for n in range(8)]
    together = run(make_engine(model, quantize="int8"), *requests)
    for request in requests:
        alone = run(make_engine(model, quantize="int8"), request)
        assert alone[request.request_id, 0].token_ids == together[request.request_id, 0].token_ids


@needs_vnni
def test_an_int8_engine_reports_it_and_computes_in_integers() -> None:
    engine = make_engine(llama(), quantize="int8")
    kinds = {type(module) for module in engine._runner._model.modules()}
    assert Int8Linear in kinds or ProjectionPart in kinds
    assert nn.Linear not in kinds
    assert engine.info.quantize == "int8"


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float32), ("cpu", torch.bfloat16)])
def test_int8_is_refused_where_it_cannot_be_computed(device: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="quantize: int8 requires a float32 model on a CPU"):
        check_quantization("int8", device=device, dtype=dtype)


def test_int8_is_refused_on_a_cpu_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(ConfigError, match="AVX-512 VNNI"):
        make_engine(llama(), quantize="int8")
