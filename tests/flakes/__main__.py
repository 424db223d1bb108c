"""``python -m tests.flakes``: repeat tests under load, in random order, and list each that ever failed."""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from tests.flakes import record
from tests.flakes.burner import burning

EPILOG = """
examples
  python -m tests.flakes                                        all tests, 8 times, at a load of 8: hours
  python -m tests.flakes tests/fleet --times 30                 what waits for processes deserves more
  python -m tests.flakes tests/fleet -- -k crash                what follows -- goes to pytest
  python -m tests.flakes -- -p tests.flakes.pauses              random pauses around calls to the queue and SQL
  python -m tests.flakes --folder build/flakes/20260102-030405  continue a run that was cut short
  make flakes TESTS=tests/fleet TIMES=30 LOAD=0                 the same from make, without a load

Each repetition is one pytest process with an order of its own; a few run at once. The folder keeps plan.json (what is
run), run-N.jsonl (every outcome), run-N.txt (pytest's output) and failures/ (the output of each failure, one file for
each test and repetition), all written as the tests end. A run that was cut short continues with --folder: what has an
outcome is not run again. `python -m pytest -n 0 -p tests.flakes.record --order-seed SEED-N` repeats the order of run N,
with the seed of plan.json.

The exit code is 0 if no test ever failed, 1 if one did, 5 if none ran, 130 if it was interrupted; what was found is
listed also then.
"""
INTERRUPTED: Final = 130
NOTHING_RAN: Final = 5  # as pytest says it
POLL_S: Final = 2.0
ORDERLY_S: Final = 60.0  # for an interrupted pytest to end its servers
TOLD_S: Final = 60.0  # between two lines of progress where no terminal shows a bar
MOST_CRASHES: Final = 20  # of one repetition


@dataclass(frozen=True)
class Plan:
    """What is repeated; it is kept in the folder, for a later call."""

    tests: list[str]
    options: list[str]  # for pytest
    seed: int


@dataclass
class Repetition:
    """One pass through the tests by a process; another takes over where a test kills it."""

    number: int
    folder: Path
    plan: Plan
    process: subprocess.Popen[bytes] | None = None
    crashes: int = 0
    recorded_bytes: int | None = None  # when it was interrupted
    over: bool = False  # the process is gone, and no other is needed
    ended: bool = False  # every test has an outcome
    total: int = 0  # tests, once they are collected
    outcomes: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"run-{self.number}"

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    def read(self) -> list[dict[str, object]]:
        """Take in what the process has written so far."""
        entries = record.read(self.path)
        self.outcomes = record.outcomes(entries)
        self.total = max((entry["collected"] for entry in entries if "collected" in entry), default=0)
        self.ended = {"ended": True} in entries
        return entries

    def start(self) -> None:
        command = [sys.executable, "-m", "pytest", "-p", record.__name__, "-n", "0", "--continue-on-collection-errors"]
        command += ["--record", str(self.path), "--order-seed", f"{self.plan.seed}-{self.number}"]
        command += ["-p", "no:cacheprovider", *self.plan.options, *self.plan.tests]
        with (self.folder / f"{self.name}.txt").open("ab") as output:
            # In a group of its own: Ctrl-C at a terminal reaches it through us alone, and what it leaves can be ended.
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def poll(self) -> None:
        """Look what the process has done. A test that killed it has failed, and another process runs the rest."""
        assert self.process is not None
        self.over = self.process.poll() is not None
        entries = self.read()
        if not self.over or self.ended:
            return
        self.crashes += 1
        began = max((n for n, entry in enumerate(entries) if "began" in entry), default=len(entries))
        started = [entry["started"] for entry in entries[began:] if "started" in entry]
        crashed = next((str(nodeid) for nodeid in reversed(started) if nodeid not in self.outcomes), "pytest itself")
        with self.path.open("a") as file:
            file.write(json.dumps({"finished": crashed, "outcome": "failed"}) + "\n")
            if crashed == "pytest itself" or self.crashes == MOST_CRASHES:
                file.write(json.dumps({"ended": True}) + "\n")
        failures = self.folder / "failures"
        failures.mkdir(exist_ok=True)
        reason = (
            f"the process ended with {self.process.returncode} while it ran {crashed}; its output: {self.name}.txt\n"
        )
        (failures / f"{record.file_name(crashed)}.{self.name}.txt").write_text(reason)
        self.read()
        if not self.ended:
            self.start()
            self.over = False

    def interrupt(self) -> None:
        """Ask the process to end in order. What it records from now on does not count: a test may have seen this."""
        if self.process is not None and self.process.poll() is None:
            self.recorded_bytes = self.path.stat().st_size if self.path.exists() else 0
            self.process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """Wait until the process has ended; kill it, with all that it started, where that takes too long."""
        if self.process is None:
            return
        try:
            self.process.wait(ORDERLY_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.recorded_bytes is not None and self.path.exists():
            os.truncate(self.path, self.recorded_bytes)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments, and those that follow ``--``."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.flakes",
        description="Repeat tests under load, in random order, and list each that ever failed, and how often.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tests", nargs="*", help="files, folders or tests; default: all")
    parser.add_argument("--times", type=int, default=8, help="how often each test runs (%(default)s)")
    parser.add_argument(
        "--load",
        type=int,
        default=8,
        help="threads of the whole machine that want a processor; busy processes make up for what is missing "
        "(%(default)s; 0: leave the machine alone)",
    )
    parser.add_argument("--processes", type=int, default=4, help="repetitions that run at once (%(default)s)")
    parser.add_argument("--seed", type=int, help="of the orders; default: a new one")
    parser.add_argument(
        "--folder", type=Path, help="what was found; one that exists is continued. Default: a new one in build/flakes"
    )
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parsed = parser.parse_args(arguments[:cut])
    if parsed.folder and (parsed.folder / "plan.json").exists() and (parsed.tests or arguments[cut:] or parsed.seed):
        parser.error(f"{parsed.folder} has a plan of its own: leave tests, options and seed out")
    return parsed, arguments[cut + 1 :]


