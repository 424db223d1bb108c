"""One batch while its engines crash, and its feeder once: Spillway's ``/v1/batches`` beside LiteLLM's runner.

Both have two scripted engines of the same known speed and the same file of lines. Every ``KILL_PERIOD_S`` one of the
engine processes gets SIGKILL, in turn, and is restarted a second later. In the fault "both", the process that feeds the
batch gets it once as well, after a third of the batch's shortest possible time. Spillway has one gateway here, with
default settings. LiteLLM's side, and what it lacks, is described in ``peers/litellm_batch.py``; it may have as many
lines open as the engines have slots (its default is 4).

Each line in the result files is compared with the undisturbed engine's answer: *answered* lines are right and occur
once; *failed* ones are in the error file; *missing* and *repeated* ones must be zero; *submitted*: how often the client
had to submit the batch, which runs all of it again. ``seconds`` from the first submission to the end, beside
``least_s``, the time that the undisturbed engines need.

    python -m benchmarks.batch_comparison [--only spillway|litellm] [--fault engines|both] [--lines 1500]
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import openai
import psutil
import uvloop

from benchmarks.gateway_overhead import machine
from benchmarks.peers import litellm, pinned
from benchmarks.peers.two_servers import (
    RESTART_WAIT_S,
    UNBOUNDED,
    EngineProcess,
    EngineShape,
    kill_and_start,
    spillway_with_two_workers,
    two_engine_servers,
)
from benchmarks.scripted_answers import ScriptedAnswers
from gateway.batches.store import OVER
from protocol.process import stop_process
from spillway.children import die_with_parent

PATH: Final = "/v1/chat/completions"
SHAPE: Final = EngineShape(slots=32, token_ms=50)
TOKENS: Final = 40
ENGINES: Final = 2
KILL_PERIOD_S: Final = 5.0
FEEDER_DIES_AT: Final = 1 / 3  # share of the shortest possible time
LIMIT_S: Final = 600.0
POLL_S: Final = 0.5
RETRIES: Final = 20  # of the client, while the gateway restarts
FAULTS: Final = ("engines", "both")
ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass
class RunningBatch:
    """A system with a submitted batch."""

    engines: Sequence[EngineProcess]
    kill_feeder: Callable[[], Awaitable[None]]
    wait: Callable[[], Awaitable[tuple[list[Any], list[Any], int]]]  # → lines of both files, number of submissions


def line(number: int) -> dict[str, Any]:
    """Return one line of the file."""
    message = {"role": "user", "content": prompt(number)}
    body = {"model": "scripted", "max_tokens": 2 * TOKENS, "messages": [message]}
    return {"custom_id": str(number), "method": "POST", "url": PATH, "body": body}


def prompt(number: int) -> str:
    """Return a line's prompt."""
    return f"Line {number}: what is there to say? [[tokens={TOKENS}]]"


