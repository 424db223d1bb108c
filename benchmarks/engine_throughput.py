"""Output tokens per second and time to first token beside other systems, on a CPU: one model, one run.

*Tokens per second*: `batch` requests of 128 random prompt tokens are submitted together, and each yields the same
number of new tokens, greedily, ignoring end tokens. All new tokens are divided by the wall time from submission to the
last one, including the prompts' computation. *TTFT*: one request of 1,024 prompt tokens and one new one.

- `spillway`: this repository's engine with a pool's default settings, float32; `spillway-int8`: with quantize = "int8";
- `generate`: transformers' `model.generate` with its default attention, one static batch;
- `continuous`: transformers' continuous batching, with its manager already running;
- `vllm`: vLLM for CPUs, compiled, in a separate environment (made on demand, see ``peers/vllm.py``).

The model is a Llama of 125 M random float32 parameters, saved as a folder that each system loads itself. Each runs in a
separate process with the same number of threads. In every round the systems answer the same prompts in turn, with
another system first each time; prompts are new in every round, so no prefix cache helps. The first round warms up and
does not count; the result is the median of the others. While one system runs, the others wait for input; "idle CPU" is
the largest share of a core that they used meanwhile. Answers are compared with those of `generate`: rounding differs,
so with random weights some diverge where two tokens are about equally probable (many with int8; ``engine_quality``
measures its effect on a trained model).

    python -m benchmarks.engine_throughput [--systems generate vllm …] [--quick] [--picture FILE.png]

Equal for all: float32 (except int8), caches on, threads; loading and compiling are not timed. Not equal: vLLM does not
detokenize; it uses Intel's threads as its guide recommends, the others use torch's.
"""

import argparse
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.peers import vllm
from benchmarks.peers.batch_system import SYSTEMS
from benchmarks.random_llama import SEED, VOCAB_SIZE, save_model
from engine import ConfigError
from engine.model.linear import check_quantization
from spillway.bench.in_process import device_name
from spillway.children import die_with_parent

MODEL: Final = "125M"
ROOT: Final = Path(__file__).resolve().parents[1]
BATCHES: Final = (1, 8, 32)
BATCH_PROMPT_TOKENS: Final = 128
TTFT_PROMPT_TOKENS: Final = 1024
START_LIMIT_S: Final = 600.0  # vLLM compiles the first time
ANSWER_LIMIT_S: Final = 300.0
END_LIMIT_S: Final = 20.0
LOG_CHARS: Final = 3000
LABELS: Final = {
    "generate": "transformers generate",
    "continuous": "transformers continuous batching",
    "vllm": "vLLM for CPUs",
    "spillway": "Spillway",
    "spillway-int8": "Spillway, int8",
}
REFERENCE: Final = "generate"
OURS: Final = ("spillway", "spillway-int8")


class SystemFailed(Exception):
    """A system's process ended or did not answer; the message includes the end of its log."""


