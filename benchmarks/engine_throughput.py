"""Output tokens per second of Spillway's engine beside transformers' own, on a CPU.

Metric: `batch` requests of 128 random prompt tokens are handed over together and each yields the same number of new
tokens, greedily. Tokens per second are all new tokens divided by the wall time from handing over to the last token, so
the prompts' computation is included. Three systems run one after the other in every round, on the same weights, and
the median over the rounds counts, so that other load on the machine meets all three alike:

- `engine`: this repository's engine;
- `generate`: transformers' `model.generate` with its default attention, one static batch;
- `continuous`: transformers' continuous batching, its manager already running.

The model is a Llama of 68 M random float32 parameters, made on the fly with a fixed seed. Needs no network.

    python benchmarks/engine_throughput.py [--quick] [--threads 2] [--new-tokens 64] [--rounds 3]
"""

import argparse
import copy
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable

import torch
import transformers
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from engine import EngineConfig, GenerationRequest, LLMEngine, SamplingParams

SEED = 20
PROMPT_TOKENS = 128
BATCHES = (1, 8, 32)
Run = Callable[[list[list[int]], int], tuple[int, float]]  # (prompts, new tokens each) → tokens produced, seconds


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def engine_run(model: LlamaForCausalLM, threads: int) -> Run:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    engine = LLMEngine(copy.deepcopy(model), tokenizer, EngineConfig(max_sequences=max(BATCHES), threads=threads))

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
        start = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.add_request(GenerationRequest(str(number), prompt, params))
        produced = 0
        while engine.has_unfinished():
            produced += sum(len(output.token_ids) for output in engine.step())
        return produced, time.perf_counter() - start

    return run


def generate_run(model: LlamaForCausalLM) -> Run:
    def run(prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
        start = time.perf_counter()
        inputs = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, do_sample=False
            )
        return output.shape[0] * (output.shape[1] - PROMPT_TOKENS), time.perf_counter() - start

    return run


def continuous_run(model: LlamaForCausalLM) -> Run:
    model = copy.deepcopy(model)
    # Faster here than its own choices (larger pages, block sharing), and sized for the largest batch.
    settings = ContinuousBatchingConfig(
        page_size=32, num_blocks=max(BATCHES) * 16, max_batch_tokens=512, allow_block_sharing=False
    )

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
        generation = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        with (
            torch.no_grad(),
            model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=settings, timeout=5
            ) as manager,
        ):
            start = time.perf_counter()
            manager.add_requests(prompts, max_new_tokens=new_tokens)
            results = []
            while len(results) < len(prompts):
                result = manager.get_result(timeout=60)
                assert result is not None, "continuous batching stopped"
                results += [result] if result.is_finished() else []
            seconds = time.perf_counter() - start
        return sum(len(result.generated_tokens) for result in results), seconds

    return run


def measure(systems: dict[str, Run], batch: int, new_tokens: int, rounds: int) -> dict[str, float]:
    """Return each system's median tokens per second; the first of the rounds + 1 warms up."""
    generator = torch.Generator().manual_seed(SEED + batch)
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds + 1):
        prompts = torch.randint(1, 32_000, (batch, PROMPT_TOKENS), generator=generator).tolist()
        for name, run in systems.items():
            produced, seconds = run(prompts, new_tokens)
            assert produced == batch * new_tokens, f"{name} produced {produced} tokens"
            rates[name].append(produced / seconds)
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 16 tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.quick:
        args.new_tokens, args.rounds = 16, 1
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model = make_model()
    systems = {
        "engine": engine_run(model, args.threads),
        "generate": generate_run(model),
        "continuous": continuous_run(model),
    }
    print(
        f"{model.num_parameters() / 1e6:.0f} M parameters, float32, {args.threads} threads, "
        f"{args.new_tokens} new tokens"
    )
    print(f"{'batch':>5} {'engine':>10} {'generate':>10} {'continuous':>10}  engine / better of the two")
    table = {}
    for batch in BATCHES:
        rates = measure(systems, batch, args.new_tokens, args.rounds)
        factor = rates["engine"] / max(rates["generate"], rates["continuous"])
        table[batch] = {name: round(rate, 1) for name, rate in rates.items()} | {"factor": round(factor, 2)}
        print(
            f"{batch:>5} {rates['engine']:>10.1f} {rates['generate']:>10.1f} {rates['continuous']:>10.1f}  {factor:.2f}"
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        json.dumps(
            {
                "benchmark": "engine_throughput",
                "unit": "output tokens/s",
                "prompt_tokens": PROMPT_TOKENS,
                "new_tokens": args.new_tokens,
                "rounds": args.rounds,
                "threads": args.threads,
                "cpu": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "commit": commit.stdout.strip() or None,
                "batch": table,
            }
        )
    )


if __name__ == "__main__":
    main()
