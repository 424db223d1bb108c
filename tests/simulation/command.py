"""The command line of ``python -m tests.simulation``."""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from rich import progress as rich_progress
from rich.console import Console

from tests.simulation.plan import KINDS, MEANING, known, plan_of
from tests.simulation.run import Verdict, simulate

EPILOG = """
examples
  python -m tests.simulation --seeds 20000                  a night's work: 20,000 simulations, as many at once as cores
  python -m tests.simulation --seeds 100 --faults host,power only these faults (plans differ by what may be drawn)
  python -m tests.simulation --seed 17 --trace              one simulation, with everything that happens in it
  make simulate SEEDS=20000                                 the same as the first

A seed and a set of faults are one simulation, always the same one. To look at a failing seed, run it with --seed,
--trace and the same --faults; the first column is simulated seconds, the second the process or what happened.

The last line is one JSON object. The exit code is 0 if every promise was kept, 1 if one was broken (with the failing
seeds, their offences and how to run them again), 130 if it was interrupted.
"""
SEEDS_AT_ONCE = 4
SEEDS_OF_ONE_PROCESS = 200  # bounds the memory that simulations leave behind in a process
MAX_SHOWN = 20
INTERRUPTED = 130


def parse_arguments() -> argparse.Namespace:
    about = [f"  {kind:<16} {MEANING[kind]}" for kind in KINDS]
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation",
        description="Simulate Spillway under faults, thousands of times.\n\nfaults\n" + "\n".join(about),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many simulations (default: 100)")
    parser.add_argument("--first-seed", type=int, default=1, metavar="N", help="the first one's seed (default: 1)")
    parser.add_argument("--seed", type=int, metavar="N", help="this one alone")
    parser.add_argument(
        "--faults", default="all", metavar="KINDS", help="comma-separated, or 'all' (default) or 'none'"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: cores)")
    parser.add_argument("--trace", action="store_true", help="show all that happens; with --seed")
    arguments = parser.parse_args()
    names = {"all": list(KINDS), "none": []}.get(arguments.faults, arguments.faults.split(","))
    try:
        arguments.kinds = known(names)
    except ValueError as error:
        parser.error(str(error))
    if arguments.trace and arguments.seed is None:
        parser.error("--trace needs --seed")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return _run_one(arguments) if arguments.seed is not None else _run_many(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def _run_one(arguments: argparse.Namespace) -> int:
    plan = plan_of(arguments.seed, arguments.kinds)
    console = Console(stderr=True)
    for line in plan.describe():
        console.print(line, markup=False, highlight=False)
    return _tell([simulate(plan, _say if arguments.trace else None)], arguments, 0.0, console)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _run_many(arguments: argparse.Namespace) -> int:
    began_s = time.monotonic()
    console = Console(stderr=True)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    columns = (
        *("{task.description}", rich_progress.BarColumn(), rich_progress.MofNCompleteColumn()),
        *("{task.fields[a_minute]} a minute,", "{task.fields[failed]} broke a promise,"),
    )
    verdicts, failed = [], 0
    with rich_progress.Progress(*columns, rich_progress.TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("simulations", total=len(seeds), a_minute=0, failed=0)
        for verdict in _verdicts(seeds, arguments):
            verdicts.append(verdict)
            if verdict.offences:
                failed += 1
                console.print(f"seed {verdict.seed}: {'; '.join(verdict.offences)[:300]}", style="red", markup=False)
            a_minute = round(len(verdicts) / (time.monotonic() - began_s) * 60)
            bar.update(task, advance=1, a_minute=a_minute, failed=failed)
    return _tell(verdicts, arguments, time.monotonic() - began_s, console)


def _verdicts(seeds: range, arguments: argparse.Namespace) -> Iterator[Verdict]:
    work = partial(_verdict_of, kinds=arguments.kinds)
    if arguments.jobs == 1:
        yield from map(work, seeds)
        return
    with multiprocessing.get_context("fork").Pool(
        arguments.jobs, _as_a_worker, maxtasksperchild=SEEDS_OF_ONE_PROCESS // SEEDS_AT_ONCE
    ) as pool:
        yield from pool.imap_unordered(work, seeds, chunksize=SEEDS_AT_ONCE)


def _as_a_worker() -> None:
    """Leave Ctrl-C to the process that shows the progress, and end silently when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _verdict_of(seed: int, kinds: tuple[str, ...]) -> Verdict:
    verdict = simulate(plan_of(seed, kinds))
    verdict.events = []  # too large to send
    return verdict


def _tell(verdicts: list[Verdict], arguments: argparse.Namespace, took_s: float, console: Console) -> int:
    failed = sorted([verdict for verdict in verdicts if verdict.offences], key=lambda one: one.seed)
    faults = "all" if arguments.kinds == KINDS else ",".join(arguments.kinds) or "none"
    again = "" if arguments.kinds == KINDS else f" --faults {faults}"
    for verdict in failed[:MAX_SHOWN]:
        console.print(f"\nseed {verdict.seed}", style="bold red")
        for offence in verdict.offences:
            console.print(f"  {offence}", markup=False)
        console.print(f"  python -m tests.simulation --seed {verdict.seed} --trace{again}", markup=False)
    report = {
        "simulations": len(verdicts),
        "failed": [verdict.seed for verdict in failed],
        "faults": faults,
        "requests": sum(verdict.requests for verdict in verdicts),
        "answered": sum(verdict.answered for verdict in verdicts),
        "codes": dict(sum((Counter(verdict.codes) for verdict in verdicts), Counter())),
        "simulated_s": round(sum(verdict.simulated_s for verdict in verdicts)),
        "digest": verdicts[0].digest[:16] if len(verdicts) == 1 else None,
        "seconds": round(took_s, 1),
        "a_minute": round(len(verdicts) / took_s * 60) if took_s else None,
        "jobs": arguments.jobs,
        "commit": _commit(),
    }
    _say(json.dumps(report))
    return 1 if failed else 0


def _commit() -> str:
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
