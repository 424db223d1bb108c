"""Greedy output equals transformers' `generate`, family by family, alone and in mixed batches."""

import random
from collections import defaultdict
from functools import cache

import pytest
from transformers import (
    Cohere2Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from engine import GenerationRequest, SamplingParams
from tests.unit.engine.tiny_models import (
    EOS_ID,
    SHAPE,
    VOCAB_SIZE,
    Answer,
    Answers,
    collect,
    greedy_reference,
    make_engine,
    make_model,
)

WINDOW = 9  # smaller than most of the sequences
LOCAL_GLOBAL = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE | {"head_dim": 16}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mistral_window": MistralConfig(**SHAPE, sliding_window=WINDOW),
    "gemma2": Gemma2Config(**SHAPE, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(
        **SHAPE, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=LOCAL_GLOBAL
    ),
    "phi3": Phi3Config(**SHAPE),
    "olmo2": Olmo2Config(**SHAPE),
    "gpt_oss_sinks": GptOssConfig(
        **SHAPE,
        head_dim=16,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=LOCAL_GLOBAL,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "granite": GraniteConfig(**SHAPE),
    "smollm3": SmolLM3Config(**SHAPE),
    "starcoder2": Starcoder2Config(**SHAPE, sliding_window=WINDOW),
    "cohere2": Cohere2Config(**SHAPE, sliding_window=WINDOW, layer_types=LOCAL_GLOBAL),
    "exaone4": Exaone4Config(**SHAPE, sliding_window=WINDOW, sliding_window_pattern=2),
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=256,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=EOS_ID,
    ),
    "opt": OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        word_embed_proj_dim=64,
        num_hidden_layers=2,
        ffn_dim=96,
        num_attention_heads=4,
        max_position_embeddings=256,
        init_std=0.3,
        bos_token_id=0,
        eos_token_id=EOS_ID,
        pad_token_id=0,
        tie_word_embeddings=False,
    ),
}
NEW_TOKENS = 12
REQUESTS = 32


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(rng.choice([1, 2, 7, 16, 33, 50]))] for _ in range(count)]


@cache  # two tests need it
def references_of(family: str) -> tuple[PreTrainedModel, list[list[int]], list[list[int]]]:
    """Return a model of this family, prompts, and `generate`'s output for each."""
    model = make_model(FAMILIES[family])
    prompts = prompts_of(random.Random(family), 8)
    return model, prompts, [greedy_reference(model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_generate(family: str) -> None:
    rng = random.Random(family)
    model, prompts, references = references_of(family)
    assert len(set(map(tuple, references))) > 4, "the model gives every prompt the same answer: nothing is tested"
    # 24 tokens a step split the longer prompts into chunks; 4 tokens a block spread sequences over many blocks.
    engine = make_engine(model, max_sequences=16)

    for number in (0, 1):  # alone
        engine.add_request(GenerationRequest("alone", prompts[number], greedy(NEW_TOKENS)))
        answers: Answers = defaultdict(Answer)
        while engine.has_unfinished():
            collect(answers, engine.step())
        assert answers["alone", 0].token_ids == references[number]

    # Mixed: requests arrive over time, some are canceled at random, never more than 16 run at once.
    lengths = [rng.randint(1, NEW_TOKENS) for _ in range(REQUESTS)]
    arrivals = sorted((rng.randrange(30), number) for number in range(REQUESTS))
    cancellations = {number: rng.randrange(30) for number in rng.sample(range(REQUESTS), 6)}
    answers = defaultdict(Answer)
    step = 0
    while arrivals or engine.has_unfinished():
        while arrivals and arrivals[0][0] <= step:
            number = arrivals.pop(0)[1]
            prompt = prompts[number % len(prompts)]
            engine.add_request(GenerationRequest(str(number), prompt, greedy(lengths[number])))
        for number, moment in cancellations.items():
            if moment == step:
                engine.abort(str(number))
        collect(answers, engine.step())
        step += 1

    assert len(answers) == REQUESTS
    for (request_id, _), answer in answers.items():
        reference = references[int(request_id) % len(prompts)][: lengths[int(request_id)]]
        if answer.finish_reason == "cancelled":
            reference = reference[: len(answer.token_ids)]
        assert answer.token_ids == reference
        assert answer.finish_reason in ("stop", "length", "cancelled")


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_thirty_two_at_once_equal_each_alone(family: str) -> None:
    model, prompts, references = references_of(family)
    engine = make_engine(model, max_sequences=32, max_batched_tokens=2048, kv_bytes=8 << 20)
    for number in range(32):
        engine.add_request(GenerationRequest(str(number), prompts[number % 8], greedy(NEW_TOKENS)))
    answers: Answers = defaultdict(Answer)
    for _ in range(2):  # in the second step those whose prompt another was computing; then all decode together
        collect(answers, engine.step())
    outputs = engine.step()
    assert len(outputs) == 32
    collect(answers, outputs)
    while engine.has_unfinished():
        collect(answers, engine.step())
    assert [answers[str(number), 0].token_ids for number in range(32)] == [references[n % 8] for n in range(32)]
