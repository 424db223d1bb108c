"""The latency and CPU that Spillway adds to an answer, beside LiteLLM's proxy and NVIDIA's Dynamo in the same run.

The engine is the scripted one without delays (or 20 ms per token where stated), so only the path is measured: gateway,
queue, worker and back. Every process runs alone, and all of them, including the load client, share this machine's
cores: on two cores, figures under load include the client's disturbance.

- *idle*: round trip of short requests (a dozen words in, 16 tokens out, not streamed), one after another on one
  keep-alive connection. All of it is added latency.
- *at load*: the same requests at 200 per second, sent at fixed times regardless of the answers, over 64 keep-alive
  connections. Latency counts from the time at which a request was due, so stalls are charged in full. *TTFT* is that of
  streamed requests under the same load, to the first event with text.
- *saturated*: the same requests as fast as they are answered, over 64 connections: the maximum rate, and the cost of a
  request when caches are warm and no process has to wake up for it.
- *inter-token*: 64 streams whose engine makes a token every 20 ms: the client's gap between two events with text, minus
  20 ms. Negative gaps follow late events; a median far below zero means that events arrive in bursts.
- *CPU per request*: user + system time of each process during the loads above and until their remaining work is done
  (usage records on their way into SQL), divided by the requests answered.
- *CPU per token*: the same for 64 concurrent streams, at 20 ms per token and at full speed. It includes the start and
  end of each stream.

LiteLLM runs in front of a tiny backend that answers at once (`peers/fake_backend.py`). Its latencies are those through
the proxy minus those of the backend alone, percentile by percentile, and its CPU is the proxy's alone. If it cannot
serve 200 requests per second, its queue grows until the load ends: compare the column of the achieved rate, and the
idle figures, which have no load.

Dynamo's frontend runs in front of two of its mockers (engines without a model) with NATS as the request plane, all with
defaults. Its answers return over TCP, because it has no response plane on NATS. It checks no key, keeps no ledger and
queues nothing. Its CPU is that of frontend, mockers and NATS, as Spillway's is that of gateway, workers and NATS.

Percentiles are over the requests of all rounds; CPU is the median of the rounds. "Others" are the cores that processes
outside the measurement kept busy: more than a few hundredths invalidate a run. "Stolen" are those that the hypervisor
gave to other machines, which increases every CPU time: a round above ``STOLEN_LIMIT_CORES`` is repeated. Prompts are
drawn with a fixed seed.

    python -m benchmarks.gateway_overhead [--quick] [--peers litellm dynamo]
"""

import argparse
import asyncio
import gc
import itertools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop
from rich.console import Console

from benchmarks import load_client
from benchmarks.cpu_meter import CpuMeter, Window
from benchmarks.http_client import Exchange, post_request
from benchmarks.load_client import LoadError
from benchmarks.overhead_tables import print_tables
from benchmarks.peers import dynamo, litellm
from benchmarks.spillway_under_test import running_spillway
from benchmarks.stream_answer import Answer, read

SEED: Final = 20
HOST: Final = "127.0.0.1"
PATH: Final = "/v1/chat/completions"
ANSWER_TOKENS: Final = 16
PROMPT_WORDS: Final = 12
RATE_PER_S: Final = 200.0
CONNECTIONS: Final = 64
STREAMS: Final = 64
TOKEN_MS: Final = 20.0
TABLE_WIDTH: Final = 160
LOADS: Final = ("idle", "at_load", "streamed_at_load", "saturated", "paced_streams", "instant_streams")
STOLEN_LIMIT_CORES: Final = 0.03
MAX_TRIES: Final = 8  # per round, for a round undisturbed by the hypervisor
PAUSE_S: Final = 10.0  # before the next try
WORDS: Final = ("why", "does", "the", "river", "rise", "over", "a", "dam", "when", "its", "gates", "hold", "water")


@dataclass(frozen=True)
class Sizes:
    """The amount of each load in one round."""

    rounds: int
    warm_up: int
    idle: int
    at_load: int
    saturated: int
    paced_tokens: int  # of each of the 64 streams
    instant_tokens: int


