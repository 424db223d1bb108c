"""Tiny random models and tokenizers, made on the fly, and the drivers that the engine's tests share."""

import copy
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from engine import EngineConfig, GenerationRequest, LLMEngine, PromptLogprob, SequenceOutput, TokenLogprob

torch.set_num_threads(1)  # for the references too, since tests run in parallel

VOCAB_SIZE = 300
EOS_ID = 1
# A wide initialization keeps the best logit far from the second, so that rounding cannot swap them.
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Return a new tokenizer, always with the same tokens."""
    tokenizer = Tokenizer.from_str(_trained_tokenizer())
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@cache
def _trained_tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, hello café, price 5 € and more words here"] * 3, trainer)
    return tokenizer.to_str()


def make_model(config: PreTrainedConfig, seed: int = 1) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model


def llama() -> PreTrainedModel:
    return make_model(LlamaConfig(**SHAPE))


def greedy_reference(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the output of transformers' own `generate`."""
    output = model.generate(
        torch.tensor([prompt], device=model.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=model.device),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


def make_engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **config: Any) -> LLMEngine:
    settings: dict[str, Any] = {
        "threads": 1,
        "max_sequences": 8,
        "max_batched_tokens": 24,
        "block_size": 4,
        "kv_bytes": 1 << 20,
    } | config
    return LLMEngine(copy.deepcopy(model), tokenizer or byte_level_tokenizer(), EngineConfig(**settings))


@dataclass
class Answer:
    """A choice's combined output."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None


Answers = dict[tuple[str, int], Answer]


def collect(answers: Answers, outputs: list[SequenceOutput]) -> None:
    for output in outputs:
        answer = answers[output.request_id, output.index]
        assert answer.finish_reason is None, "output after the end"
        answer.token_ids += output.token_ids
        answer.text += output.text
        answer.logprobs += output.logprobs or []
        answer.prompt_logprobs += output.prompt_logprobs or []
        answer.cached_tokens = output.cached_tokens
        answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_reason
        answer.error = output.error


def drain(engine: LLMEngine, answers: Answers | None = None) -> Answers:
    answers = defaultdict(Answer) if answers is None else answers
    while engine.has_unfinished():
        collect(answers, engine.step())
    return answers


def run(engine: LLMEngine, *requests: GenerationRequest) -> Answers:
    for request in requests:
        engine.add_request(request)
    return drain(engine)
