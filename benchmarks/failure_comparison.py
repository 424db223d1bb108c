"""The effect of a spike and of crashing engines on clients: Spillway, an engine's own HTTP server and LiteLLM's proxy.

Every system has the same two scripted engines of the same speed (their work is a known constant, so only the layer in
front of them differs), gets the same requests at the same times, and suffers the same faults:

- *spike*: ten times the capacity of both engines, for 30 s. Working that off takes 300 s at best.
- *kills*: half the capacity of both engines, while the engine processes get SIGKILL in turn, each 5 s after the last
  was replaced. A killed engine is restarted 1 s later.

The systems (``peers/two_servers.py``): *spillway* with its defaults; *engine_bounded*, callers alternating between two
engine servers that refuse with a 429 above 128 requests each, TGI's default; *engine_unbounded*, the same without a
bound, like vLLM; *litellm*, its proxy in front of two bounded servers, with retries, cooldown and fallbacks as its
documentation recommends; *litellm_continuing*, the same with its continuation of interrupted streams switched on (off
by default, and only for models declared to support assistant prefill, which this engine server does perfectly).

All requests are streamed. A caller is an official OpenAI SDK behind a common load balancer: it retries a refusal or a
failed connection twice (0.5 to 8 s apart, or after Retry-After), waits up to 600 s in all, and its connection is cut
after 60 s without a byte, as nginx and AWS's load balancers do by default. Its final result is one of:

- *answered*: complete, identical to the undisturbed engine's answer, with the right usage;
- *miscounted*: the same, but its usage states a wrong number of prompt or answer tokens;
- *refused* with a status, *unreachable*, *timeout* (60 s of silence or 600 s in all), *error event* in the stream;
- *cut*: the response visibly ended in the middle;
- *truncated*: presented as complete (``[DONE]``), but a part is missing: the worst result, as clients cannot see it;
- *changed*: presented as complete, but different from the undisturbed engine's answer, or longer than requested.

*Failures* are all results except answered and miscounted. Latency counts from the time at which a request was due,
including retries, over the answered requests. The benchmark needs little CPU; the report says how busy the machine was.

    python -m benchmarks.failure_comparison [--quick] [--only SYSTEM]… [--fault spike|kills] [--idle-s 60]
"""

import argparse
import asyncio
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop
from rich.console import Console
from rich.status import Status
from rich.table import Table

from benchmarks.gateway_overhead import WORDS, machine, percentile
from benchmarks.http_client import Exchange, ReadTimeouts, exchange, post_request
from benchmarks.peers import litellm
from benchmarks.peers.two_servers import SYSTEMS, ComparedSystem, EngineShape
from benchmarks.scripted_answers import ScriptedAnswers
from benchmarks.stream_answer import Answer, read

SEED: Final = 30
PATH: Final = "/v1/chat/completions"
RETRIES: Final = 2
RETRIED_STATUSES: Final = frozenset({408, 409, 429, *range(500, 600)})
FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 8.0
MAX_RETRY_AFTER_S: Final = 60.0
ENGINES: Final = 2
SUCCESSES: Final = frozenset({"answered", "miscounted"})
PROGRESS_PERIOD_S: Final = 0.5
TAIL_PIECES: Final = 3
TAIL_BYTES: Final = 400


@dataclass(frozen=True)
class Fault:
    """One load, and the faults during it."""

    shape: EngineShape
    tokens: int  # of each answer
    of_capacity: float  # offered load
    seconds: float  # duration of the load
    kill_period_s: float | None = None

    @property
    def rate_per_s(self) -> float:
        """Requests offered per second."""
        service_s = self.tokens * self.shape.token_ms / 1000
        return self.of_capacity * ENGINES * self.shape.slots / service_s


FAULTS: Final = {
    "spike": Fault(EngineShape(slots=4, token_ms=50), tokens=80, of_capacity=10, seconds=30),
    "kills": Fault(EngineShape(slots=8, token_ms=25), tokens=80, of_capacity=0.5, seconds=90, kill_period_s=5),
}
QUICK: Final = {
    "spike": Fault(EngineShape(slots=4, token_ms=25), tokens=40, of_capacity=10, seconds=3),
    "kills": Fault(EngineShape(slots=8, token_ms=25), tokens=80, of_capacity=0.5, seconds=15, kill_period_s=5),
}


