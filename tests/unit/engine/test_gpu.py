"""Kernels, graphs and memory on a real NVIDIA GPU, with the same oracles as on a CPU. Run by `make test-gpu`."""

import copy
import dataclasses
import random
import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config

from engine import EngineConfig, GenerationRequest, LLMEngine, SamplingParams
from engine.model.row_modules import speed_up_rows
from engine.sampler import SamplingRow, sample
from engine.scheduler import Sequence
from tests.conformance.engine.test_families import FAMILIES
from tests.unit.engine.paged_cases import CASES, Case, layer_of
from tests.unit.engine.tiny_models import (
    SHAPE,
    VOCAB_SIZE,
    Answers,
    byte_level_tokenizer,
    greedy_reference,
    llama,
    make_engine,
    make_model,
    run,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DEVICE = "cuda"
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


def gpu_engine(model: PreTrainedModel, **config: Any) -> LLMEngine:
    return make_engine(model, device=DEVICE, **{"dtype": "float32"} | config)


def requests(count: int, **params: Any) -> list[GenerationRequest]:
    source = random.Random(6)
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | params
    return [
        GenerationRequest(
            str(number),
            [source.randrange(20, VOCAB_SIZE) for _ in range(source.choice([1, 3, 20, 50]))],
            SamplingParams(**settings),
        )
        for number in range(count)
    ]


def tokens_of(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {name: answer.token_ids for name, answer in answers.items()}


LARGE = Case(((1, 3000), (1, 700), (300, 900), (1, 1), (5, 2000)), kv_heads=8, groups=4, dim=128, page_size=16)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", [*CASES.values(), LARGE], ids=[*CASES, "large"])
def test_the_kernels_agree_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    from engine.attention.paged_attention import attend_by_reference
    from engine.attention.triton_attention import attend

    query, keys, values, step, options = layer_of(dataclasses.replace(case, dtype=dtype), torch.device(DEVICE))
    expected = attend_by_reference(query, keys, values, step, options)
    for splits in {case.splits, None}:
        output = attend(query, keys, values, step, options, splits=splits)
        torch.testing.assert_close(output, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_norms_gates_and_rotary_embeddings_use_spillways_kernels(dtype: torch.dtype) -> None:
    model = make_model(Qwen3Config(**SHAPE)).to(dtype=dtype)
    rows = torch.arange(20, 50)[None]
    with torch.inference_mode():
        expected = copy.deepcopy(model).float()(rows).logits
        on_gpu: Any = model
        on_gpu.to(DEVICE)
        speed_up_rows(on_gpu)
        found = on_gpu(rows.to(DEVICE)).logits.cpu().float()
    kinds = [type(module).__name__ for module in on_gpu.modules()]
    assert kinds.count("RmsNorm") == 4 * SHAPE["num_hidden_layers"] + 1
    assert kinds.count("GatedLayer") == SHAPE["num_hidden_layers"]
    assert (found - expected).norm() < TOLERANCES[dtype] * expected.norm()


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_generate(family: str, cuda_graphs: bool) -> None:
    model = make_model(FAMILIES[family])
    asked = requests(12)
    on_gpu: Any = copy.deepcopy(model)
    on_gpu.to(DEVICE)
    expected = {(one.request_id, 0): greedy_reference(on_gpu, list(one.prompt_ids), 20) for one in asked}
    answers = tokens_of(run(gpu_engine(model, cuda_graphs=cuda_graphs, draft_tokens=2), *asked))
    # `generate` stops at the end token; the engine ignores it here.
    assert {name: ids[: len(expected[name])] for name, ids in answers.items()} == expected


def test_graphs_are_recorded_and_change_nothing(model: PreTrainedModel) -> None:
    engine = gpu_engine(model)
    assert engine._runner._graphs is not None
    mixed = requests(10, temperature=1.1, seed=3, n=2)
    assert tokens_of(run(engine, *mixed)) == tokens_of(run(gpu_engine(model, cuda_graphs=False), *mixed))


def test_draws_are_those_of_a_cpu(model: PreTrainedModel) -> None:
    seeded = requests(10, temperature=0.9, seed=11, top_p=0.9, top_k=40, presence_penalty=0.5)
    assert tokens_of(run(gpu_engine(model), *seeded)) == tokens_of(run(make_engine(model), *seeded))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logprobs_in_half_precision_are_close(model: PreTrainedModel, dtype: str) -> None:
    prompt = [20 + number for number in range(60)]
    engine = make_engine(copy.deepcopy(model).to(getattr(torch, dtype)), device=DEVICE)
    engine.add_request(GenerationRequest("r", prompt, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    found = []
    while engine.has_unfinished():
        for output in engine.step():
            found += [one.logprob for one in output.prompt_logprobs or []]
    other: Any = copy.deepcopy(model).to(getattr(torch, dtype))
    other.to(DEVICE)

    def logprobs_of(logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits[0, :-1].float().cpu(), dim=-1).gather(1, torch.tensor(prompt[1:])[:, None])[
            :, 0
        ]

    with torch.inference_mode():
        plain = logprobs_of(other(torch.tensor([prompt], device=DEVICE)).logits)
        exact = logprobs_of(other.float().cpu()(torch.tensor([prompt])).logits)
    # No worse than transformers in the same dtype: the difference depends on the model.
    assert (torch.tensor(found[1:]) - exact).abs().mean() < 1.5 * (plain - exact).abs().mean()


def test_sampling_makes_the_host_wait_once() -> None:
    def rows() -> list[SamplingRow]:
        params = [SamplingParams(temperature=0.0), SamplingParams(top_k=5, min_p=0.1), SamplingParams(seed=3)]
        return [
            SamplingRow(one, 0, Sequence([5], 1, 9), frozenset(), VOCAB_SIZE, device=torch.device(DEVICE))
            for one in params
        ]

    logits = torch.randn(3, VOCAB_SIZE, device=DEVICE)
    sample(logits.clone(), rows())
    prepared = rows()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sample(logits.clone(), prepared)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([one for one in caught if "synchronizing" in str(one.message)]) == 1


def test_the_kv_pool_takes_its_share_of_the_memory(model: PreTrainedModel) -> None:
    free_before, total = torch.cuda.mem_get_info()
    share = (total - free_before) / total + 0.05
    config = EngineConfig(
        device=DEVICE, gpu_memory_utilization=share, max_sequences=100_000, max_batched_tokens=100_000, threads=1
    )
    engine = LLMEngine(copy.deepcopy(model), byte_level_tokenizer(), config)
    kv_bytes = engine.info.kv_tokens * 2 * 2 * 2 * 16 * 4
    assert 0.2 * 0.05 * total < kv_bytes < 0.05 * total
    assert engine.info.device == "cuda:0"
