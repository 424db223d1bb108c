"""The CPU cost of a request and of a token, compared with an older commit's code at the same time.

A machine's speed changes by half within a quarter of an hour, so two runs of ``gateway_overhead`` cannot be compared to
a tenth. Here both commits' Spillways run at once, each with its own queue server and ledger, and get the loads of
``gateway_overhead`` in alternating turns of a few seconds; the idle one uses a few hundredths of a core. A pair of
turns does not count if the hypervisor disturbed one of them. The output is the median of each, and the median of the
pairs' ratios with its quartiles. Costs are the CPU of gateway, worker and NATS (the ledger's separately).

    python -m benchmarks.path_beside COMMIT [--pairs 8] [--gate 1.1]
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.gateway_overhead import (
    LOADS,
    SPILLWAY_SIZES,
    STOLEN_LIMIT_CORES,
    TOKEN_MS,
    Loads,
    Round,
    Target,
    machine,
)
from benchmarks.older_code import ROOT, unpack
from benchmarks.overhead_tables import PATH_PROCESSES

MAX_TRIES_A_PAIR: Final = 4  # relative to --pairs: the maximum number of pairs
START_LIMIT_S: Final = 120.0
STOP_LIMIT_S: Final = 60.0
# Runs in the commit's tree; prints its address, and ends when its input closes.
SYSTEM: Final = """
import asyncio, json, sys
from pathlib import Path
from benchmarks.spillway_under_test import running_spillway

async def main():
    async with running_spillway(Path(sys.argv[1]), float(sys.argv[2])) as running:
        print(json.dumps({"port": running.port, "api_key": running.api_key, "pids": running.pids}), flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def system(tree: Path, folder: Path) -> AsyncIterator[Target]:
    """Run the Spillway of the code in ``tree`` with these packages. Raises TimeoutError if it does not start."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SYSTEM, str(folder), str(TOKEN_MS)),
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None  # both are pipes
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_LIMIT_S):
            started = await process.stdout.readline()
        yield Target(**json.loads(started))
    finally:
        process.stdin.close()
        async with asyncio.timeout(STOP_LIMIT_S):
            await process.wait()


def cost_us(measured: Round, *, ledger: bool = False) -> float:
    """Return the CPU of the path, or of the ledger, per request or token, in µs."""
    names = ("ledger",) if ledger else PATH_PROCESSES
    return sum(measured.window.cpu_s[name] for name in names) / measured.units * 1e6


async def compare(older: Target, newer: Target, pairs: int, console: Console) -> dict[str, Any]:
    """Load both alternately, all loads per pair, in changing order. Raises LoadError if an answer is wrong."""
    systems = [Loads(older, SPILLWAY_SIZES), Loads(newer, SPILLWAY_SIZES)]
    for loads in systems:
        await loads.warm_up()
    kept: dict[str, list[tuple[Round, Round]]] = {name: [] for name in LOADS}
    for number in range(pairs * MAX_TRIES_A_PAIR):
        missing = [name for name, of_load in kept.items() if len(of_load) < pairs]
        if not missing:
            break
        counts = ", ".join(f"{name} {len(kept[name])}" for name in missing)
        console.print(f"[dim]pair {number + 1}; so far: {counts}[/dim]")
        for name in missing:
            order = (0, 1) if number % 2 == 0 else (1, 0)
            turns = {which: await systems[which].once(name) for which in order}
            if all(turn.window.stolen_cores <= STOLEN_LIMIT_CORES for turn in turns.values()):
                kept[name].append((turns[0], turns[1]))
    return {name: _summary(of_load) for name, of_load in kept.items()}


def _summary(of_load: list[tuple[Round, Round]]) -> dict[str, Any]:
    if len(of_load) < 2:
        return {"pairs": len(of_load)}
    ratios = [cost_us(newer) / cost_us(older) for older, newer in of_load]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    sides = {"older": [older for older, _ in of_load], "newer": [newer for _, newer in of_load]}
    costs = {f"{side}_us": statistics.median(cost_us(turn) for turn in turns) for side, turns in sides.items()}
    ledgers = {
        f"{side}_ledger_us": statistics.median(cost_us(turn, ledger=True) for turn in turns)
        for side, turns in sides.items()
    }
    for side, turns in sides.items():
        for process in PATH_PROCESSES:
            costs[f"{side}_{process}_us"] = statistics.median(
                turn.window.cpu_s[process] / turn.units * 1e6 for turn in turns
            )
    others = max(turn.window.others_cores for pair in of_load for turn in pair)
    figures = {**costs, **ledgers, "ratio": middle, "ratio_low": low, "ratio_high": high, "others_cores": others}
    return {"pairs": len(of_load), **{name: round(value, 3) for name, value in figures.items()}}


def print_table(results: dict[str, Any], console: Console) -> None:
    """Print one row for each load."""
    table = Table(
        "CPU, µs", "older", "newer", "newer / older", "quartiles", "ledger, older", "newer", "others", "pairs"
    )
    for name, row in results.items():
        if "ratio" not in row:
            table.add_row(name, *("-" * 7), str(row["pairs"]))
            continue
        quartiles = f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
        costs = (f"{row['older_us']:,.0f}", f"{row['newer_us']:,.0f}", f"{row['ratio']:.2f}", quartiles)
        ledgers = (f"{row['older_ledger_us']:,.0f}", f"{row['newer_ledger_us']:,.0f}", f"{row['others_cores']:.2f}")
        table.add_row(name, *costs, *ledgers, str(row["pairs"]))
    console.print(table)


def failed_loads(results: dict[str, Any], gate: float) -> list[str]:
    """Return the loads whose ratio exceeds ``gate`` even at its lower quartile, or that were not measured."""
    return [name for name, row in results.items() if row.get("ratio_low", float("inf")) > gate]


async def main(arguments: argparse.Namespace) -> int:
    """Return 1 if the gate fails."""
    console = Console(highlight=False)
    report = {"benchmark": "path_beside", "older": arguments.commit, **machine()}
    console.print(report)
    with tempfile.TemporaryDirectory(prefix="spillway-beside-") as name:
        folder = Path(name)
        unpack(arguments.commit, folder / "tree")
        for side in ("older", "newer"):
            (folder / side).mkdir()
        async with system(folder / "tree", folder / "older") as older, system(ROOT, folder / "newer") as newer:
            results = await compare(older, newer, arguments.pairs, console)
    print_table(results, console)
    print(json.dumps({**report, **results}))
    failed = [] if arguments.gate is None else failed_loads(results, arguments.gate)
    if failed:
        console.print(f"[red]more than {arguments.gate:g} times {arguments.commit}: {', '.join(failed)}[/red]")
    return bool(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit with the older code")
    parser.add_argument("--pairs", type=int, default=8, help="undisturbed turns needed per load and side")
    parser.add_argument("--gate", type=float, help="fail if a load costs more than this factor of the older commit")
    gc.disable()  # the client's own pauses must not appear in the figures
    sys.exit(uvloop.run(main(parser.parse_args())))
