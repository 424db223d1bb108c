"""What feeding a batch in the order of its prefixes gains on a real engine, compared with the file's order.

A file has ``prefixes`` times ``each`` lines in random order: a prefix that ``each`` of them share (a long system
prompt, examples, a document), their own suffix, and an answer of a fixed length. The lines are indexed by
``gateway.batches.index`` itself and read in the feeder's order or in the file's. Spillway's own engine with a pool's
default settings, float32, gets them in that order, as many at once as the feeder keeps open: every sequence in use, and
a few more waiting. *Ratio*: lines per second in the feeder's order divided by those in the file's; *cpu ratio*: the
same per second of CPU time, which is comparable even if other work shares the machine.

Order can only help if prefixes are shared and the cache does not hold all of them anyway, so there are three workloads,
in tokens; the KV memory is given as the number of tokens that it holds:

- *shared*: prefixes of 512, suffixes of 32, answers of 16; together much larger than the memory;
- *mixed*: prefixes of 256, suffixes of 128, answers of 64: less is shared, and more time goes into answers;
- *fits*: as *shared*, but all prefixes fit into the memory: here order should gain almost nothing.

The model is the demo model (a Llama of 4 layers in this repository) or, with ``--model``, a larger Llama with random
weights, where tokens cost more relative to the cost of a step; the tokens are random. The two orders alternate (file,
feeder; feeder, file; ...), ``--pairs`` times after a warm-up; medians with quartiles over the pairs. A unique first
token keeps the cache of one run from the next. One engine: with several workers, each computes a prefix once.

    python -m benchmarks.batch_order [--pairs 4] [--only shared] [--model 68M]
"""

import argparse
import asyncio
import io
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from transformers import LlamaConfig

from benchmarks.gateway_overhead import machine
from benchmarks.random_llama import SIZES, save_model
from engine import GenerationRequest, LLMEngine, SamplingParams
from gateway.batches.index import Index
from gateway.batches.indexer import IndexTask, build
from gateway.batches.lines import Done, decode_line
from pool_worker.engines.local import load
from pool_worker.settings import LocalEngineSettings
from spillway.config import DEMO_MODEL_PATH

PATH: Final = "/v1/completions"
DEMO: Final = "demo"
SEED: Final = 20
VOCAB_SIZE: Final = 3072
THREADS: Final = 1  # with two threads, one would wait for the other on a busy machine
SEQUENCES: Final = 8
FLOAT_BYTES: Final = 4
ORDERS: Final = ("file", "feeder")


@dataclass(frozen=True)
class Workload:
    """Lines with shared prefixes; lengths in tokens."""

    prefixes: int
    each: int
    prefix_tokens: int
    own_tokens: int
    answer_tokens: int
    kv_tokens: int  # that fit into the memory

    def lines(self, salt: int) -> list[list[int]]:
        """Return the prompts in random order."""
        source = random.Random(SEED)
        prompts = [
            [salt, *prefix, *source.choices(range(3, VOCAB_SIZE), k=self.own_tokens)]
            for prefix in (source.choices(range(3, VOCAB_SIZE), k=self.prefix_tokens) for _ in range(self.prefixes))
            for _ in range(self.each)
        ]
        source.shuffle(prompts)
        return prompts


WORKLOADS: Final = {
    "shared": Workload(24, 8, 512, 32, 16, kv_tokens=8_192),
    "mixed": Workload(24, 8, 256, 128, 64, kv_tokens=5_120),
    "fits": Workload(24, 8, 512, 32, 16, kv_tokens=32_768),
}


def in_feeding_order(prompts: Sequence[Sequence[int]], folder: Path) -> list[list[int]]:
    """Return the prompts in the order in which the feeder reads them from its index."""
    lines = b"".join(
        json.dumps(
            {"custom_id": str(number), "method": "POST", "url": PATH, "body": {"model": DEMO, "prompt": prompt}}
        ).encode()
        + b"\n"
        for number, prompt in enumerate(prompts)
    )
    task = IndexTask(str(folder / "lines.index"), PATH, {DEMO: DEMO}, max_lines=len(prompts), max_line_bytes=1 << 20)
    report = build(task, io.BytesIO(lines))
    assert (report.total, report.errors) == (len(prompts), [])
    return asyncio.run(_read(Path(task.path)))


async def _read(path: Path) -> list[list[int]]:
    with closing(Index(path)) as index:
        return [json.loads(bytes(decode_line(text).body))["prompt"] async for _, text in index.lines(Done())]


@dataclass(frozen=True)
class Run:
    """One run through all lines."""

    seconds: float
    cpu_s: float
    computed_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


