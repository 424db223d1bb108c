"""The cost of the adapter for inference servers, compared with a plain HTTP client of the same server.

A server with vLLM's wire format makes a token every 20 ms for each of 64 streams (`peers/token_server.py`, a separate
process, so it costs neither side). Two clients use it alternately, round by round:

- *plain*: httpx with `json.loads` of each event's line, as a caller of the server's API would write it, and
- *adapter*: the engine of a side-car worker, `pool_worker/engines/server.py`: limits, checks of each event, the tokens'
  text, stop conditions, steps.

Metrics:

- *TTFT*: from the request to the first token; all streams of a round start at once. The aim is at most 3 ms more.
- *CPU per token*: user + system time of this process over the tokens of a round, including the start of the streams.
  The aim is at most 60 µs more.
- *late*: how much later than due a token arrives: due is every 20 ms from the first token on.

Medians over the rounds; TTFT and lateness are percentiles over all of them.

    python -m benchmarks.server_adapter [--rounds 5] [--streams 64] [--tokens 150] [--token-ms 20]
"""

import argparse
import asyncio
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.gateway_overhead import machine
from benchmarks.ports import free_port, wait_until_listening
from engine.types import GenerationRequest
from pool_worker import engines
from pool_worker.engines.base import TokenEngine
from pool_worker.settings import ServerEngineSettings
from protocol.generation import SamplingParams
from spillway.config import DEMO_MODEL_PATH

START_LIMIT_S: Final = 30.0
PROMPT: Final = tuple(range(40, 104))
SERVER: Final = Path(__file__).parent / "peers" / "token_server.py"
AIM_TTFT_MS: Final = 3.0
AIM_CPU_US: Final = 60.0


@dataclass(frozen=True)
class Sizes:
    """The size of a run."""

    streams: int
    tokens: int
    token_s: float


@dataclass
class Measured:
    """The cost of one client, over all rounds."""

    ttft_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)  # per token, by round

    def add(self, arrivals_s: list[list[float]], began_s: float, cpu_s: float, sizes: Sizes) -> None:
        """Add a round with the arrival times of each stream's tokens."""
        for arrived_s in arrivals_s:
            if len(arrived_s) != sizes.tokens:
                raise RuntimeError(f"a stream has {len(arrived_s)} tokens instead of {sizes.tokens}")
            self.ttft_ms.append((arrived_s[0] - began_s) * 1000)
            self.late_ms += [
                (at_s - arrived_s[0] - place * sizes.token_s) * 1000 for place, at_s in enumerate(arrived_s) if place
            ]
        self.cpu_us.append(cpu_s * 1e6 / (len(arrivals_s) * sizes.tokens))

    def figures(self) -> dict[str, float]:
        """Return the reported figures; streams of one token have no lateness."""
        figures: dict[str, float] = {}
        for name, values in (("ttft_ms", self.ttft_ms), ("late_ms", self.late_ms)):
            if values:
                figures |= {f"{name}_p50": percentile(values, 50), f"{name}_p99": percentile(values, 99)}
        return {**figures, "cpu_us_a_token": round(statistics.median(self.cpu_us), 1)}


def percentile(values: list[float], per_cent: int) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, len(ordered) * per_cent // 100)], 2)


async def ask_plainly(client: httpx.AsyncClient, sizes: Sizes) -> list[list[float]]:
    """Start all streams at once with httpx; return the arrival times of each one's tokens."""
    return list(await asyncio.gather(*[_plain_stream(client, sizes) for _ in range(sizes.streams)]))


async def _plain_stream(client: httpx.AsyncClient, sizes: Sizes) -> list[float]:
    body = {
        "model": "tokens",
        "prompt": list(PROMPT),
        "max_tokens": sizes.tokens,
        "stream": True,
        "return_token_ids": True,
        "temperature": 0,
    }
    arrived_s: list[float] = []
    token_ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            for choice in json.loads(line[6:])["choices"]:
                token_ids += choice["token_ids"]
                arrived_s += [time.perf_counter()] * len(choice["token_ids"])
    return arrived_s


