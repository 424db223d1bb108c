"""A pytest plugin that writes down each outcome as it comes, shuffles the tests, and skips those that have one.

The record is a file with one JSON object per line, so that a process that dies loses nothing. Each process appends
``{"began": true}``, ``{"collected": 3}``, for each test ``{"started": "tests/x.py::test_y"}`` and ``{"finished":
"tests/x.py::test_y", "outcome": "passed"}``, and at the end ``{"ended": true}``. The output of a failure goes into the
folder ``failures`` beside the record.
"""

import json
import random
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

LONGEST_NAME = 150  # characters of a file's name


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flakes")
    group.addoption("--record", type=Path, metavar="FILE", help="append outcomes here; skip tests that have one here")
    group.addoption("--order-seed", metavar="SEED", help="shuffle the files, and the tests of each file, by this seed")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("record")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(path))


@pytest.hookimpl(tryfirst=True)  # pytest then puts the tests that share a parameter of a module together again
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("order_seed")
    if seed is not None:
        shuffle(items, seed)


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """Shuffle the files, and the tests of each: a file's tests stay together, and so do its shared fixtures."""
    chance = random.Random(seed)
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    chance.shuffle(files)
    for tests in files:
        chance.shuffle(tests)
    items[:] = [item for tests in files for item in tests]


def read(path: Path) -> list[dict[str, Any]]:
    """Read a record; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines if line]


def outcomes(entries: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Each test that finished, with its outcome."""
    return {entry["finished"]: entry["outcome"] for entry in entries if "finished" in entry}


def write_failure(folder: Path, name: str, report: pytest.TestReport | pytest.CollectReport) -> None:
    """Append what a report says to a file that is named after the test."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [("", report.longreprtext), *report.sections]
    text = "\n".join(f"--- {title} ---\n{content}" if title else content for title, content in parts)
    title = f"=== {report.nodeid} ({report.when}) ===\n"
    with (folder / f"{file_name(report.nodeid)}.{name}.txt").open("a") as file:
        file.write(f"{title}{text}\n\n")


def file_name(nodeid: str) -> str:
    return re.sub(r"[^\w.-]+", "_", nodeid)[-LONGEST_NAME:]


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._done = outcomes(read(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_text() if path.exists() else ""
        path.write_text(whole[: whole.rfind("\n") + 1])  # a line that was cut off would spoil the next
        self._file = path.open("a")
        self._outcome = "passed"  # of the test that runs
        self._write(began=True)

    def _write(self, **entry: Any) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._write(collected=len(items))
        done = [item for item in items if item.nodeid in self._done]
        items[:] = [item for item in items if item.nodeid not in self._done]
        config.hook.pytest_deselected(items=done)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            write_failure(self._path.parent / "failures", self._path.stem, report)
            self._write(finished=report.nodeid, outcome="failed")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcome = "passed"
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            write_failure(self._path.parent / "failures", self._path.stem, report)
        if report.outcome == "failed" or (report.outcome == "skipped" and self._outcome == "passed"):
            self._outcome = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(finished=nodeid, outcome=self._outcome)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus != pytest.ExitCode.INTERRUPTED:
            self._write(ended=True)

    def pytest_unconfigure(self) -> None:
        self._file.close()