@dataclass(frozen=True)
class Expected:
    """The undisturbed answer."""

    text: str
    usage: tuple[int, int]  # tokens of prompt and answer


@dataclass(frozen=True)
class Outcome:
    """The outcome of one client's request."""

    verdict: str
    latency_s: float
    retries: int
    tail: str  # its last response


class Callers:
    """Requests at fixed times, each by a separate caller."""

    def __init__(self, system: ComparedSystem, fault: Fault, patience: ReadTimeouts) -> None:
        self._system = system
        self._fault = fault
        self._patience = patience
        self._answers = ScriptedAnswers()
        self._random = random.Random(SEED)
        self.count = round(fault.rate_per_s * fault.seconds)
        self.ended = 0

    async def run(self) -> list[Outcome]:
        """Call, and return when the last caller has finished."""
        first_s = time.monotonic()
        calls = []
        for number in range(self.count):
            due_s = first_s + number / self._fault.rate_per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            words = " ".join(self._random.choices(WORDS, k=12))
            prompt = f"{words} {number} [[tokens={self._fault.tokens}]]"
            calls.append(asyncio.create_task(self._call(number, prompt, due_s), name=f"call-{number}"))
        return list(await asyncio.gather(*calls))

    async def _call(self, number: int, prompt: str, due_s: float) -> Outcome:
        chance = random.Random(number)
        for retry in range(RETRIES + 1):
            port = self._system.ports[(number + retry) % len(self._system.ports)]
            record = await exchange(port, self._request(prompt), self._patience, record=Exchange(due_s))
            if retry == RETRIES or not _is_retried(record):
                break
            await asyncio.sleep(_backoff_s(record, retry, chance))
        self.ended += 1
        expected = self._expected(prompt)
        tail = b"".join(piece for _, piece in record.pieces[-TAIL_PIECES:])[-TAIL_BYTES:].decode(errors="replace")
        return Outcome(verdict(record, expected), record.latency_s, retry, tail)

    def _expected(self, prompt: str) -> Expected:
        prompt_tokens = len(self._answers.prompt_ids([{"role": "user", "content": prompt}]))
        text = self._answers.text(prompt, self._fault.tokens)
        return Expected(text, (prompt_tokens, self._fault.tokens))

    def _request(self, prompt: str) -> bytes:
        body = {
            "model": "scripted",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 2 * self._fault.tokens,
            "messages": [{"role": "user", "content": prompt}],
        }
        return post_request(PATH, self._system.api_key, body)


def _is_retried(record: Exchange) -> bool:
    return record.ending == "unreachable" or record.status in RETRIED_STATUSES or record.status == 0


def _backoff_s(record: Exchange, retry: int, chance: random.Random) -> float:
    retry_after = record.headers.get("retry-after", "")
    if retry_after.isdigit() and 0 < int(retry_after) <= MAX_RETRY_AFTER_S:
        return float(retry_after)
    wait_s: float = min(FIRST_BACKOFF_S * 2**retry, MAX_BACKOFF_S)
    return wait_s * (1 - 0.25 * chance.random())


def verdict(record: Exchange, expected: Expected) -> str:
    """Return what the caller saw; see the module."""
    if record.ending == "unreachable":
        return "unreachable"
    if record.ending in {"idle", "overdue"}:
        return "timeout"
    if record.status not in {0, 200}:
        return f"refused {record.status}"
    return _verdict_on_stream(record, read(record), expected)


def _verdict_on_stream(record: Exchange, answer: Answer, expected: Expected) -> str:
    if answer.error is not None:
        return "error event"
    if record.ending != "whole" or not answer.is_done:
        return "cut"
    if answer.text == expected.text and answer.finish_reason == "stop":
        return "answered" if (answer.prompt_tokens, answer.completion_tokens) == expected.usage else "miscounted"
    return "truncated" if expected.text.startswith(answer.text) else "changed"


async def _kill_in_turn(system: ComparedSystem, period_s: float, kills: list[float]) -> None:
    number = 0
    while True:
        await asyncio.sleep(period_s)
        kills.append(time.monotonic())
        await system.kill_engine(number % len(system.engines))
        number += 1