async def ask_adapter(engine: TokenEngine, sizes: Sizes, first: int) -> list[list[float]]:
    """Start all streams at once through the adapter. ``first``: the first request number; numbers are never reused."""
    params = SamplingParams(temperature=0.0, max_tokens=sizes.tokens, ignore_eos=True)
    arrived_s: dict[str, list[float]] = {f"r{first + number}": [] for number in range(sizes.streams)}
    for name in arrived_s:
        engine.submit(GenerationRequest(name, PROMPT, params))
    open_streams = set(arrived_s)
    async for outputs in engine.steps():
        now_s = time.perf_counter()
        for output in outputs:
            arrived_s[output.request_id] += [now_s] * len(output.token_ids)
            if output.finish_reason is not None:
                open_streams.discard(output.request_id)
        if not open_streams:
            return list(arrived_s.values())
    raise RuntimeError("the engine stopped")


async def measure(sizes: Sizes, rounds: int, say: Callable[[str], None]) -> tuple[Measured, Measured]:
    """Measure plain client and adapter alternately; the first round warms both up."""
    plain, adapter = Measured(), Measured()
    async with _server(sizes.token_s) as url, _client(url, sizes) as client, _adapter(url, sizes) as engine:
        for number in range(rounds + 1):
            ways: list[tuple[Measured, Callable[[], Awaitable[list[list[float]]]]]] = [
                (plain, lambda: ask_plainly(client, sizes)),
                (adapter, lambda number=number: ask_adapter(engine, sizes, number * sizes.streams)),  # type: ignore[misc]
            ]
            for measured, ask in ways:
                gc.collect()
                began_s, before_s = time.perf_counter(), time.process_time()
                arrivals_s = await ask()
                cpu_s = time.process_time() - before_s
                if number:
                    measured.add(arrivals_s, began_s, cpu_s, sizes)
            say(f"round {number} of {rounds}")
    return plain, adapter


@contextlib.asynccontextmanager
async def _server(token_s: float) -> AsyncIterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="spillway-adapter-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(SERVER), "--port", str(port), "--token-ms", str(token_s * 1000)),
                stdout=output,
                stderr=output,
            )
        try:
            await wait_until_listening(process, port, START_LIMIT_S, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()


def _client(url: str, sizes: Sizes) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=sizes.streams)
    return httpx.AsyncClient(base_url=url, limits=limits, trust_env=False, timeout=60)


@contextlib.asynccontextmanager
async def _adapter(url: str, sizes: Sizes) -> AsyncIterator[TokenEngine]:
    settings = ServerEngineSettings(
        kind="vllm", url=url, tokenizer=str(DEMO_MODEL_PATH), max_sequences=sizes.streams, max_kv_tokens=2**20
    )
    engine = engines.create(settings)
    assert engine.takes != "messages"
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def report(plain: Measured, adapter: Measured, sizes: Sizes, console: Console) -> dict[str, Any]:
    """Print the table; return the JSON line."""
    figures = {"plain": plain.figures(), "adapter": adapter.figures()}
    added = {name: round(figures["adapter"][name] - value, 2) for name, value in figures["plain"].items()}
    table = Table(
        "", "plain", "adapter", "added", "aim", title=f"{sizes.streams} streams, {sizes.token_s * 1000:g} ms a token"
    )
    aims = {"ttft_ms_p50": AIM_TTFT_MS, "cpu_us_a_token": AIM_CPU_US}
    for name, value in figures["plain"].items():
        aim = str(aims[name]) if name in aims else ""
        table.add_row(name, str(value), str(figures["adapter"][name]), str(added[name]), aim)
    console.print(table)
    return {"benchmark": "server_adapter", **machine(), "streams": sizes.streams, **figures, "added": added}


async def main(arguments: argparse.Namespace) -> None:
    console = Console(highlight=False, stderr=True)
    sizes = Sizes(arguments.streams, arguments.tokens, arguments.token_ms / 1000)
    plain, adapter = await measure(sizes, arguments.rounds, lambda line: console.print(f"[dim]{line}[/dim]"))
    print(json.dumps(report(plain, adapter, sizes, console)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--token-ms", type=float, default=20.0)
    uvloop.run(main(parser.parse_args()))
