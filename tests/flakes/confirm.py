"""A pytest plugin that repeats failed tests once, alone and in order, before it reports them.

A test that fails again is red. One that passes is *flaky*: the run passes, and its last lines name the test and the
folder with both outputs. What cannot be repeated is red at once: errors of collection, a process that crashed, an
interrupted run, and more failures than chance explains.
"""

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import pytest

from tests.flakes import record

MOST_REPEATED = 20  # failed tests; more are no chance
FOLDER = Path("build/flaky")  # below pytest's root
FIRST, REPEATED = "first", "repeated"  # the names of the outputs


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Confirmation())


class _Confirmation:
    def __init__(self) -> None:
        self._failed: dict[str, list[pytest.TestReport]] = {}  # test → its failures, in the order they came
        self._final = False  # something failed that cannot be repeated
        self._last_lines: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._final |= report.failed

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self) -> None:
        self._final = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(trylast=True)  # once pytest-xdist has ended its processes
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or self._final or not self._failed:
            return
        if len(self._failed) > MOST_REPEATED:
            self._last_lines.append(f"{len(self._failed)} tests failed: too many to repeat, so all of them count")
            return
        try:
            self._repeat(session)
        except KeyboardInterrupt:
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    def _repeat(self, session: pytest.Session) -> None:
        terminal = cast("pytest.TerminalReporter", session.config.pluginmanager.get_plugin("terminalreporter"))
        folder = session.config.rootpath / FOLDER / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        for report in (report for reports in self._failed.values() for report in reports):
            record.write_failure(folder, FIRST, report)
        terminal.write_sep("=", f"repeating alone what failed ({len(self._failed)}); both outputs: {folder}")
        flaky = _repeated(session.config, list(self._failed), folder)
        for category in ("failed", "error"):
            failed = terminal.stats.pop(category, [])
            for report in failed:
                terminal.stats.setdefault("flaky" if report.nodeid in flaky else category, []).append(report)
        again = [nodeid for nodeid in self._failed if nodeid not in flaky]
        self._last_lines += [f"FAILED again when repeated alone: {nodeid}" for nodeid in again]
        self._last_lines += [f"FLAKY, it passed when repeated alone: {nodeid}" for nodeid in flaky]
        self._last_lines.append(f"both outputs of each: {folder}")
        if not again:
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._last_lines:
            terminalreporter.section("failures repeated")
        for line in self._last_lines:
            terminalreporter.write_line(line)


def _repeated(config: pytest.Config, nodeids: list[str], folder: Path) -> list[str]:
    """Run the tests again in one process, with the same options. Return those that passed in every phase."""
    options = [argument for argument in config.invocation_params.args if argument not in config.args]
    path = folder / f"{REPEATED}.jsonl"
    command = [sys.executable, "-m", "pytest", *options, "-p", f"no:{__name__}", "-p", record.__name__]
    command += ["-n", "0", "-rA", "--record", str(path), *nodeids]
    with (folder / f"{REPEATED}.txt").open("w") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, cwd=config.rootpath, check=False)
    entries = record.read(path)
    ended = {"ended": True} in entries
    return [nodeid for nodeid in nodeids if ended and record.outcomes(entries).get(nodeid) == "passed"]
