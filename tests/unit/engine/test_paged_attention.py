"""The paged pool: its reference equals dense attention, and an engine on it agrees with `generate`."""

import random
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig, PreTrainedConfig

from engine import GenerationRequest, SamplingParams
from engine.attention.attention import Segment
from engine.attention.paged_attention import PagedBatch, PagedKVPool
from engine.attention.torch_attention import AttentionOptions
from tests.unit.engine.tiny_models import SHAPE, VOCAB_SIZE, greedy_reference, make_engine, make_model, run

WINDOWED = SHAPE | {"sliding_window": 9, "head_dim": 16}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("window", [None, 7])
def test_the_reference_is_dense_attention_over_scattered_pages(groups: int, window: int | None) -> None:
    torch.manual_seed(0)
    kv_heads, dim, page, context = 2, 8, 4, 22
    pool = PagedKVPool({0: (kv_heads, dim)}, 40, page, torch.float32, torch.device("cpu"))
    query = torch.randn(1, kv_heads * groups, context, dim)
    key, value = torch.randn(2, 1, kv_heads, context, dim)
    runs = [range(24, 32), range(4, 8), range(12, 24)]
    distance = torch.arange(context)[:, None] - torch.arange(context)
    visible = (distance >= 0) & (distance < (window or context))
    expected = scaled_dot_product_attention(query, key, value, visible, enable_gqa=True, scale=0.3)
    for first, end in pairwise((0, 1, 6, 7, 19, 22)):  # the chunks of one sequence
        rows = list(range(first, end))
        inputs = pool.stage([0] * len(rows), rows, [], [Segment(len(rows), end, runs)])
        asked, keys, values = (whole[:, :, first:end] for whole in (query, key, value))
        output = inputs.batch.attend(0, asked, keys, values, AttentionOptions(0.3, window, None, None))
        torch.testing.assert_close(output, expected[:, :, first:end].transpose(1, 2))


def test_a_step_is_staged_with_the_slots_of_its_rows() -> None:
    pool = PagedKVPool({0: (1, 2)}, 32, 4, torch.float32, torch.device("cpu"))
    segments = [Segment(3, 6, [range(20, 24), range(8)]), Segment(1, 1, [range(8, 16)]), pool.filling]
    inputs = pool.stage([7, 8, 9, 5, 0], [3, 4, 5, 0, 0], [2, 3], segments)
    assert isinstance(inputs.batch, PagedBatch)
    step = inputs.batch.step
    assert inputs.input_ids.tolist() == [[7, 8, 9, 5, 0]]
    assert inputs.position_ids.tolist() == [[3, 4, 5, 0, 0]]
    assert inputs.sampled_rows.tolist() == [2, 3]
    assert step.slots.tolist() == [23, 0, 1, 8, 32]
    assert step.tables.tolist() == [[5, 0], [2, 0], [8, 0]]
    assert (step.starts.tolist(), step.contexts.tolist()) == ([0, 3, 4, 5], [6, 1, 1])
    assert (step.longest_rows, step.longest_context, step.has_decoding) == (3, 6, True)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE),
        MistralConfig(**SHAPE, sliding_window=9),
        Gemma2Config(**WINDOWED, query_pre_attn_scalar=16, attn_logit_softcapping=20.0),
        GptOssConfig(**WINDOWED, num_local_experts=2, num_experts_per_tok=1),
    ],
    ids=["llama", "mistral", "gemma2", "gpt-oss"],
)
@pytest.mark.usefixtures("paged")
def test_an_engine_on_pages_agrees_with_generate(config: PreTrainedConfig) -> None:
    rng = random.Random(5)
    model = make_model(config)
    shared = [rng.randrange(20, VOCAB_SIZE) for _ in range(30)]
    prompts = [
        [*shared[: rng.choice([0, 30])], *(rng.randrange(20, VOCAB_SIZE) for _ in range(n))] for n in range(1, 9)
    ]
    expected = [greedy_reference(model, prompt, 12) for prompt in prompts]
    engine = make_engine(model, draft_tokens=3)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    answers = run(engine, *(GenerationRequest(str(n), prompt, params) for n, prompt in enumerate(prompts)))
    assert [answers[str(n), 0].token_ids for n in range(len(prompts))] == expected
