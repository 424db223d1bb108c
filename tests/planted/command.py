"""The command line of ``python -m tests.planted``."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tests.mutants.pytest_run import ENDED, TIMED_OUT, Outcome, run_tests, start_server
from tests.mutants.tree import changed, copy_tree, tree_digest
from tests.planted.faults import SIMULATED, UNIT, Fault, load_faults

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("named", "unit", "other-unit", "simulate", "integration", "other-integration")
NOTHING = "nothing"
SEEDS = 60
SEEDS_AT_A_TIME = 20  # after these it is looked whether one has failed
SIMULATION_LIMIT_S = 1800.0
RUN_LIMIT_S = 3600.0
TEST_TIMEOUT_S = 180  # of one test: what waits for what never comes
MAX_CHANCES = 3  # how many tests may fail by chance


class Result(msgspec.Struct, frozen=True):
    """What one step of tests said of a fault."""

    name: str
    step: str
    test: str = ""  # that noticed it first; empty: none
    said: str = ""
    seconds: float = 0.0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=sys.modules["tests.planted"].__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="of faults (default: all)")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="of tests (default: all of them)")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help=f"of the simulation (default: {SEEDS})")
    parser.add_argument(
        "--before", type=Path, metavar="FILE", help="results of another commit: fail only for what is noticed no more"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/planted"),
        help="for the results, one JSON line a step; what was interrupted goes on there (default: build/planted)",
    )
    arguments = parser.parse_args()
    arguments.faults = [one for one in load_faults() if not arguments.names or one.name in arguments.names]
    if unknown := set(arguments.names) - {one.name for one in arguments.faults}:
        parser.error(f"unknown: {', '.join(unknown)}")
    return arguments


def read_results(path: Path) -> list[Result]:
    """Read a file of results."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Result) for line in lines]


class Run:
    """A run of the command, in two copies of the tree: one for faults, one without."""

    def __init__(self, arguments: argparse.Namespace, copies: Path) -> None:
        self.faults: list[Fault] = arguments.faults
        self.steps: list[str] = [step for step in STEPS if step in arguments.steps]
        self.seeds: int = arguments.seeds
        self.console = Console(soft_wrap=True)
        self.context = start_server(())
        self.tree, self.sound_tree = copies / "planted", copies / "sound"
        for tree in (self.tree, self.sound_tree):
            copy_tree(ROOT, tree)
        folder = arguments.folder / tree_digest(ROOT)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "results.jsonl"
        self.results = read_results(self.file)
        self.passing: set[str] = set()  # without a fault, as far as is known

    def main(self) -> None:
        """Take all faults through one step after the other, until each is noticed."""
        if "named" in self.steps:
            outcome = self._pytest(self.sound_tree, sorted({fault.test for fault in self.faults}))
            self.passing = outcome.seconds.keys() - outcome.failed.keys()
        for step in self.steps:
            for fault in self.faults:
                known = [one for one in self.results if one.name == fault.name]
                if not any(one.test or one.step == step for one in known):
                    self._add(self._run(fault, step))

    def _add(self, result: Result) -> None:
        with self.file.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        self.results.append(result)
        self.say(f"{result.step:<12} {result.name}: {result.test or NOTHING} {result.said}")

    def say(self, line: str) -> None:
        """Print a line."""
        self.console.print(line, markup=False, highlight=False)

    def _run(self, fault: Fault, step: str) -> Result:
        began_s = time.monotonic()
        with changed(self.tree / fault.file, fault.planted(self.tree)):
            if step == "simulate":
                test, said = self._simulate() if fault.package in SIMULATED else ("", "")
            else:
                test, said = self._ask(_tests_of(fault, step, self.tree))
        return Result(fault.name, step, test, said, round(time.monotonic() - began_s, 1))

    def _ask(self, tests: list[str]) -> tuple[str, str]:
        """Return the first test that fails, and what it says; one that waits for servers must fail by the fault."""
        is_unit = all(test.startswith(UNIT) for test in tests)
        options = ["-m", "not servers and not slow"] if is_unit else []
        for _ in range(MAX_CHANCES if tests else 0):
            outcome = self._pytest(self.tree, [*options, *tests])
            if outcome.code in {TIMED_OUT, ENDED}:
                return "pytest", "does not end" if outcome.code == TIMED_OUT else "ended without a word"
            if outcome.not_collected:
                return next(iter(outcome.not_collected.items()))
            if not outcome.failed:
                break
            test, said = next(iter(outcome.failed.items()))
            again = is_unit or outcome.timed_out or self._pytest(self.tree, [test]).code != 0
            if again and (test in self.passing or self._pytest(self.sound_tree, [test]).code == 0):
                return test, said
            options = [*options, "--deselect", test]
        return "", ""

    def _pytest(self, tree: Path, arguments: list[str]) -> Outcome:
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--timeout", str(TEST_TIMEOUT_S)]
        return run_tests(self.context, tree, [*options, *arguments], RUN_LIMIT_S)

    def _simulate(self) -> tuple[str, str]:
        """Return the first seed that fails, and what it says."""
        for first in range(1, self.seeds + 1, SEEDS_AT_A_TIME):
            command = [sys.executable, "-m", "tests.simulation", "--jobs", "1", "--first-seed", str(first)]
            command += ["--seeds", str(min(SEEDS_AT_A_TIME, self.seeds + 1 - first))]
            environment = {**os.environ, "PYTHONPATH": str(self.tree), "COLUMNS": "1000"}
            try:
                done = subprocess.run(
                    command,
                    cwd=self.tree,
                    env=environment,
                    check=False,
                    capture_output=True,
                    text=True,
                    timeout=SIMULATION_LIMIT_S,
                )
            except subprocess.TimeoutExpired:
                return f"seeds from {first}", "do not end"
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.strip()] or [""]
                said = next((line for line in lines if line.startswith("seed ")), lines[-1])
                return f"seeds {_failed_seeds(done.stdout)}", said.strip()[:300]
        return "", ""

    def table(self) -> str:
        """Return what noticed each fault, as Markdown."""
        rows = ["| fault | noticed by | the first test |", "|---|---|---|"]
        for fault in self.faults:
            by = noticed_by(fault.name, self.results)
            step, test = (by.step, by.test.replace("tests/", "", 1)) if by else (f"**{NOTHING}**", "")
            rows.append(f"| {fault.name} | {step} | {test} |")
        return "\n".join(rows)


def _tests_of(fault: Fault, step: str, tree: Path) -> list[str]:
    choose = {
        "named": lambda _: [fault.test],
        "unit": fault.unit_tests,
        "other-unit": fault.other_unit_tests,
        "integration": fault.integration_tests,
        "other-integration": fault.other_integration_tests,
    }
    return choose[step](tree)


def noticed_by(name: str, results: list[Result]) -> Result | None:
    """Return the result of the step that has noticed a fault."""
    return next((one for one in results if one.name == name and one.test), None)


def _failed_seeds(output: str) -> Any:
    try:
        return json.loads(output.splitlines()[-1])["failed"]
    except (IndexError, KeyError, ValueError):
        return "did not run"


def main() -> int:
    """Run the command."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="spillway-planted-") as copies:
        run = Run(arguments, Path(copies))
        run.main()
    run.say(run.table())
    run.say(f"Results: {run.file}")
    unnoticed = [fault.name for fault in run.faults if noticed_by(fault.name, run.results) is None]
    if arguments.before is not None:
        before = read_results(arguments.before)
        unnoticed = [name for name in unnoticed if noticed_by(name, before) is not None]
    for name in unnoticed:
        run.say(f"not noticed: {name}")
    return 1 if unnoticed else 0