async def _show_progress(callers: Callers, status: Status) -> None:
    while True:
        status.update(f"{callers.ended} of {callers.count} requests have ended")
        await asyncio.sleep(PROGRESS_PERIOD_S)


async def measure(name: str, fault: Fault, patience: ReadTimeouts, status: Status) -> dict[str, Any]:
    """Measure one system under one fault."""
    with tempfile.TemporaryDirectory(prefix="spillway-failures-") as folder:
        async with SYSTEMS[name](Path(folder), fault.shape) as system:
            await Callers(system, Fault(fault.shape, 8, 0.5, 2), patience).run()  # warm up
            kills: list[float] = []
            killer = None
            if fault.kill_period_s is not None:
                killer = asyncio.create_task(_kill_in_turn(system, fault.kill_period_s, kills), name="killer")
            callers = Callers(system, fault, patience)
            progress = asyncio.create_task(_show_progress(callers, status), name="progress")
            psutil.cpu_percent()
            outcomes = await callers.run()
            busy = psutil.cpu_percent()
            progress.cancel()
            if killer is not None:
                killer.cancel()
                await asyncio.gather(killer, return_exceptions=True)
    return {**summary(outcomes), "kills": len(kills), "machine_busy_percent": busy}


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Count the outcomes and compute percentiles."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    answered_s = [outcome.latency_s for outcome in outcomes if outcome.verdict in SUCCESSES]
    failures = len(outcomes) - len(answered_s)
    return {
        "requests": len(outcomes),
        "failures": failures,
        "failure_percent": round(100 * failures / len(outcomes), 1),
        "verdicts": dict(verdicts.most_common()),
        "examples": {outcome.verdict: outcome.tail for outcome in outcomes if outcome.verdict != "answered"},
        "retries": sum(outcome.retries for outcome in outcomes),
        "latency_s_p50": round(percentile(answered_s, 50), 2) if answered_s else None,
        "latency_s_p99": round(percentile(answered_s, 99), 2) if answered_s else None,
    }


def print_table(fault: str, results: dict[str, dict[str, Any]], console: Console) -> None:
    """Print one row per system."""
    table = Table("system", "requests", "kills", "failures", "what callers saw", "p50 s", "p99 s", "busy", title=fault)
    for name, result in results.items():
        seen = ", ".join(f"{count} {verdict}" for verdict, count in result["verdicts"].items())
        failures = f"{result['failures']} ({result['failure_percent']} %)"
        figures = [result["latency_s_p50"], result["latency_s_p99"], f"{result['machine_busy_percent']:.0f} %"]
        table.add_row(name, *map(str, [result["requests"], result["kills"], failures, seen, *figures]))
    console.print(table)


async def main(arguments: argparse.Namespace) -> None:
    console = Console(highlight=False, width=150)
    report: dict[str, Any] = {"benchmark": "failure_comparison", "quick": arguments.quick, "seed": SEED, **machine()}
    names, patience = arguments.only or list(SYSTEMS), ReadTimeouts(idle_s=arguments.idle_s)
    report["idle_s"] = patience.idle_s
    if any(name.startswith("litellm") for name in names):
        report["litellm_version"] = await asyncio.to_thread(litellm.install)
    for fault_name in [arguments.fault] if arguments.fault else list(FAULTS):
        fault = (QUICK if arguments.quick else FAULTS)[fault_name]
        report[fault_name] = {}
        for name in names:
            console.print(f"[dim]{fault_name}: {name}[/dim]")
            with console.status("starting") as status:
                report[fault_name][name] = await measure(name, fault, patience, status)
        print_table(fault_name, report[fault_name], console)
    print(json.dumps(report))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; do not publish the figures")
    parser.add_argument("--only", action="append", choices=list(SYSTEMS), help="only this system; may be repeated")
    parser.add_argument("--fault", choices=list(FAULTS))
    parser.add_argument("--idle-s", type=float, default=60.0, help="silence after which a caller's connection is cut")
    arguments = parser.parse_args()
    # asyncio shuts down cleanly on SIGINT, even where a shell ignores it for this process; SIGTERM must do the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    uvloop.run(main(arguments))