SPILLWAY_SIZES: Final = Sizes(
    rounds=3, warm_up=400, idle=1000, at_load=1000, saturated=3000, paced_tokens=200, instant_tokens=400
)
PEER_SIZES: Final = Sizes(
    rounds=3, warm_up=100, idle=200, at_load=250, saturated=200, paced_tokens=50, instant_tokens=50
)
QUICK: Final = Sizes(rounds=1, warm_up=50, idle=100, at_load=100, saturated=200, paced_tokens=20, instant_tokens=20)


@dataclass(frozen=True)
class Target:
    """A system with a chat endpoint, and the processes whose CPU is measured."""

    port: int
    api_key: str
    pids: dict[str, int]


@dataclass(frozen=True)
class Round:
    """One round of one load."""

    samples_ms: dict[str, list[float]]  # by measured quantity
    units: int  # requests, or tokens
    busy_s: float
    window: Window


@dataclass
class Load:
    """The results of one load's rounds."""

    samples_ms: dict[str, list[float]] = field(default_factory=dict)  # by measured quantity, over all rounds
    cpu_us: list[dict[str, float]] = field(default_factory=list)  # by process, per unit (request or token), per round
    others_cores: list[float] = field(default_factory=list)  # per round
    stolen_cores: list[float] = field(default_factory=list)  # per round
    per_s: list[float] = field(default_factory=list)  # units per second, per round

    def add(self, measured: Round) -> None:
        """Add a round."""
        for name, samples in measured.samples_ms.items():
            self.samples_ms.setdefault(name, []).extend(samples)
        window = measured.window
        self.cpu_us.append({name: cpu_s / measured.units * 1e6 for name, cpu_s in window.cpu_s.items()})
        self.others_cores.append(window.others_cores)
        self.stolen_cores.append(window.stolen_cores)
        self.per_s.append(measured.units / measured.busy_s)

    def summary(self) -> dict[str, Any]:
        """Return percentiles in ms and CPU in µs per unit."""
        timed = {
            name: {"p50_ms": round(percentile(samples, 50), 3), "p99_ms": round(percentile(samples, 99), 3)}
            for name, samples in self.samples_ms.items()
        }
        cpu = {name: round(statistics.median(row[name] for row in self.cpu_us), 1) for name in self.cpu_us[0]}
        return {
            **timed,
            "cpu_us": cpu,
            "per_s": round(statistics.median(self.per_s), 1),
            "others_cores": round(max(self.others_cores), 2),
            "stolen_cores": round(max(self.stolen_cores), 2),
        }


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile."""
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


class Loads:
    """The five loads on one target."""

    def __init__(self, target: Target, sizes: Sizes) -> None:
        self._target = target
        self._sizes = sizes
        self._meter = CpuMeter(target.pids)
        self._random = random.Random(SEED)

    async def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Warm up, then run all loads, round after round. Raises LoadError if an answer is wrong."""
        results = {name: Load() for name in LOADS}
        await self.warm_up()
        for number in range(self._sizes.rounds):
            say(f"round {number + 1} of {self._sizes.rounds}")
            for name, load in results.items():
                load.add(await self._undisturbed(name, say))
        return {name: load.summary() for name, load in results.items()}

    async def once(self, name: str) -> Round:
        """Run one round of one of ``LOADS``. Raises LoadError if an answer is wrong."""
        loads: dict[str, Callable[[], Coroutine[Any, Any, Round]]] = {
            "idle": self._idle,
            "at_load": self._at_load,
            "streamed_at_load": self._streamed_at_load,
            "saturated": self._saturated,
            "paced_streams": self._paced_streams,
            "instant_streams": self._instant_streams,
        }
        return await loads[name]()

    async def _undisturbed(self, name: str, say: Callable[[str], None]) -> Round:
        """Return a round undisturbed by the hypervisor, or the last of ``MAX_TRIES``."""
        for _ in range(MAX_TRIES - 1):
            measured = await self.once(name)
            if measured.window.stolen_cores <= STOLEN_LIMIT_CORES:
                return measured
            say(f"the hypervisor stole {measured.window.stolen_cores:.2f} cores; repeating the round")
            await asyncio.sleep(PAUSE_S)
        return await self.once(name)

    async def warm_up(self) -> None:
        """Warm up caches, connections and allocators."""
        short, streamed = self._requests(self._sizes.warm_up), self._requests(self._sizes.warm_up, stream=True)
        await load_client.sequential(HOST, self._target.port, short[: self._sizes.warm_up // 2])
        for start in range(0, self._sizes.warm_up, STREAMS):
            await load_client.concurrent(HOST, self._target.port, streamed[start : start + STREAMS])
        await load_client.concurrent(HOST, self._target.port, self._requests(8, model="paced", stream=True))

    async def _idle(self) -> Round:
        requests = self._requests(self._sizes.idle)
        with self._meter.window() as window:
            answers = await load_client.sequential(HOST, self._target.port, requests)
            await self._meter.settle()
        _check_tokens(answers)
        return _round({"latency": [answer.latency_s * 1e3 for answer in answers]}, answers, window)

    async def _at_load(self) -> Round:
        requests = self._requests(self._sizes.at_load)
        with self._meter.window() as window:
            answers = await load_client.open_loop(HOST, self._target.port, requests, RATE_PER_S, CONNECTIONS)
            await self._meter.settle()
        _check_tokens(answers)
        return _round({"latency": [answer.latency_s * 1e3 for answer in answers]}, answers, window)

    async def _streamed_at_load(self) -> Round:
        requests = self._requests(self._sizes.at_load, stream=True)
        with self._meter.window() as window:
            answers = await load_client.open_loop(HOST, self._target.port, requests, RATE_PER_S, CONNECTIONS)
            await self._meter.settle()
        streams = _read_streams(answers, ANSWER_TOKENS)
        pairs = zip(answers, streams, strict=True)
        ttft = [(stream.texts[0][0] - answer.due_s) * 1e3 for answer, stream in pairs]
        latency = [answer.latency_s * 1e3 for answer in answers]
        return _round({"ttft": ttft, "latency": latency}, answers, window)

    async def _saturated(self) -> Round:
        requests = self._requests(self._sizes.saturated)
        with self._meter.window() as window:
            answers = await load_client.closed_loop(HOST, self._target.port, requests, CONNECTIONS)
            await self._meter.settle()
        _check_tokens(answers)
        return _round({"latency": [answer.latency_s * 1e3 for answer in answers]}, answers, window)

    async def _paced_streams(self) -> Round:
        return await self._streams("paced", self._sizes.paced_tokens, TOKEN_MS)

    async def _instant_streams(self) -> Round:
        return await self._streams("instant", self._sizes.instant_tokens, 0.0)

    async def _streams(self, model: str, tokens: int, token_ms: float) -> Round:
        requests = self._requests(STREAMS, model=model, stream=True, tokens=tokens)
        with self._meter.window() as window:
            answers = await load_client.concurrent(HOST, self._target.port, requests)
            await self._meter.settle()
        added = []
        for stream in _read_streams(answers, tokens):
            arrivals = [arrived_s for arrived_s, _ in stream.texts]
            added += [(after - before) * 1e3 - token_ms for before, after in itertools.pairwise(arrivals)]
        return _round({"inter_token": added}, answers, window, units_each=tokens)

    def _requests(
        self, count: int, model: str = "instant", stream: bool = False, tokens: int = ANSWER_TOKENS
    ) -> list[bytes]:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return [
            post_request(
                PATH,
                self._target.api_key,
                {
                    "model": model,
                    "max_tokens": tokens,
                    "ignore_eos": True,  # exactly the requested length, instead of the script's
                    "messages": [{"role": "user", "content": " ".join(self._random.choices(WORDS, k=PROMPT_WORDS))}],
                    **options,
                },
            )
            for _ in range(count)
        ]


def _round(
    samples_ms: dict[str, list[float]], answers: Sequence[Exchange], window: Window, units_each: int = 1
) -> Round:
    busy_s = max(answer.ended_s for answer in answers) - min(answer.due_s for answer in answers)
    return Round(samples_ms, len(answers) * units_each, busy_s, window)


def _check_tokens(answers: Sequence[Exchange]) -> None:
    for answer in answers:
        if load_client.completion_tokens(answer) != ANSWER_TOKENS:
            raise LoadError(f"expected {ANSWER_TOKENS} tokens: {answer.body!r}")


def _read_streams(answers: Sequence[Exchange], tokens: int) -> list[Answer]:
    streams = [read(answer) for answer in answers]
    for stream in streams:
        if not stream.is_done or not stream.texts or stream.completion_tokens != tokens:
            raise LoadError(f"expected {tokens} tokens, a stream had {stream.completion_tokens}: {stream.error}")
    return streams


async def measure_spillway(folder: Path, sizes: Sizes, console: Console) -> dict[str, Any]:
    """Run all loads on Spillway, and measure its idle CPU."""
    async with running_spillway(folder, TOKEN_MS) as running:
        loads = Loads(Target(running.port, running.api_key, running.pids), sizes)
        results = await loads.run(lambda line: console.print(f"[dim]spillway: {line}[/dim]"))
        seconds = 1 if sizes is QUICK else 5
        with CpuMeter(running.pids).window() as window:
            await asyncio.sleep(seconds)
        results["unloaded_cpu_ms_per_s"] = {
            name: round(cpu_s / seconds * 1e3, 1) for name, cpu_s in window.cpu_s.items()
        }
    return results


async def measure_litellm(folder: Path, sizes: Sizes, console: Console) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run all loads on LiteLLM's proxy, and on its backend directly."""
    async with litellm.running_litellm(folder, TOKEN_MS) as peer:
        direct = Loads(Target(peer.backend_port, "none", peer.pids), sizes)
        backend = await direct.run(lambda line: console.print(f"[dim]backend alone: {line}[/dim]"))
        proxied = Loads(Target(peer.proxy_port, peer.api_key, peer.pids), sizes)
        results = await proxied.run(lambda line: console.print(f"[dim]litellm: {line}[/dim]"))
    return results, backend


async def measure_dynamo(folder: Path, sizes: Sizes, console: Console) -> dict[str, Any]:
    """Run all loads on Dynamo's frontend."""
    async with dynamo.running_dynamo(folder, TOKEN_MS) as peer:
        loads = Loads(Target(peer.port, "none", peer.pids), sizes)
        return await loads.run(lambda line: console.print(f"[dim]dynamo: {line}[/dim]"))


def machine() -> dict[str, Any]:
    """Return the hardware and software on which the figures were measured."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": names[0].partition(": ")[2] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "load_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
    }


async def main(arguments: argparse.Namespace) -> None:
    console = Console(highlight=False, width=TABLE_WIDTH)
    report: dict[str, Any] = {"benchmark": "gateway_overhead", "quick": arguments.quick, **machine()}
    console.print({name: value for name, value in report.items() if name != "benchmark"})
    with tempfile.TemporaryDirectory(prefix="spillway-overhead-") as folder:
        sizes = QUICK if arguments.quick else SPILLWAY_SIZES
        report["spillway"] = await measure_spillway(Path(folder), sizes, console)
        if "dynamo" in arguments.peers:
            report["dynamo_version"] = await asyncio.to_thread(dynamo.install)
            # Answers are so slow one at a time that Spillway's number of requests would take minutes per round.
            fewer = replace(sizes, idle=min(sizes.idle, PEER_SIZES.idle))
            report["dynamo"] = await measure_dynamo(Path(folder), fewer, console)
        if "litellm" in arguments.peers:
            report["litellm_version"] = await asyncio.to_thread(litellm.install)
            sizes = QUICK if arguments.quick else PEER_SIZES
            report["litellm"], report["backend"] = await measure_litellm(Path(folder), sizes, console)
    print_tables(report, console)
    print(json.dumps(report))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sanity run of a few seconds; ignore its figures")
    parser.add_argument(
        "--peers", nargs="*", choices=("litellm", "dynamo"), default=["litellm"], help="without a name: none"
    )
    gc.disable()  # the client's own pauses must not appear in the latencies; a run makes few reference cycles
    uvloop.run(main(parser.parse_args()))