@dataclass(frozen=True)
class Load:
    """One kind of work."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def name(self) -> str:
        """The name in the JSON output."""
        return "ttft_ms" if self.new_tokens == 1 else f"batch_{self.batch}"

    def figure(self, seconds: float) -> float:
        """Return milliseconds to the first token, or tokens per second."""
        return 1000 * seconds if self.new_tokens == 1 else self.batch * self.new_tokens / seconds


class System:
    """One child of ``peers/batch_system.py``, and its measurements."""

    def __init__(self, name: str, model: Path, threads: int, logs: Path) -> None:
        self.name = name
        self.seconds: dict[Load, list[float]] = {}
        self.same_answers = 0
        self.answers = 0
        self.same_share: list[float] = []  # for each answer: tokens before the first difference
        self._log = logs / f"{name}.log"
        python, extra = (vllm.PYTHON, vllm.environment(threads)) if name == "vllm" else (sys.executable, {})
        command = [str(python), "-m", "benchmarks.peers.batch_system", name, str(model), "--threads", str(threads)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), **extra},
                preexec_fn=die_with_parent,  # noqa: PLW1509 - before any thread is started
            )
        self.version = str(self._read(START_LIMIT_S)["version"])

    def run(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
        """Answer one batch; return the new tokens and the seconds it took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        answer = self._read(ANSWER_LIMIT_S)
        return answer["outputs"], answer["seconds"]

    def cpu_s(self) -> float:
        """Return the CPU time used since its start."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def end(self) -> None:
        """Close its input and wait for its end."""
        with self._process:  # closes its pipes
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _read(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            last_words = self._log.read_text(errors="replace")[-LOG_CHARS:]
            raise SystemFailed(
                f"{self.name} {'ended' if ready else f'did not answer in {limit_s:.0f} s'}\n{last_words}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def default_systems() -> list[str]:
    """Return all systems that need no separate environment; int8 if this CPU supports it."""
    systems = ["generate", "continuous", "spillway"]
    try:
        check_quantization("int8", device="cpu", dtype=torch.float32)
    except ConfigError:
        return systems
    return [*systems, "spillway-int8"]


def make_prompts(source: random.Random, load: Load) -> list[list[int]]:
    return [source.choices(range(1, VOCAB_SIZE), k=load.prompt_tokens) for _ in range(load.batch)]


def compare(system: System, outputs: list[list[int]], reference: list[list[int]]) -> None:
    for output, expected in zip(outputs, reference, strict=True):
        same = next((at for at, (a, b) in enumerate(zip(output, expected, strict=True)) if a != b), len(expected))
        system.answers += 1
        system.same_answers += same == len(expected)
        system.same_share.append(same / len(expected))


def measure(systems: Sequence[System], loads: list[Load], rounds: int) -> float:
    """Run everything; return the idle CPU (see the module)."""
    source = random.Random(SEED)
    idle_share = 0.0
    for round_ in range(rounds + 1):
        first = round_ % len(systems)
        for load in loads:
            prompts = make_prompts(source, load)
            answers: dict[str, list[list[int]]] = {}
            for system in (*systems[first:], *systems[:first]):
                before = {other: other.cpu_s() for other in systems}
                outputs, seconds = system.run(prompts, load.new_tokens)
                answers[system.name] = outputs
                assert [len(output) for output in outputs] == [load.new_tokens] * load.batch, system.name
                if round_ > 0:
                    system.seconds.setdefault(load, []).append(seconds)
                    idle = max(other.cpu_s() - before[other] for other in systems if other is not system)
                    idle_share = max(idle_share, idle / seconds)
                print(f"round {round_} {load.name} {system.name}: {seconds:.2f} s", file=sys.stderr)
            for system in systems:
                compare(system, answers[system.name], answers[REFERENCE])
    return idle_share


def figures(system: System) -> dict[str, Any]:
    found = {load.name: round(load.figure(statistics.median(s)), 1) for load, s in system.seconds.items()}
    return {
        "version": system.version,
        **found,
        "same_answers": system.same_answers,
        "answers": system.answers,
        "same_tokens_share": round(statistics.mean(system.same_share), 4),
    }


def factors(found: dict[str, dict[str, Any]], loads: list[Load]) -> dict[str, dict[str, float]]:
    """Return, by load, the ratio of Spillway's figures to the best of the others."""
    result: dict[str, dict[str, float]] = {}
    for name in (name for name in OURS if name in found):
        result[name] = {}
        for load in loads:
            others = [figures[load.name] for other, figures in found.items() if other not in OURS]
            own = found[name][load.name]
            factor = min(others) / own if load.new_tokens == 1 else own / max(others)
            result[name][load.name] = round(factor, 2)
    return result


def as_table(found: dict[str, dict[str, Any]], ours: dict[str, dict[str, float]], loads: list[Load]) -> Table:
    table = Table("system", "version", box=SIMPLE_HEAD)
    for load in loads:
        title = "TTFT, ms" if load.new_tokens == 1 else f"tokens/s, batch {load.batch}"
        table.add_column(title, justify="right")
    table.add_column("same answers", justify="right")
    for name, row in found.items():
        cells = [f"{row[load.name]:,.1f}" for load in loads]
        table.add_row(LABELS[name], row["version"], *cells, f"{row['same_answers']} of {row['answers']}")
    for name, row_factors in ours.items():
        table.add_row(f"{LABELS[name]} / best peer", "", *(f"{row_factors[load.name]:.2f}" for load in loads), "")
    return table


