"""The command line of ``python -m tests.mutants``."""

import argparse
import queue
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tests.mutants.judge import Baseline, Verdict, judge, run_baseline, run_mutated
from tests.mutants.packages import PACKAGES
from tests.mutants.pytest_run import start_server
from tests.mutants.sample import Mutant, mutants_of, sample
from tests.mutants.tree import copy_tree, tree_digest

ROOT = Path(__file__).resolve().parents[2]
JOBS = 2
OUTCOMES = ("killed", "timeout", "survived", "broken", "ended")
SEEN = ("killed", "timeout")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=sys.modules["tests.mutants"].__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(PACKAGES)} (default: all)")
    parser.add_argument("--mutants", type=int, default=40, metavar="N", help="of each package (default: 40)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the sample (default: 1)")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help=f"at once (default: {JOBS})")
    parser.add_argument(
        "--before", type=Path, metavar="FILE", help="results of another commit: the same mutants again, and compared"
    )
    parser.add_argument(
        "--session",
        type=Path,
        default=Path("build/mutants"),
        metavar="FOLDER",
        help="for the results, one JSON line a mutant; what was interrupted goes on there (default: build/mutants)",
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.packages) - set(PACKAGES):
        parser.error(f"unknown: {', '.join(unknown)}")
    arguments.packages = arguments.packages or list(PACKAGES)
    return arguments


class Session:
    """The folder of one state of the tree: baselines and verdicts, each written as soon as it is known."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / tree_digest(ROOT)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results = self.folder / "results.jsonl"
        self.verdicts = {verdict.id: verdict for verdict in read_verdicts(self.results)}
        self._lock = threading.Lock()

    def add(self, verdict: Verdict) -> None:
        """Keep it."""
        with self._lock, self.results.open("ab") as file:
            file.write(msgspec.json.encode(verdict) + b"\n")
            self.verdicts[verdict.id] = verdict

    def baseline_file(self, package: str) -> Path:
        """Return where a package's baseline is kept."""
        return self.folder / f"baseline-{package}.json"


