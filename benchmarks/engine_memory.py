"""Measures how much time the prefix cache saves and preemption costs, on a CPU.

- *shared prefix*: 32 requests at once, with 512 common tokens and 32 of their own, 32 new tokens each. Time to first
  token of each, counted from submission, and output tokens per second; with the cache off, with an empty cache ("cold":
  the first request computes the prefix), and with the prefix in it ("warm").
- *overload*: 64 requests of random lengths (prompts of 32 to 256 tokens, 16 to 256 new ones, a limit of 256) with
  memory for a quarter of them; *outgrow*: 40 requests that reach their limit (prompts of 16 to 64 tokens, 128 to 512
  new ones). Reserving each one's whole length is compared with growing and preempting. The recompute tax is the share
  of tokens computed more than once; the longest pause is the largest number of steps for which preemption stopped a
  stream.

The model is a Llama of 68 M random float32 parameters. Needs no network.

    python -m benchmarks.engine_memory [--threads 2]
"""

import argparse
import copy
import json
import random
import statistics
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import LlamaForCausalLM

from benchmarks.random_llama import empty_tokenizer, make_model
from engine import EngineConfig, GenerationRequest, LLMEngine, SamplingParams

SEED = 21
SHARING, PREFIX_TOKENS, OWN_TOKENS, NEW_TOKENS = 32, 512, 32, 32
BLOCK_SIZE = 16


def make_engine(model: LlamaForCausalLM, **config: Any) -> LLMEngine:  # noqa: ANN401 - fields of EngineConfig
    return LLMEngine(copy.deepcopy(model), empty_tokenizer(), EngineConfig(block_size=BLOCK_SIZE, **config))


def random_tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(1, 32_000) for _ in range(count)]


def wave(engine: LLMEngine, requests: list[GenerationRequest]) -> dict[str, float]:
    """Submit all requests at once; return TTFT and throughput."""
    start_s = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    first_s: dict[str, float] = {}
    produced = 0
    while engine.has_unfinished():
        for output in engine.step():
            produced += len(output.token_ids)
            first_s.setdefault(output.request_id, time.perf_counter() - start_s)
    ordered = sorted(first_s.values())
    return {
        "ttft_ms_mean": round(1000 * statistics.mean(ordered), 1),
        "ttft_ms_max": round(1000 * ordered[-1], 1),
        "tokens_per_s": round(produced / (time.perf_counter() - start_s), 1),
    }


def shared_prefix(model: LlamaForCausalLM, threads: int) -> dict[str, dict[str, float]]:
    source = random.Random(SEED)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def requests(prefix: list[int]) -> list[GenerationRequest]:
        return [
            GenerationRequest(str(number), prefix + random_tokens(source, OWN_TOKENS), params)
            for number in range(SHARING)
        ]

    without = make_engine(model, max_sequences=SHARING, threads=threads, prefix_cache=False)
    cached = make_engine(model, max_sequences=SHARING, threads=threads)
    wave(without, requests(random_tokens(source, PREFIX_TOKENS)))  # warm up
    prefix = random_tokens(source, PREFIX_TOKENS)
    return {
        "off": wave(without, requests(prefix)),
        "cold": wave(cached, requests(prefix)),
        "warm": wave(cached, requests(prefix)),
    }


@dataclass(frozen=True)
class Load:
    """Requests that arrive at once."""

    requests: int
    prompts: tuple[int, int]  # tokens, from and to
    outputs: tuple[int, int]
    asked: int | None  # max_tokens; None: the actual length


OVERLOADS = {
    "overload": Load(64, (32, 256), (16, 256), asked=256),
    "outgrow": Load(40, (16, 64), (128, 512), asked=None),
}


def overload(model: LlamaForCausalLM, threads: int, load: Load) -> dict[str, dict[str, float]]:
    source = random.Random(SEED)
    wanted = [(source.randint(*load.prompts), source.randint(*load.outputs)) for _ in range(load.requests)]
    prompts = [random_tokens(source, prompt) for prompt, _ in wanted]
    config: Any = model.config
    bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    kv_bytes = bytes_per_token * sum(prompt + (load.asked or output) for prompt, output in wanted) // 4
    found = {}
    limits = {"max_sequences": load.requests, "threads": threads, "kv_bytes": kv_bytes}
    for name, lookahead in {"reserve": {"lookahead_tokens": config.max_position_embeddings}, "preempt": {}}.items():
        under_test = make_engine(model, **limits, **lookahead)
        for number, (prompt, (_, output)) in enumerate(zip(prompts, wanted, strict=True)):
            # If every request sets the largest limit, its real end is not known beforehand.
            params = SamplingParams(temperature=0.0, max_tokens=load.asked or output, ignore_eos=True)
            under_test.add_request(GenerationRequest(f"{number}.{output}", prompt, params))
        found[name] = until_the_end(under_test, sum(prompt + output for prompt, output in wanted) - load.requests)
    return found


def until_the_end(under_test: LLMEngine, needed_tokens: int) -> dict[str, float]:
    start_s = time.perf_counter()
    made: dict[str, int] = {}
    last_step: dict[str, int] = {}
    steps = longest_pause = 0
    while under_test.has_unfinished():
        steps += 1
        for output in under_test.step():
            name = output.request_id
            made[name] = made.get(name, 0) + len(output.token_ids)
            longest_pause = max(longest_pause, steps - last_step.get(name, steps) - 1)
            last_step[name] = steps
            if output.finish_reason is None and made[name] >= int(name.partition(".")[2]):
                under_test.abort(name)
    seconds = time.perf_counter() - start_s
    counters = under_test.counters
    return {
        "seconds": round(seconds, 1),
        "tokens_per_s": round(sum(made.values()) / seconds, 1),
        "steps": steps,
        "longest_pause_steps": longest_pause,
        "preemptions": counters.preemptions,
        "recompute_tax": round(counters.computed_tokens / needed_tokens - 1, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = make_model("68M")
    prefix = shared_prefix(model, args.threads)
    for name, figures in prefix.items():
        print(f"shared prefix, cache {name:<5} {figures}")
    loads = {name: overload(model, args.threads, load) for name, load in OVERLOADS.items()}
    for name, ways in loads.items():
        for way, figures in ways.items():
            print(f"{name:<8}, {way:<8} {figures}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        json.dumps(
            {
                "benchmark": "engine_memory",
                "threads": args.threads,
                "torch": torch.__version__,
                "commit": commit.stdout.strip() or None,
                "shared_prefix": prefix,
                **loads,
            }
        )
    )


if __name__ == "__main__":
    main()