def feed(engine: LLMEngine, prompts: Sequence[Sequence[int]], answer_tokens: int) -> Run:
    """Answer all prompts in this order, opening them as the feeder does."""
    params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True)
    names = ("computed_tokens", "prompt_tokens", "cached_tokens", "generated_tokens")
    before = [getattr(engine.counters, name) for name in names]
    most_open = SEQUENCES + max(4, SEQUENCES // 4)
    open_lines, next_line = 0, 0
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    while open_lines or next_line < len(prompts):
        while open_lines < most_open and next_line < len(prompts):
            engine.add_request(GenerationRequest(str(next_line), prompts[next_line], params))
            open_lines, next_line = open_lines + 1, next_line + 1
        open_lines -= sum(output.finish_reason is not None for output in engine.step())
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return Run(seconds, cpu_s, *(getattr(engine.counters, name) - old for name, old in zip(names, before, strict=True)))


def kv_bytes_per_token(model: Path) -> int:
    """Return the bytes of one token's keys and values in float32."""
    config: Any = LlamaConfig.from_pretrained(model)
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * FLOAT_BYTES)


def measure(model: Path, workload: Workload, pairs: int, scratch: Path) -> dict[str, Any]:
    """Measure both orders alternately."""
    kv_mib = workload.kv_tokens * kv_bytes_per_token(model) // 2**20
    engine = load(LocalEngineSettings(path=str(model), threads=THREADS, max_sequences=SEQUENCES, kv_mib=kv_mib))
    runs: dict[str, list[Run]] = {order: [] for order in ORDERS}
    feed(engine, workload.lines(VOCAB_SIZE - 1)[: 4 * SEQUENCES], workload.answer_tokens)  # warm up
    psutil.cpu_percent()
    for pair in range(pairs):
        for order in ORDERS if pair % 2 == 0 else reversed(ORDERS):
            prompts = workload.lines(salt=1 + 2 * pair + ORDERS.index(order))
            if order == "feeder":
                prompts = in_feeding_order(prompts, scratch)
            runs[order].append(feed(engine, prompts, workload.answer_tokens))
            print(f"pair {pair} {order}: {runs[order][-1]}", file=sys.stderr, flush=True)
    return {**figures(workload, runs), "machine_busy_percent": psutil.cpu_percent()}


def figures(workload: Workload, runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Return medians and quartiles."""
    lines = workload.prefixes * workload.each
    pairs = list(zip(runs["file"], runs["feeder"], strict=True))
    ratios, cpu_ratios = ([getattr(a, name) / getattr(b, name) for a, b in pairs] for name in ("seconds", "cpu_s"))
    found: dict[str, Any] = {
        "lines": lines,
        "ratio": round(statistics.median(ratios), 2),
        "ratio_quartiles": quartiles(ratios),
        "cpu_ratio": round(statistics.median(cpu_ratios), 2),
        "cpu_ratio_quartiles": quartiles(cpu_ratios),
        "kv_tokens": workload.kv_tokens,
        "prefix_tokens_together": workload.prefixes * workload.prefix_tokens,
    }
    for order, done in runs.items():
        per_s = [lines / run.seconds for run in done]
        found[order] = {
            "lines_per_s": round(statistics.median(per_s), 2),
            "lines_per_s_quartiles": quartiles(per_s),
            "cached_share": round(sum(run.cached_tokens for run in done) / sum(run.prompt_tokens for run in done), 3),
            "computed_tokens": round(statistics.median(run.computed_tokens for run in done)),
        }
    return found


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the lower and upper quartile; of fewer than two values, the value."""
    cuts = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return [round(cuts[0], 2), round(cuts[2], 2)]


def main(arguments: argparse.Namespace) -> None:
    report: dict[str, Any] = {
        "benchmark": "batch_order",
        "unit": "lines/s",
        "model": arguments.model,
        "sequences": SEQUENCES,
        "pairs": arguments.pairs,
        "torch": torch.__version__,
        **machine(),
    }
    with tempfile.TemporaryDirectory(prefix="spillway-order-") as folder:
        model = DEMO_MODEL_PATH
        if arguments.model != DEMO:
            model = Path(folder, arguments.model)
            save_model(arguments.model, model)
        for name in [arguments.only] if arguments.only else WORKLOADS:
            report[name] = measure(model, WORKLOADS[name], arguments.pairs, Path(folder))
            print(name, report[name], file=sys.stderr, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--only", choices=list(WORKLOADS))
    parser.add_argument("--model", choices=[DEMO, *SIZES], default=DEMO)
    main(parser.parse_args())
