"""Output tokens per second of Spillway's engine on an NVIDIA GPU, beside its memory-bandwidth floor and its peer.

Metrics, for 1, 8, 64 and 256 requests of 512 random prompt tokens, submitted together, 128 new tokens each, greedy:

- *TTFT*: from submission to each request's first token, mean and last.
- *tokens/s*: new tokens divided by the time from submission to the last one, including prompts.
- *decode tokens/s*: new tokens after each request has its first, divided by the time from then on.
- *share of the floor*: a decoding step must at least read the weights and every sequence's keys and values once. That
  number of bytes, divided by the bandwidth of a large copy on this card, over the mean time of a decoding step.

The peer is transformers' continuous batching with its defaults (including CUDA graphs), in tokens/s, with its manager
already running. Every figure is the median over rounds, after one warm-up round; for each batch size the engine runs
first.

The model is a Llama of 1.2 billion random bfloat16 parameters (the shape of Llama 3.2 1B), made on the card with a
fixed seed, with a byte-level tokenizer as most models have; `--model` loads another from a folder. Needs no network,
but a GPU with about 24 GB.

    python -m benchmarks.engine_gpu [--model FOLDER] [--rounds 3] [--without-peer]
"""

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.random_llama import byte_level_tokenizer
from engine import EngineConfig, GenerationRequest, LLMEngine, SamplingParams

SEED = 22
PROMPT_TOKENS, NEW_TOKENS = 512, 128
BATCHES = (1, 8, 64, 256)
COPIED_BYTES = 2 << 30


@dataclass(frozen=True)
class Wave:
    """The times of requests that were submitted together, in seconds."""

    first_s: list[float]  # each request's first token
    total_s: float

    def figures(self, floor_step_s: float) -> dict[str, float]:
        """Return the metrics, given the shortest possible time of a decoding step."""
        requests = len(self.first_s)
        decoding_s = self.total_s - max(self.first_s)
        return {
            "ttft_ms_mean": 1000 * statistics.mean(self.first_s),
            "ttft_ms_last": 1000 * max(self.first_s),
            "tokens_per_s": requests * NEW_TOKENS / self.total_s,
            "decode_tokens_per_s": requests * (NEW_TOKENS - 1) / decoding_s,
            "share_of_floor": floor_step_s * (NEW_TOKENS - 1) / decoding_s,
        }


def make_model(device: str, folder: str | None) -> PreTrainedModel:
    if folder is not None:
        return placed(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), device)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.eval()
    return placed(model, torch.bfloat16)


def placed(model: PreTrainedModel, where: torch.dtype | str) -> PreTrainedModel:
    moving: Any = model  # the type of its own ``to`` is wrong
    moving.to(where)
    return model


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize)


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that a step reads: all except the embedding, of which it reads some rows."""
    embeddings: Any = model.get_input_embeddings()
    embedding = embeddings.weight
    read = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    if model.get_output_embeddings().weight is not embedding:
        del read[embedding.data_ptr()]
    return sum(read.values())


def bytes_per_s(device: str) -> float:
    """Measure the bandwidth of a large copy: every byte is read once and written once."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * COPIED_BYTES / min(seconds)


def make_engine(model: PreTrainedModel, device: str) -> LLMEngine:
    tokenizer = byte_level_tokenizer(model.config.get_text_config().vocab_size)
    length = PROMPT_TOKENS + NEW_TOKENS
    config = EngineConfig(
        device=device,
        max_sequences=max(BATCHES),
        max_batched_tokens=8192,
        max_model_len=length,
        kv_bytes=max(BATCHES) * length * kv_bytes_per_token(model),
        prefix_cache=False,
    )
    return LLMEngine(copy.deepcopy(model), tokenizer, config)


def engine_wave(engine: LLMEngine, prompts: list[list[int]]) -> Wave:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    start_s = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(GenerationRequest(str(number), prompt, params))
    first_s: dict[str, float] = {}
    produced = 0
    while engine.has_unfinished():
        for output in engine.step():
            produced += len(output.token_ids)
            first_s.setdefault(output.request_id, time.perf_counter() - start_s)
    assert produced == len(prompts) * NEW_TOKENS, f"{produced} tokens"
    return Wave(list(first_s.values()), time.perf_counter() - start_s)


def peer_tokens_per_s(model: PreTrainedModel, waves: list[list[list[int]]]) -> list[float]:
    generating: Any = model  # from an untyped mixin
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    rates = []
    with (
        torch.no_grad(),
        generating.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(), timeout=30
        ) as manager,
    ):
        for prompts in waves:
            start_s = time.perf_counter()
            manager.add_requests(prompts, max_new_tokens=NEW_TOKENS)
            finished = 0
            while finished < len(prompts):
                result = manager.get_result(timeout=120)
                assert result is not None, "continuous batching stopped"
                finished += result.is_finished()
            rates.append(len(prompts) * NEW_TOKENS / (time.perf_counter() - start_s))
    return rates


def measure(
    engine: LLMEngine, peer: PreTrainedModel | None, batch: int, rounds: int, floor_step_s: float
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(SEED + batch)
    waves = torch.randint(1, engine.info.vocab_size, (rounds + 1, batch, PROMPT_TOKENS), generator=generator).tolist()
    figures = [engine_wave(engine, prompts).figures(floor_step_s) for prompts in waves][1:]
    medians = {name: statistics.median(one[name] for one in figures) for name in figures[0]}
    if peer is not None:
        medians["peer_tokens_per_s"] = statistics.median(peer_tokens_per_s(peer, waves)[1:])
    return {name: float(f"{value:.4g}") for name, value in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-peer", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("engine_gpu needs an NVIDIA GPU, and this torch finds none; nothing was measured")
    transformers.logging.set_verbosity_error()
    model = make_model("cuda", args.model)
    bandwidth = bytes_per_s("cuda")
    engine = make_engine(model, "cuda")
    name = torch.cuda.get_device_name()
    print(f"{name}, copies {bandwidth / 1e12:.2f} TB/s; {model.num_parameters() / 1e9:.2f} G parameters, bfloat16")
    table = {}
    for batch in BATCHES:
        context_bytes = batch * (PROMPT_TOKENS + NEW_TOKENS // 2) * kv_bytes_per_token(model)
        floor_step_s = (weight_bytes(model) + context_bytes) / bandwidth
        table[batch] = measure(engine, None if args.without_peer else model, batch, args.rounds, floor_step_s)
        print(f"batch {batch:>3}", table[batch], flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        json.dumps(
            {
                "benchmark": "engine_gpu",
                "gpu": name,
                "copy_bytes_per_s": round(bandwidth),
                "parameters": model.num_parameters(),
                "dtype": "bfloat16",
                "prompt_tokens": PROMPT_TOKENS,
                "new_tokens": NEW_TOKENS,
                "rounds": args.rounds,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "commit": commit.stdout.strip() or None,
                "batch": table,
            }
        )
    )


if __name__ == "__main__":
    main()
