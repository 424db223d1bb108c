"""The time from the start of a worker's process until it takes jobs, by the location of its weights.

- *cold*: the weights are on a volume's disk and not in the page cache: the first start on a machine.
- *warm*: the same again: each further start there.
- *no weights*: a scripted engine: only Python and the connection to the queue server.

The models are Llamas with random float32 weights. The engine is Spillway's own, on a CPU. Needs no network.

    python -m benchmarks.cold_start [--sizes 68M 125M] [--runs 3]
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.random_llama import SIZES, save_model
from benchmarks.spillway_under_test import STOP_LIMIT_S, running
from spillway.children import Child


def _drop_from_memory(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def _start_s(pool: str, folder: Path) -> float:
    """Start one worker, wait until it takes jobs, and end it."""
    arguments = ["worker", "--pool", pool, "--config", str(folder / "config.json")]
    worker = Child(f"worker-{pool}", arguments, folder, folder, STOP_LIMIT_S)
    began_s = time.monotonic()
    await worker.start()
    try:
        await worker.wait_ready()
        return time.monotonic() - began_s
    finally:
        await worker.stop()


async def measure(sizes: list[str], runs: int) -> dict[str, Any]:
    """Return the seconds of each kind of start."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="spillway-cold-start-") as name:
        folder = Path(name)
        pools: dict[str, Any] = {"scripted": {"models": ["scripted"], "engine": {"kind": "scripted"}}}
        for size in sizes:
            weights = folder / f"weights-{size}"
            save_model(size, weights)
            pools[size] = {"models": [size], "engine": {"kind": "spillway", "path": str(weights)}}
        async with running(folder, {"models": {pool: {} for pool in pools}, "pools": pools}, {}):
            await _start_s("scripted", folder)  # compiles Python bytecode
            results["no weights"] = await _times("scripted", folder, runs)
            for size in sizes:
                weights = folder / f"weights-{size}"
                await _start_s(size, folder)  # compiles the engine's kernels
                cold = []
                for _ in range(runs):
                    _drop_from_memory(weights)
                    cold.append(await _start_s(size, folder))
                megabytes = sum(path.stat().st_size for path in weights.iterdir()) / 1e6
                results[size] = {
                    "megabytes": round(megabytes),
                    "cold": _facts(cold),
                    "warm": await _times(size, folder, runs),
                }
    return results


async def _times(pool: str, folder: Path, runs: int) -> dict[str, float]:
    return _facts([await _start_s(pool, folder) for _ in range(runs)])


def _facts(seconds: list[float]) -> dict[str, float]:
    return {"median_s": round(statistics.median(seconds), 2), "max_s": round(max(seconds), 2)}


def main() -> None:
    """Parse the command line, measure, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments.sizes, arguments.runs))
    print(
        json.dumps({"benchmark": "cold_start", "cpus": os.cpu_count(), "python": platform.python_version(), **results})
    )


if __name__ == "__main__":
    main()
