"""Adapters mixed in one batch: each request is answered as by the model with the adapter merged into it."""

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from engine import ConfigError, GenerationRequest, LLMEngine, RequestRejected, ResumePoint, SamplingParams
from engine.choice import NgramDrafts
from protocol.generation import Grammar
from tests.unit.engine.peft_adapters import generate, make_adapter, write_adapter
from tests.unit.engine.tiny_models import (
    EOS_ID,
    SHAPE,
    VOCAB_SIZE,
    Answer,
    byte_level_tokenizer,
    collect,
    llama,
    make_engine,
    make_model,
    run,
)

NEW_TOKENS = 20
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Prompts with a common prefix, so that a prefix cache that mixes adapters would be detected.
SHARED = tuple(random.Random(3).randrange(20, VOCAB_SIZE) for _ in range(30))
PROMPTS = [SHARED, SHARED[:17], (*SHARED, 40, 41, 42), tuple(range(50, 90, 3))]


@dataclass
class Served:
    """A model and its adapters, in folders and merged."""

    base: PreTrainedModel
    folders: dict[str, str]
    merged: dict[str | None, PreTrainedModel]  # None: the model alone
    answers: dict[tuple[str | None, tuple[int, ...]], list[int]] = field(default_factory=dict)

    def engine(self, **config: Any) -> LLMEngine:
        return make_engine(self.base, adapters=self.folders, **config)

    def expected(self, adapter: str | None, prompt: tuple[int, ...], tokens: int = NEW_TOKENS) -> list[int]:
        if (adapter, prompt) not in self.answers:
            self.answers[adapter, prompt] = generate(self.merged[adapter], prompt, NEW_TOKENS)
        return self.answers[adapter, prompt][:tokens]


def serve(base: PreTrainedModel, where: Path, adapters: dict[str, dict[str, Any]]) -> Served:
    merged: dict[str | None, PreTrainedModel] = {None: base}
    for seed, (name, lora) in enumerate(adapters.items()):
        merged[name] = make_adapter(base, where / name, seed=seed, **lora)
    return Served(base, {name: str(where / name) for name in adapters}, merged)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(
        llama(),
        tmp_path_factory.mktemp("adapters"),
        {
            "small": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
            "wide": {"r": 16, "lora_alpha": 8, "target_modules": LINEAR},
            "one-layer": {"r": 5, "lora_alpha": 7, "target_modules": ["down_proj"], "layers_to_transform": [1]},
            "root": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": "all-linear"},
            "patterns": {
                "r": 4,
                "lora_alpha": 4,
                "target_modules": LINEAR,
                "rank_pattern": {"layers.0.self_attn.q_proj": 1, "k_proj": 12},
                "alpha_pattern": {"layers.1.mlp.up_proj": 11, r"self_attn\.(v|o)_proj": 2},
            },
        },
    )


NAMES = [None, "small", "wide", "one-layer", "root", "patterns"]