def main() -> int:
    arguments, options = parse_arguments(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it for us
    signal.signal(signal.SIGTERM, _interrupt)
    folder = arguments.folder or Path("build/flakes") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    plan = _plan(folder, Plan(arguments.tests, options, arguments.seed or random.randrange(1_000_000)))
    console = Console(stderr=True, highlight=False)
    console.print(
        f"{folder}: {' '.join(plan.tests) or 'all tests'}, {arguments.times} times, seed {plan.seed}",
        markup=False,
        soft_wrap=True,
    )
    repetitions = [Repetition(number, folder, plan) for number in range(1, arguments.times + 1)]
    for repetition in repetitions:
        repetition.read()
    try:
        with burning(arguments.load), _shown(repetitions, console) as show:
            _run_all(repetitions, arguments.processes, show)
    except KeyboardInterrupt:
        _list(repetitions)
        sys.stdout.write(
            f"interrupted; continue with: python -m tests.flakes --folder {folder} --times {arguments.times}\n"
        )
        return INTERRUPTED
    has_failed = _list(repetitions)
    if not any(repetition.outcomes for repetition in repetitions):
        sys.stdout.write(f"no test ran; pytest says why in {folder}/{repetitions[0].name}.txt\n")
        return NOTHING_RAN
    return 1 if has_failed else 0


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _plan(folder: Path, new: Plan) -> Plan:
    """Return the folder's plan; a new folder gets this one."""
    path = folder / "plan.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(new)))
    return Plan(**json.loads(path.read_text()))


def _run_all(repetitions: list[Repetition], processes: int, show: Callable[[], None]) -> None:
    waiting = [repetition for repetition in repetitions if not repetition.ended]
    running: list[Repetition] = []
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                running.append(waiting.pop(0))
                running[-1].start()
            time.sleep(POLL_S)
            for repetition in running:
                repetition.poll()
            running = [repetition for repetition in running if not repetition.over]
            show()
    finally:
        for repetition in running:
            repetition.interrupt()
        for repetition in running:
            repetition.stop()
            repetition.read()


@contextmanager
def _shown(repetitions: list[Repetition], console: Console) -> Iterator[Callable[[], None]]:
    """Show how far it is: as a bar at a terminal, else as a line now and then."""
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("collecting", total=None)
        told_s = time.monotonic()

        def show() -> None:
            nonlocal told_s
            done = sum(len(repetition.outcomes) for repetition in repetitions)
            total = max(repetition.total for repetition in repetitions) * len(repetitions)
            words = f"{len(_failures(repetitions))} tests failed so far"
            bar.update(task, completed=done, total=total or None, description=words)
            if not console.is_terminal and time.monotonic() - told_s >= TOLD_S:
                told_s = time.monotonic()
                console.print(f"{done} of {total or 'tests to collect'}; {words}", markup=False, soft_wrap=True)

        yield show


def _failures(repetitions: list[Repetition]) -> Counter[str]:
    """How often each test failed, the most frequent first."""
    failed = Counter(
        nodeid for repetition in repetitions for nodeid, outcome in repetition.outcomes.items() if outcome == "failed"
    )
    return Counter(dict(failed.most_common()))


def _list(repetitions: list[Repetition]) -> bool:
    """Write what failed and how often. Return whether anything did."""
    failures = _failures(repetitions)
    ran = Counter(nodeid for repetition in repetitions for nodeid in repetition.outcomes)
    for nodeid, count in failures.items():
        sys.stdout.write(f"failed {count} of {ran[nodeid]}: {nodeid}\n")
    where = f"; outputs: {repetitions[0].folder}/failures" if failures else ""
    sys.stdout.write(f"{len(ran)} tests ran {sum(ran.values())} times; {len(failures)} ever failed{where}\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
