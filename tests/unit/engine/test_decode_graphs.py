"""Recorded decoding steps, with a recorder that calls the step again: what is replayed, and with which inputs."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine import ConfigError, EngineConfig, GenerationRequest, LLMEngine, SamplingParams
from engine.gpu_memory import kv_bytes_available, run_largest_step
from engine.model.model_loader import prepare_model
from tests.unit.engine.tiny_models import VOCAB_SIZE, Answers, llama, make_engine, run


class CallingAgain:
    """A recorder for a device without recordings; notes the order of recordings and replays by number."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed: list[int] = []

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        number = self.recorded
        self.recorded += 1
        step()

        def replay() -> None:
            self.replayed.append(number)
            step()

        return replay


def recording(engine: LLMEngine, recorder: Callable[..., Any]) -> LLMEngine:
    engine._runner.record_decoding(recorder, max_sequences=6, max_model_len=256, vocab_size=VOCAB_SIZE)
    return engine


def requests(count: int, **params: Any) -> list[GenerationRequest]:
    source = random.Random(3)
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params
    return [
        GenerationRequest(
            str(number), [source.randrange(20, VOCAB_SIZE) for _ in range(4 + number)], SamplingParams(**settings)
        )
        for number in range(count)
    ]


def tokens_of(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {name: answer.token_ids for name, answer in answers.items()}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize(("count", "recording_number"), [(1, 3), (2, 2), (3, 1), (5, 0), (6, 0)])
def test_a_batch_is_padded_to_the_next_size(model: PreTrainedModel, count: int, recording_number: int) -> None:
    recorder = CallingAgain()
    engine = recording(make_engine(model, max_sequences=6, max_batched_tokens=64), recorder)
    assert recorder.recorded == 4, "6, 4, 2 and 1"
    answers = run(engine, *requests(count))
    assert recorder.replayed == [recording_number] * 11, "the prompts' step is not of the kind"
    assert tokens_of(answers) == tokens_of(run(make_engine(model), *requests(count)))


@pytest.mark.usefixtures("paged")
def test_replays_change_no_answer(model: PreTrainedModel) -> None:
    # Batches shrink and grow, prompts are computed in between, pages are scattered and reused.
    mixed = [
        GenerationRequest(f"{name}{one.request_id}", one.prompt_ids, params)
        for name, params in {
            "greedy": SamplingParams(temperature=0.0, max_tokens=20),
            "random": SamplingParams(temperature=1.2, seed=4, max_tokens=9, n=2),
            "scored": SamplingParams(temperature=0.0, max_tokens=15, prompt_logprobs=1, logprobs=2),
        }.items()
        for one in requests(4)
    ]
    expected = run(make_engine(model, prefix_cache=False), *mixed)
    recorder = CallingAgain()
    settings: dict[str, Any] = {"max_sequences": 6, "kv_bytes": 60 * 4 * 512, "draft_tokens": 2}
    engine = recording(make_engine(model, **settings), recorder)
    for _ in range(2):
        assert tokens_of(run(engine, *mixed)) == tokens_of(expected)
    assert set(recorder.replayed) >= {0, 1, 2}, "of several sizes"


@torch.inference_mode()
@pytest.mark.usefixtures("paged")
def test_padding_rows_write_to_the_unassigned_page(model: PreTrainedModel) -> None:
    engine = recording(make_engine(model, max_sequences=6), CallingAgain())
    keys, _ = engine._runner._pool._layers[0]  # type: ignore[attr-defined]
    keys[:-1] = 7.0
    engine._runner._graphs.run([0] * 3, [0] * 3, [engine._runner._pool.filling] * 3)  # type: ignore[union-attr,attr-defined]
    assert bool((keys[:-1] == 7.0).all())
    assert not bool((keys[-1, 0] == 7.0).any())


@pytest.mark.usefixtures("paged")
def test_a_model_that_cannot_be_recorded_runs_without_graphs(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("called a synchronizing CUDA operation")

    engine = recording(make_engine(model), refuse)
    assert "cannot record CUDA graphs" in caplog.text
    assert tokens_of(run(engine, *requests(2))) == tokens_of(run(make_engine(model), *requests(2)))


def test_the_memory_left_for_the_kv_pool() -> None:
    assert kv_bytes_available(1000, 700, 150, 0.9) == 1000 * 0.9 - 300 - 150
    with pytest.raises(ConfigError) as caught:
        kv_bytes_available(1000, 400, 300, 0.9)
    assert caught.value.field == "gpu_memory_utilization"


@pytest.mark.usefixtures("paged")
def test_the_largest_step_is_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    shapes = prepare_model(model, 16)
    sampled: list[torch.Size] = []
    monkeypatch.setattr("engine.gpu_memory.sample", lambda logits, rows: sampled.append(logits.shape))
    computed: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, inputs: computed.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    config = EngineConfig(max_batched_tokens=600, max_sequences=32)
    # Three sequences of at most 250 tokens, each in 16 blocks; a token takes 2 layers · 2 · 2 heads · 16 · 4 bytes.
    assert run_largest_step(model, shapes, config, 250) == (3 * 256 + 16) * 512
    assert (computed, sampled) == ([600], [(32, VOCAB_SIZE)])