def read_verdicts(path: Path) -> list[Verdict]:
    """Read a file of results."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Verdict) for line in lines]


class Run:
    """A run of the command: the copies of the tree, each used by one process at a time."""

    def __init__(self, arguments: argparse.Namespace, copies: Path, console: Console) -> None:
        self.arguments = arguments
        self.console = console
        self.session = Session(arguments.session)
        self.before = {verdict.id: verdict for verdict in read_verdicts(arguments.before)} if arguments.before else None
        self.context = start_server(
            {library for package in arguments.packages for library in PACKAGES[package].libraries}
        )
        self.trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(arguments.jobs):
            copy_tree(ROOT, copies / str(number))
            self.trees.put(copies / str(number))

    def main(self) -> int:
        """Run all; return the exit code."""
        packages: list[str] = self.arguments.packages
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            found = dict(zip(packages, pool.map(self.baseline, packages), strict=True))
            baselines = {package: baseline for package, baseline in found.items() if baseline is not None}
            if len(baselines) < len(packages):
                return 1
            drawn = [mutant for package in packages for mutant in self.sample(package)]
            known = {verdict.id for verdict in self.session.verdicts.values() if verdict.outcome != "ended"}
            left = [mutant for mutant in drawn if mutant.id not in known]
            left.sort(key=lambda mutant: mutant.rank(self.arguments.seed))  # packages in turns, if it is interrupted
            self.console.print(f"{len(drawn)} mutants, {len(drawn) - len(left)} of them judged before")
            for _ in pool.map(lambda mutant: self.judge(mutant, baselines[mutant.package]), left):
                pass
            sound = list(pool.map(lambda package: self.killers_pass(package, baselines[package], drawn), packages))
        self.show(drawn)
        self.console.print(f"Results: {self.session.results}")
        return 0 if all(sound) else 1

    def sample(self, package: str) -> list[Mutant]:
        """Draw a package's mutants; beside another commit's results, the same ones."""
        mutants = list(mutants_of(ROOT, package, PACKAGES[package].source_files(ROOT)))
        if self.before is None:
            return sample(mutants, ROOT, self.arguments.mutants, self.arguments.seed)
        return [mutant for mutant in mutants if mutant.id in self.before]

    def baseline(self, package: str) -> Baseline | None:
        """Run a package's tests without mutants: all of them must pass."""
        file = self.session.baseline_file(package)
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=Baseline)
        tree = self.trees.get()
        try:
            baseline, outcome = run_baseline(self.context, tree, PACKAGES[package])
            if baseline is None:
                self.console.print(f"{package}: the tests fail without mutants:", outcome.failed, outcome.not_collected)
                self.console.print((tree / "output.txt").read_text()[-5000:], markup=False)
                return None
        finally:
            self.trees.put(tree)
        took_s = sum(baseline.seconds.values())
        self.console.print(f"{package}: {len(baseline.seconds)} tests pass without mutants, {took_s:.0f} s")
        for test, said in outcome.failed.items():
            self.console.print(f"flaky, so no judge: {test} {said}", markup=False)
        file.write_bytes(msgspec.json.encode(baseline))
        return baseline

    def judge(self, mutant: Mutant, baseline: Baseline) -> None:
        """Judge one mutant in a copy of the tree."""
        tree = self.trees.get()
        try:
            verdict = judge(self.context, tree, mutant, PACKAGES[mutant.package], baseline)
        finally:
            self.trees.put(tree)
        self.session.add(verdict)
        self.console.print(
            f"{verdict.outcome:<9} {verdict.place} {verdict.operator} {verdict.test or ''}", markup=False
        )

    def killers_pass(self, package: str, baseline: Baseline, drawn: list[Mutant]) -> bool:
        """Run what has killed mutants again, without them and in another order: it must pass."""
        verdicts = [self.session.verdicts[mutant.id] for mutant in drawn if mutant.package == package]
        killers = sorted({verdict.test for verdict in verdicts if verdict.test}, reverse=True)
        if not killers:
            return True
        tree = self.trees.get()
        try:
            outcome = run_mutated(self.context, tree, killers, baseline)
        finally:
            self.trees.put(tree)
        if outcome.code != 0:
            self.console.print(f"{package}: fails without a mutant, too:", outcome.failed or outcome.not_collected)
        return outcome.code == 0

    def show(self, drawn: list[Mutant]) -> None:
        """Print the survivors and the table."""
        verdicts = [self.session.verdicts[mutant.id] for mutant in drawn]
        for verdict in verdicts:
            if verdict.outcome == "survived":
                self.console.print(f"\n{verdict.place}, executed by {verdict.tests} tests", markup=False)
                self.console.print(verdict.diff, markup=False, highlight=False)
        table = Table("package", "mutants", *OUTCOMES, *(["before: killed or timeout", "after"] if self.before else []))
        for package in [*self.arguments.packages, "all"]:
            of_package = [verdict for verdict in verdicts if package in (verdict.package, "all")]
            counts = Counter(verdict.outcome for verdict in of_package)
            row = [package, len(of_package), *(counts[outcome] for outcome in OUTCOMES)]
            if self.before:
                row += [sum(self.before[verdict.id].outcome in SEEN for verdict in of_package)]
                row += [sum(verdict.outcome in SEEN for verdict in of_package)]
            table.add_row(*map(str, row))
        self.console.print(table)
        if self.before:
            self._compare(verdicts)

    def _compare(self, verdicts: list[Verdict]) -> None:
        assert self.before is not None
        now = {verdict.id: verdict for verdict in verdicts}
        for identity, verdict in self.before.items():
            if identity not in now and verdict.package in self.arguments.packages:
                self.console.print(f"no longer in the code: {verdict.place} {verdict.operator}", markup=False)
            elif identity in now and verdict.outcome in SEEN and now[identity].outcome not in SEEN:
                self.console.print(
                    f"not killed any more: {now[identity].place}, before by {verdict.test}", markup=False
                )


def main() -> int:
    """Run the command."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="spillway-mutants-") as copies:
        return Run(arguments, Path(copies), Console(soft_wrap=True)).main()