# --- the systems ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def spillway(folder: Path, lines: bytes) -> AsyncIterator[RunningBatch]:
    """Run Spillway with one gateway and two workers."""
    async with (
        spillway_with_two_workers(folder, SHAPE) as (system, workers),
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{system.port}/v1", api_key=system.api_key, max_retries=RETRIES
        ) as client,
    ):
        file = await client.files.create(file=("lines.jsonl", lines), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h")

        async def kill_feeder() -> None:
            await kill_and_start(system.children["gateway"])

        async def wait() -> tuple[list[Any], list[Any], int]:
            while (found := await client.batches.retrieve(batch.id)).status not in OVER:  # noqa: ASYNC110  # another process
                await asyncio.sleep(POLL_S)
            texts = [
                "" if file_id is None else (await client.files.content(file_id)).text
                for file_id in (found.output_file_id, found.error_file_id)
            ]
            answered, failed = ([json.loads(text) for text in file.splitlines()] for file in texts)
            return answered, failed, 1

        yield RunningBatch(workers, kill_feeder, wait)


class _Runner:
    """The process of ``peers/litellm_batch.py``."""

    def __init__(self, folder: Path, ports: Sequence[int]) -> None:
        self._log = folder / "litellm.log"
        python = str(pinned.ENVIRONMENTS / "litellm" / "bin" / "python")
        self._command = [python, "-m", "benchmarks.peers.litellm_batch", "--store", str(folder)]
        self._command += ["--ports", ",".join(map(str, ports))]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it."""
        environment = {
            **os.environ,
            "LITELLM_LOG": "ERROR",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_EXECUTED_BATCH_CONCURRENCY": str(ENGINES * SHAPE.slots),
        }
        with self._log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self._command,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )


@asynccontextmanager
async def litellm_runner(folder: Path, lines: bytes) -> AsyncIterator[RunningBatch]:
    """Run LiteLLM's runner in front of two engine servers that queue like vLLM."""
    (folder / "lines.jsonl").write_bytes(lines)
    async with two_engine_servers(folder, SHAPE, UNBOUNDED) as servers:
        runner = _Runner(folder, [server.port for server in servers])
        await runner.start()

        async def kill_feeder() -> None:
            assert runner.process is not None
            runner.process.kill()
            await runner.process.wait()
            await asyncio.sleep(RESTART_WAIT_S)
            await runner.start()

        async def wait() -> tuple[list[Any], list[Any], int]:
            assert runner.process is not None
            while (code := await runner.process.wait()) == -signal.SIGKILL:  # noqa: ASYNC110  # it is restarted
                await asyncio.sleep(POLL_S)
            if code:
                raise ChildProcessError(f"LiteLLM's runner ended with exit code {code}; see {folder / 'litellm.log'}")
            return _litellm_results(folder)

        try:
            yield RunningBatch(servers, kill_feeder, wait)
        finally:
            if runner.process is not None:
                await stop_process(runner.process, "litellm", RESTART_WAIT_S)


def _litellm_results(folder: Path) -> tuple[list[Any], list[Any], int]:
    paths = [folder / f"{kind}.jsonl" for kind in ("output", "error")]
    answered, failed = (
        [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else [] for path in paths
    )
    return answered, failed, 1 + len(list(folder.glob("lost-*.json")))


SYSTEMS: Final = {"spillway": spillway, "litellm": litellm_runner}


# --- measuring --------------------------------------------------------------------------------------------------------


async def measure(name: str, fault: str, count: int) -> dict[str, Any]:
    """Measure one system under one fault."""
    lines = b"".join(json.dumps(line(number)).encode() + b"\n" for number in range(count))
    least_s = count * TOKENS * SHAPE.token_ms / 1000 / (ENGINES * SHAPE.slots)
    with tempfile.TemporaryDirectory(prefix="spillway-batches-") as folder:
        async with SYSTEMS[name](Path(folder), lines) as batch:
            kills: Counter[str] = Counter()
            psutil.cpu_percent()
            began_s = time.monotonic()
            killing = asyncio.create_task(_kill_engines(batch, kills))
            if fault == "both":
                feeder = asyncio.create_task(_kill_feeder(batch, least_s * FEEDER_DIES_AT, kills))
            try:
                async with asyncio.timeout(LIMIT_S):
                    answered, failed, submitted = await batch.wait()
            except TimeoutError:
                return {"over": False, "limit_s": LIMIT_S, "kills": dict(kills), "least_s": round(least_s, 1)}
            finally:
                killing.cancel()
                if fault == "both":
                    feeder.cancel()
            seconds, busy = time.monotonic() - began_s, psutil.cpu_percent()
    figures = {"seconds": round(seconds, 1), "least_s": round(least_s, 1), "submitted": submitted, "kills": dict(kills)}
    return {**figures, **judge(answered, failed, count), "machine_busy_percent": busy}


async def _kill_engines(batch: RunningBatch, kills: Counter[str]) -> None:
    while True:
        await asyncio.sleep(KILL_PERIOD_S)
        engine = batch.engines[kills["engines"] % ENGINES]
        kills["engines"] += 1
        await kill_and_start(engine)


async def _kill_feeder(batch: RunningBatch, after_s: float, kills: Counter[str]) -> None:
    await asyncio.sleep(after_s)
    kills["feeder"] += 1
    await batch.kill_feeder()


def judge(answered: Sequence[Any], failed: Sequence[Any], count: int) -> dict[str, Any]:
    """Compare the results with the undisturbed engine's answers."""
    answers = ScriptedAnswers()
    seen = Counter(one["custom_id"] for one in [*answered, *failed])
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in answered}
    right = sum(text == answers.text(prompt(int(name)), TOKENS) for name, text in texts.items())
    return {
        "lines": count,
        "answered": right,
        "wrong": len(texts) - right,
        "failed": len(failed),
        "missing": count - len(seen),
        "repeated": seen.total() - len(seen),
        "example": json.dumps(failed[0])[:400] if failed else None,
    }


async def main(arguments: argparse.Namespace) -> None:
    report: dict[str, Any] = {"benchmark": "batch_comparison", "tokens": TOKENS, "slots": SHAPE.slots, **machine()}
    names = [arguments.only] if arguments.only else list(SYSTEMS)
    if "litellm" in names:
        report["litellm_version"] = await asyncio.to_thread(litellm.install)
    for fault in [arguments.fault] if arguments.fault else FAULTS:
        report[fault] = {}
        for name in names:
            report[fault][name] = await measure(name, fault, arguments.lines)
            print(fault, name, report[fault][name], file=sys.stderr, flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(SYSTEMS))
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--lines", type=int, default=1500)
    arguments = parser.parse_args()
    # asyncio shuts down cleanly on SIGINT, even where a shell ignores it for this process; SIGTERM must do the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    uvloop.run(main(arguments))