def draw(found: dict[str, dict[str, Any]], loads: list[Load], title: str, path: Path) -> None:
    """Draw bars: tokens per second by batch, and time to first token."""
    from matplotlib import colormaps  # noqa: PLC0415 - importing takes a second, also in tests
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(12, 4.6), dpi=150, layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=11)
    throughput, first_token = figure.subplots(1, 2, width_ratios=(3, 1.3))
    batches = [load for load in loads if load.new_tokens > 1]
    width = 0.8 / len(found)
    for number, (name, row) in enumerate(found.items()):
        shade = (
            colormaps["Blues"](0.95 - 0.25 * OURS.index(name))
            if name in OURS
            else colormaps["Greys"](0.3 + 0.15 * number)
        )
        at = [place + (number - (len(found) - 1) / 2) * width for place in range(len(batches))]
        bars = throughput.bar(at, [row[load.name] for load in batches], width * 0.92, color=shade, label=LABELS[name])
        throughput.bar_label(bars, fmt="{:,.0f}", fontsize=7, padding=1)
        bars = first_token.bar([number], [row["ttft_ms"]], 0.8, color=shade)
        first_token.bar_label(bars, fmt="{:,.0f}", fontsize=7, padding=1)
    throughput.set_xticks(range(len(batches)), [f"{load.batch}" for load in batches])
    throughput.set_xlabel(f"requests at once ({BATCH_PROMPT_TOKENS} prompt tokens each)")
    throughput.set_ylabel("new tokens per second")
    throughput.set_title("Throughput: higher is better", fontsize=11)
    throughput.legend(frameon=False)
    first_token.set_xticks(range(len(found)), list(found), rotation=35, ha="right", fontsize=8)
    first_token.set_ylabel(f"TTFT of {TTFT_PROMPT_TOKENS:,} prompt tokens (ms)")
    first_token.set_title("First token: lower is better", fontsize=11)
    for axes in (throughput, first_token):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=default_systems())
    parser.add_argument("--quick", action="store_true", help="one round of 16 tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--picture", type=Path, help="draw the figures into this .png or .svg")
    args = parser.parse_args()
    if args.quick:
        args.new_tokens, args.rounds = 16, 1
    if REFERENCE not in args.systems:
        parser.error(f"--systems: {REFERENCE} is required, because the others' answers are compared with it")
    if "vllm" in args.systems:
        vllm.install()
    loads = [Load(batch, BATCH_PROMPT_TOKENS, args.new_tokens) for batch in BATCHES] + [Load(1, TTFT_PROMPT_TOKENS, 1)]
    with tempfile.TemporaryDirectory(prefix="engine-throughput-") as scratch, ExitStack() as ends:
        model = Path(scratch, "model")
        parameters = save_model(MODEL, model)
        systems = []
        for name in args.systems:
            systems.append(System(name, model, args.threads, Path(scratch)))
            ends.callback(systems[-1].end)
        idle_share = measure(systems, loads, args.rounds)
    found = {system.name: figures(system) for system in systems}
    ours = factors(found, loads)
    cpu = device_name("cpu")
    plural = "thread" if args.threads == 1 else "threads"
    title = f"{parameters / 1e6:.0f} M Llama, float32, {args.threads} {plural} of {cpu}, {args.new_tokens} new tokens"
    Console(width=140).print(title, as_table(found, ours, loads), sep="\n")
    if args.picture:
        draw(found, loads, title, args.picture)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report = {
        "benchmark": "engine_throughput",
        "unit": "output tokens/s",
        "parameters": parameters,
        "prompt_tokens": BATCH_PROMPT_TOKENS,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "threads": args.threads,
        "cpu": cpu,
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or None,
        "idle_cpu": round(idle_share, 3),
        "systems": found,
        "factors": ours,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
