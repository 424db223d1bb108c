"""Finds leftovers of requests that are canceled at random times.

10,000 requests, 24 at a time: plain, seeded, with a grammar (of 200, more than are cached), with one choice or three,
some resumed, with too little memory, with drafts. At each step one of ten is canceled: waiting, while its grammar is
compiled, in prefill or in decode. At the end no block, choice, matcher or entry may be held, and memory (resident, and
Python's own) must have leveled off: it may grow by 16 MiB in the second half. Exits with 1 otherwise. The model is a
Llama of 2 tiny layers with the demo model's tokenizer. Needs no network.

    python -m tests.unit.engine.leaks [--requests 10000] [--seed 1]
"""

import argparse
import gc
import json
import random
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine import EngineConfig, GenerationRequest, LLMEngine, ResumePoint, SamplingParams
from protocol.generation import Grammar
from spillway.config import DEMO_MODEL_PATH

AT_ONCE: Final = 24
CANCELLED: Final = 0.1  # share of running requests, at each step
GRAMMARS: Final = 200
MAX_GROWTH_BYTES: Final = 16 << 20
MEASUREMENTS: Final = 20


def make_engine() -> LLMEngine:
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    settings = EngineConfig(
        threads=1,
        max_sequences=16,
        max_batched_tokens=64,
        block_size=4,
        kv_bytes=60 * 4 * 256,
        lookahead_tokens=0,  # so that memory runs short
        draft_tokens=3,
    )
    return LLMEngine(LlamaForCausalLM(config).eval(), tokenizer, settings)


def storm(engine: LLMEngine, requests: int, seed: int) -> Iterator[int]:
    """Run so many requests until they end or are canceled; yield after each step how many have been added.

    Raises KeyError for a choice that ends twice, and ValueError for one that does not end.
    """
    source = random.Random(seed)
    came, running = 0, set[str]()
    unended = set[tuple[str, int]]()  # choices
    while came < requests or engine.has_unfinished():
        while came < requests and len(running) < AT_ONCE:
            request = random_request(f"r{came}", source, engine.info.vocab_size)
            engine.add_request(request)
            running.add(request.request_id)
            unended |= {(request.request_id, index) for index in range(request.sampling.n)}
            came += 1
        for name in [name for name in sorted(running) if source.random() < CANCELLED]:
            running.remove(name)
            engine.abort(name)
        for output in engine.step():
            if output.finish_reason is not None:
                unended.remove((output.request_id, output.index))
                if output.index == 0:
                    running.discard(output.request_id)
        yield came
    if unended:
        raise ValueError(f"these have no end: {unended}")


def random_request(name: str, source: random.Random, vocab_size: int) -> GenerationRequest:
    n = source.choice((1, 1, 1, 3))
    grammar = Grammar("regex", f"[a-f ]{{1,{source.randint(1, GRAMMARS)}}}") if source.random() < 0.3 else None
    params = SamplingParams(
        n=n,
        max_tokens=source.choice((3, 10, 24, 100)),
        temperature=source.choice((0.0, 1.0)),
        presence_penalty=source.choice((0.0, 0.5)),
        logprobs=source.choice((None, 2)),
        stop=source.choice(((), ("e",))),
        grammar=grammar,
    )
    prompt = source.choices(range(20, 26), k=source.choice((1, 9, 60)))
    is_resumed = grammar is None and source.random() < 0.2
    resume = (ResumePoint(0, tuple(source.choices(range(20, vocab_size), k=2)), 0),) if is_resumed else ()
    return GenerationRequest(name, prompt, params, resume)


def held(engine: LLMEngine) -> dict[str, int]:
    """Return the counts that must be 0 in an engine without requests."""
    sequences = len(engine._scheduler.running) + len(engine._scheduler.waiting)
    return {
        "blocks in use": engine._block_pool.used_blocks,
        "requests": len(engine._choices),
        "choices": len(engine._choice_of),
        "compiling": len(engine._compiling),
        "outputs": len(engine._ready),
        "sequences": sequences,
        "keys": len(engine._scheduler._pending_keys),
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    engine = make_engine()
    tracemalloc.start()
    measured: list[tuple[int, int]] = []  # resident, Python's own
    for came in storm(engine, args.requests, args.seed):
        if came >= args.requests * (len(measured) + 1) / MEASUREMENTS:
            gc.collect()
            measured.append((resident_bytes(), tracemalloc.get_traced_memory()[0]))
            resident, python = measured[-1]
            say(f"{came:>6} requests: {resident >> 20} MiB resident, {python >> 10} KiB of Python")
    left = held(engine)
    engine._block_pool.check()
    growth = [last - first for first, last in zip(measured[MEASUREMENTS // 2 - 1], measured[-1], strict=True)]
    is_clean = not any(left.values()) and max(growth) < MAX_GROWTH_BYTES
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    say(
        json.dumps(
            {
                "check": "engine_leaks",
                "commit": commit.stdout.strip() or None,
                "requests": args.requests,
                "preemptions": engine.counters.preemptions,
                "held": left,
                "resident_growth_bytes": growth[0],
                "python_growth_bytes": growth[1],
                "clean": is_clean,
            }
        )
    )
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