def request(name: str, adapter: str | None, prompt: tuple[int, ...], **params: Any) -> GenerationRequest:
    resume = params.pop("resume", ())
    sampling = SamplingParams(**{"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0.0} | params)
    return GenerationRequest(name, prompt, sampling, resume, adapter=adapter)


@pytest.mark.parametrize("adapter", NAMES)
def test_an_adapter_alone_equals_the_merged_model(served: Served, adapter: str | None) -> None:
    engine = served.engine()
    answers = [served.expected(adapter, prompt) for prompt in PROMPTS]
    assert answers != [served.expected(None, prompt) for prompt in PROMPTS] or adapter is None
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert run(engine, request("r", adapter, prompt))["r", 0].token_ids == answer


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        (Qwen2Config(**SHAPE), LINEAR),  # biases
        (Gemma2Config(**SHAPE, head_dim=16, sliding_window=9, query_pre_attn_scalar=16), LINEAR),
        (Phi3Config(**SHAPE), ["qkv_proj", "gate_up_proj"]),
        (GPTNeoXConfig(**SHAPE), ["query_key_value", "dense_4h_to_h"]),
        (GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3), ["c_attn", "c_fc"]),
        (
            Qwen3MoeConfig(**SHAPE | {"head_dim": 16}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
            ["q_proj", "o_proj"],
        ),
    ],
    ids=["qwen2", "gemma2", "phi3", "gpt-neox", "gpt2", "qwen3-moe"],
)
def test_other_families(config: PreTrainedConfig, targets: list[str], tmp_path: Path) -> None:
    lora = {"target_modules": targets, "fan_in_fan_out": config.model_type == "gpt2"}
    served = serve(make_model(config), tmp_path, {"a": {"r": 3, **lora}, "b": {"r": 6, **lora}})
    engine = served.engine(max_batched_tokens=48)
    asked = [(adapter, prompt) for adapter in (None, "a", "b") for prompt in PROMPTS[1:]]
    answers = run(engine, *(request(str(number), *what) for number, what in enumerate(asked)))
    expected = [served.expected(*what) for what in asked]
    assert [answers[str(number), 0].token_ids for number in range(len(asked))] == expected
    assert expected[:3] != expected[3:6] != expected[6:]


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_all_adapters_in_little_memory(served: Served, seed: int) -> None:
    """Arrivals, cancellations, preemption, drafts, and prompts cached under other adapters."""
    dice = random.Random(seed)
    asked = [(dice.choice(NAMES), dice.choice(PROMPTS), dice.randint(4, NEW_TOKENS)) for _ in range(28)]
    bytes_per_block = 2 * 2 * 2 * 16 * 4 * 4  # keys and values, layers, heads, dimension, float32, tokens
    engine = served.engine(kv_bytes=24 * bytes_per_block, lookahead_tokens=4, draft_tokens=3 * (seed % 2))
    answers: dict[tuple[str, int], Answer] = defaultdict(Answer)
    coming = [
        request(str(number), adapter, prompt, max_tokens=tokens)
        for number, (adapter, prompt, tokens) in enumerate(asked)
    ]
    cancelled = 0
    while coming or engine.has_unfinished():
        if coming and dice.random() < 0.6:
            engine.add_request(coming.pop(0))
        if cancelled < 4 and dice.random() < 0.03 and engine._choices:
            engine.abort(dice.choice(list(engine._choices)))
            cancelled += 1
        collect(answers, engine.step())
        engine._block_pool.check()
    assert engine.counters.preemptions > 0
    assert engine.counters.cached_tokens > 0
    assert len(answers) == len(asked)
    for number, what in enumerate(asked):
        answer, expected = answers[str(number), 0], served.expected(*what)
        if answer.finish_reason == "cancelled":
            expected = expected[: len(answer.token_ids)]
        assert answer.token_ids == expected, what


