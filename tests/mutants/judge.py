"""Judge mutants by tests: which tests execute what, and what they say."""

import difflib
import sys
from pathlib import Path
from typing import Any

import msgspec
from coverage import CoverageData

from tests.mutants.packages import Package
from tests.mutants.pytest_run import Outcome, run_tests
from tests.mutants.sample import Mutant
from tests.mutants.tree import changed

BASELINE_LIMIT_S = 3600.0
START_LIMIT_S = 60.0  # of a run, beside what its tests take
SLOWER = 10.0  # than under the baseline, before a run is ended
TEST_TIMEOUT_S = 60.0  # of one test; what waits for what never comes would do so for minutes
MAX_CHANCES = 3  # how many tests may fail by chance, which is asked by running each of them again


class Baseline(msgspec.Struct):
    """What a package's tests did without mutants."""

    seconds: dict[str, float]  # by test
    lines: dict[str, dict[int, list[str]]]  # file: line: the tests that execute it; imports are none


class Verdict(msgspec.Struct):
    """What became of a mutant."""

    id: str
    package: str
    place: str
    operator: str
    outcome: str
    test: str | None = None  # that killed it
    said: str = ""
    tests: int = 0  # which execute it
    seconds: float = 0.0
    diff: str = ""


def run_baseline(context: Any, tree: Path, package: Package) -> tuple[Baseline | None, Outcome]:
    """Run all of a package's tests under coverage, without a mutant.

    What fails and then, alone, passes is left out. There is no baseline if a test fails again.
    """
    measured = [f"--cov={folder}" for folder in package.folders()]
    arguments = ["-q", "-n", "0", "-p", "no:cacheprovider", *measured, "--cov-context=test", "--cov-report="]
    arguments += [*package.unit, *package.further]
    outcome = run_tests(context, tree, arguments, BASELINE_LIMIT_S)
    if outcome.not_collected or outcome.code not in (0, 1):
        return None, outcome
    for test in outcome.failed:
        del outcome.seconds[test]
        if run_tests(context, tree, ["-q", "-n", "0", test], BASELINE_LIMIT_S).code != 0:
            return None, outcome
    data = CoverageData(str(tree / ".coverage"))
    data.read()
    lines: dict[str, dict[int, list[str]]] = {}
    for path in package.source_files(tree):
        contexts = data.contexts_by_lineno(str(tree / path))
        executed_by = {line: {name.rpartition("|")[0] for name in names} for line, names in contexts.items()}
        lines[path] = {line: sorted(tests & outcome.seconds.keys()) for line, tests in executed_by.items()}
    return Baseline(outcome.seconds, lines), outcome


def seen_by(mutant: Mutant, package: Package, baseline: Baseline) -> tuple[list[str], list[str]]:
    """Return the tests that execute it, unit tests and others, quickest first."""
    lines = baseline.lines.get(mutant.path, {})
    first, last = mutant.lines if mutant.in_function else (0, sys.maxsize)
    tests = {test for line, tests in lines.items() if first <= line <= last for test in tests}
    tests |= {test for test in baseline.seconds if package.unseen and test.startswith(package.unseen)}
    ordered = sorted(tests, key=lambda test: (baseline.seconds.get(test, 0.0), test))
    unit = [test for test in ordered if package.is_unit(test)]
    return unit, [test for test in ordered if not package.is_unit(test)]


def judge(context: Any, tree: Path, mutant: Mutant, package: Package, baseline: Baseline) -> Verdict:
    """Change the copy, run the tests that can see it, and change it back."""
    path = tree / mutant.path
    code = path.read_text()
    mutated = mutant.mutated(code)
    assert mutated is not None
    place = f"{mutant.path}:{mutant.line}"
    unit, further = seen_by(mutant, package, baseline)
    verdict = Verdict(mutant.id, mutant.package, place, mutant.operator, "survived", tests=len(unit) + len(further))
    verdict.diff = "\n".join(
        line.rstrip()
        for line in difflib.unified_diff(code.splitlines(), mutated.splitlines(), "a", "b", n=1, lineterm="")
        if not line.startswith(("---", "+++"))
    )
    with changed(path, mutated):
        _ask(context, tree, unit, baseline, verdict, confirm=False)
        if verdict.outcome == "survived":
            _ask(context, tree, further, baseline, verdict, confirm=True)
    return verdict


def _ask(context: Any, tree: Path, tests: list[str], baseline: Baseline, verdict: Verdict, *, confirm: bool) -> None:
    """Run these tests; a failure of what waits for servers is believed when it happens again."""
    for _ in range(MAX_CHANCES if tests else 0):
        outcome = run_mutated(context, tree, tests, baseline)
        verdict.seconds += sum(outcome.seconds.values())
        if outcome.not_collected:
            verdict.outcome, verdict.said = "broken", next(iter(outcome.not_collected.values()))
            return
        if not outcome.failed:
            verdict.outcome = "survived" if outcome.code == 0 else "timeout" if outcome.timed_out else "ended"
            return
        test, said = next(iter(outcome.failed.items()))
        if not confirm or run_mutated(context, tree, [test], baseline).code != 0:
            verdict.outcome, verdict.test, verdict.said = "timeout" if outcome.timed_out else "killed", test, said
            return
        tests = [other for other in tests if other != test]


def run_mutated(context: Any, tree: Path, tests: list[str], baseline: Baseline) -> Outcome:
    """Run these tests until one fails."""
    limits_s = {test: max(TEST_TIMEOUT_S, SLOWER * baseline.seconds.get(test, 1.0)) for test in tests}
    arguments = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    return run_tests(context, tree, arguments, START_LIMIT_S + sum(limits_s.values()), limits_s)