def test_drafts_are_computed_with_the_adapter(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [(adapter, (*SHARED, 100 + number)) for number, adapter in enumerate(NAMES)]
    expected = {prompt: served.expected(adapter, prompt) for adapter, prompt in asked}

    def guess(drafts: NgramDrafts, most_tokens: int) -> list[int]:
        """Return the next three tokens and a wrong one."""
        prompt, made = tuple(drafts._token_ids[: len(SHARED) + 1]), len(drafts._token_ids) - len(SHARED) - 1
        return [*expected[prompt][made : made + 3], 5][:most_tokens]

    monkeypatch.setattr(NgramDrafts, "guess", guess)
    engine = served.engine(draft_tokens=4, max_batched_tokens=64)
    answers = run(engine, *(request(str(adapter), adapter, prompt) for adapter, prompt in asked))
    assert {adapter: answers[str(adapter), 0].token_ids for adapter, _ in asked} == {
        adapter: expected[prompt] for adapter, prompt in asked
    }
    assert engine.counters.right_tokens > len(asked) * NEW_TOKENS / 2


def test_the_prefix_cache_separates_adapters(served: Served) -> None:
    engine = served.engine()

    def cached(adapter: str | None) -> int:
        engine.add_request(request("r", adapter, SHARED, max_tokens=1))
        found = 0
        while engine.has_unfinished():
            found += sum(output.cached_tokens for output in engine.step())
        return found

    assert [cached(adapter) for adapter in (None, "small", "wide")] == [0, 0, 0]
    assert [cached(adapter) for adapter in (None, "small", "wide")] == [(len(SHARED) - 1) // 4 * 4] * 3


def test_a_run_resumed_anywhere_equals_the_undisturbed_one(served: Served) -> None:
    sampled = {"temperature": 1.3, "seed": 5}
    for adapter in ("wide", "patterns"):
        whole = run(served.engine(), request("r", adapter, SHARED, **sampled))["r", 0]
        points = range(0, NEW_TOKENS, 3)
        rest = run(
            served.engine(),
            *(
                request(str(at), adapter, SHARED, **sampled, resume=(ResumePoint(0, tuple(whole.token_ids[:at]), 0),))
                for at in points
            ),
        )
        for at in points:
            assert whole.token_ids[:at] + rest[str(at), 0].token_ids == whole.token_ids
            assert rest[str(at), 0].text == whole.text


def test_a_grammar_holds_under_an_adapter(served: Served) -> None:
    grammar = Grammar("regex", "[ab]{3}c")
    plain = SamplingParams(max_tokens=20, temperature=1.5, seed=1, grammar=grammar)
    asked = [GenerationRequest(str(adapter), SHARED, plain, adapter=adapter) for adapter in NAMES]
    for answer in run(served.engine(), *asked).values():
        assert answer.text.rstrip("c") in {a + b + c for a in "ab" for b in "ab" for c in "ab"}
        assert answer.finish_reason == "stop"


def test_a_step_without_adapters_adds_nothing_to_any_row(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = served.engine()
    added: list[Tensor] = []
    index_add = Tensor.index_add_

    def noted(*args: Any) -> Tensor:
        added.append(args[2])
        return index_add(*args)

    monkeypatch.setattr(Tensor, "index_add_", noted)
    run(engine, request("r", None, SHARED))
    assert added == []
    run(engine, request("r", "small", SHARED[:5]), request("s", None, SHARED[:5]))
    assert [len(rows) for rows in added[:4]] == [5] * 4, "the rows of one of them, in the four layers that it changes"


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="this CPU has no instructions for 8-bit integers")
def test_a_base_in_8_bit_integers_supports_adapters(served: Served) -> None:
    engine = served.engine(quantize="int8")
    base = run(make_engine(served.base, quantize="int8"), request("r", None, SHARED))["r", 0].token_ids
    together = run(engine, *(request(str(adapter), adapter, SHARED) for adapter in NAMES))
    assert together["None", 0].token_ids == base
    for adapter in NAMES:
        alone = run(engine, request("alone", adapter, SHARED))["alone", 0]
        assert together[str(adapter), 0].token_ids == alone.token_ids
    assert len({tuple(answer.token_ids) for answer in together.values()}) == len(NAMES)


def test_unknown_adapters_are_refused(served: Served) -> None:
    with pytest.raises(RequestRejected, match="'nobody' is not an adapter") as refused:
        served.engine().add_request(request("r", "nobody", SHARED))
    assert refused.value.field == "model"


def test_loaded_adapters_are_reported(served: Served) -> None:
    infos = {info.name: info for info in served.engine().info.adapters}
    assert list(infos) == list(served.folders)
    assert (infos["small"].ranks, infos["small"].layers) == ((2, 2), 4)
    assert infos["small"].bytes == 4 * 2 * 2 * ((64 + 64) + (64 + 32))  # float32 · rank · layers · (q, v: in + out)
    assert infos["patterns"].ranks == (1, 12)


# --- adapters with their own tokenizers -------------------------------------------------------------------------------


@pytest.fixture
def own_folder(served: Served, tmp_path: Path) -> Path:
    write_adapter(served.base, tmp_path, seed=1, r=2, target_modules=["q_proj"])
    return tmp_path


def test_a_copy_of_the_models_tokenizer_is_shared(served: Served, own_folder: Path) -> None:
    byte_level_tokenizer().save_pretrained(own_folder)
    engine = make_engine(served.base, adapters={"own": str(own_folder)})
    assert list(engine.tokenizers) == [None, "own"]
    assert engine._vocabularies["own"] is engine._vocabularies[None]


def test_an_adapters_end_token_ends_only_its_answers(served: Served, own_folder: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "!"})
    tokenizer.save_pretrained(own_folder)
    end = tokenizer.eos_token_id
    assert end not in (None, EOS_ID)
    engine = make_engine(served.base, adapters={"own": str(own_folder)})
    ending = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={end: 1e9})
    answers = run(
        engine, GenerationRequest("own", SHARED, ending, adapter="own"), GenerationRequest("base", SHARED, ending)
    )
    assert (answers["own", 0].token_ids, answers["own", 0].finish_reason) == ([end], "stop")
    assert answers["own", 0].text == ""
    assert (answers["base", 0].token_ids, answers["base", 0].finish_reason) == ([end] * 5, "length")
    assert answers["base", 0].text == "!" * 5
    maybe = replace(ending, grammar=Grammar("regex", "a*"))  # its own end is allowed where the answer may end
    answers = run(engine, GenerationRequest("own", SHARED, maybe, adapter="own"))
    assert answers["own", 0].token_ids == [end]


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(base: PreTrainedModel, folder: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        make_engine(base, adapters={"bad": str(folder)})
    assert refused.value.field == "adapters.bad"
    assert str(folder) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("lora", "because"),
    [
        ({"use_dora": True}, "adapter_config.json: use_dora = true is not supported"),
        ({"modules_to_save": ["norm"]}, 'adapter_config.json: modules_to_save = ["norm"] is not supported'),
        ({"bias": "lora_only"}, "adapter_config.json: bias = 'lora_only' is not supported; only 'none' is"),
        ({"lora_bias": True}, "adapter_config.json: lora_bias = true is not supported"),
        ({"trainable_token_indices": [3]}, "adapter_config.json: trainable_token_indices = "),
        ({"layer_replication": [[0, 1], [0, 2]]}, "adapter_config.json: layer_replication = "),
        ({"target_modules": ["embed_tokens"]}, "the tensor base_model.model.model.embed_tokens."),
        ({"target_modules": ["lm_head"]}, "the tensor base_model.model.lm_head.base_layer.weight is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' may have changed the base's weights"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_adapters_other_than_plain_lora_are_refused(
    served: Served, tmp_path: Path, lora: dict[str, Any], because: str
) -> None:
    write_adapter(served.base, tmp_path, seed=1, **{"r": 2, "target_modules": ["q_proj"]} | lora)
    assert because in refusal(served.base, tmp_path)


def test_an_adapter_that_does_not_fit_the_model_is_refused(served: Served, tmp_path: Path) -> None:
    other = make_model(LlamaConfig(**SHAPE | {"hidden_size": 32}))
    write_adapter(other, tmp_path / "shape", seed=1, r=2, target_modules=["q_proj"])
    assert "model.layers.0.self_attn.q_proj maps 64 to 64, but lora_A is (2, 32)" in refusal(
        served.base, tmp_path / "shape"
    )
    deeper = make_model(LlamaConfig(**SHAPE | {"num_hidden_layers": 3}))
    write_adapter(deeper, tmp_path / "deeper", seed=1, r=2, target_modules=["q_proj"], layers_to_transform=[2])
    assert "LlamaForCausalLM has no layer model.layers.2.self_attn.q_proj" in refusal(served.base, tmp_path / "deeper")


def test_missing_or_inconsistent_files_are_refused(served: Served, own_folder: Path) -> None:
    config_path = own_folder / "adapter_config.json"
    config = json.loads(config_path.read_text())
    for change, because in (
        ({"r": 3}, "model.layers.0.self_attn.q_proj: rank 2, but adapter_config.json says 3"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'; only 'LORA' is supported"),
        ({"some_new_trick": 7}, "some_new_trick = 7 is not supported"),
    ):
        config_path.write_text(json.dumps(config | change))
        assert because in refusal(served.base, own_folder)
    config_path.write_text("{")
    assert "Expecting property name" in refusal(served.base, own_folder)
    config_path.write_text(json.dumps(config))
    (own_folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    assert "header" in refusal(served.base, own_folder)
    (own_folder / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors" in refusal(served.base, own_folder)
    assert "nowhere" in refusal(served.base, own_folder / "nowhere")


class Routed(nn.Module):
    """An expert: it gets only the rows routed to it."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.expert = mlp

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = hidden[..., 0] > 0
        output = hidden.clone()
        output[chosen] = self.expert(hidden[chosen])
        return output


def test_layers_that_see_only_some_rows_are_refused(tmp_path: Path) -> None:
    model = llama()
    model.model.layers[1].mlp = Routed(model.model.layers[1].mlp)
    write_adapter(model, tmp_path, seed=1, r=2, target_modules=["q_proj", "up_proj"])
    because = "model.layers.1.mlp.expert.up_proj computes only some of a batch's tokens"
    with pytest.raises(ConfigError, match=because) as refused:
        make_engine(model, adapters={"bad": str(tmp_path)})
    assert refused.value.field == "adapters.bad"
