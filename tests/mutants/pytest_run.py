"""Run some tests in a copy of the tree, in a process forked from one that has loaded the large libraries."""

import multiprocessing
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

LIBRARIES = (
    *("aiosqlite", "alembic.command", "alembic.context", "asyncpg", "fastapi", "httpx", "jinja2", "joserfc"),
    *("msgspec", "nats", "numpy", "openai", "prometheus_client", "psutil", "pydantic", "pydantic_settings"),
    *("rich.console", "sqlalchemy.ext.asyncio", "structlog", "tiktoken", "tokenizers", "typer", "uvicorn", "uvloop"),
)
TIMED_OUT, ENDED = -1, -2  # instead of pytest's exit codes, where it could give none


class Outcome(msgspec.Struct):
    """What a run of pytest said."""

    code: int
    seconds: dict[str, float] = {}  # by test, in the order they ran
    failed: dict[str, str] = {}  # test: its error
    not_collected: dict[str, str] = {}

    @property
    def timed_out(self) -> bool:
        """Say whether it, or one of its tests, did not end."""
        return self.code == TIMED_OUT or any("Failed: Timeout" in said for said in self.failed.values())


@dataclass(eq=False)  # pytest keeps its plugins in sets
class _Recorder:
    limits_s: dict[str, float]
    outcome: Outcome = field(default_factory=lambda: Outcome(ENDED))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.nodeid in self.limits_s:
                item.add_marker(pytest.mark.timeout(self.limits_s[item.nodeid]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcome.seconds[report.nodeid] = self.outcome.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.outcome.failed.setdefault(report.nodeid, _error(report.longreprtext))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcome.not_collected[report.nodeid] = _error(report.longreprtext)


def _error(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines() or [""]
    return lines[0].removeprefix("E").strip()[:300]


def start_server(libraries: Iterable[str]) -> Any:
    """Start the process that runs are forked from, with what most tests need and these libraries."""
    context = multiprocessing.get_context("forkserver")
    os.environ |= {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": ""}
    context.set_forkserver_preload([*LIBRARIES, *libraries])
    return context


def run_tests(
    context: Any, tree: Path, arguments: list[str], limit_s: float, limits_s: dict[str, float] | None = None
) -> Outcome:
    """Run pytest with these arguments there; ``limits_s`` are those of single tests."""
    told = tree / "outcome.json"
    told.unlink(missing_ok=True)
    process = context.Process(target=_run, args=(tree, arguments, limits_s or {}))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        ours = psutil.Process(process.pid)
        for one in [*ours.children(recursive=True), ours]:
            one.kill()
        process.join()
        return Outcome(TIMED_OUT)
    return msgspec.json.decode(told.read_bytes(), type=Outcome) if told.exists() else Outcome(ENDED)


def _run(tree: Path, arguments: list[str], limits_s: dict[str, float]) -> None:
    """Become pytest: this package, which is not the copy's, is forgotten."""
    os.setsid()
    origin = str(Path.cwd())
    os.chdir(tree)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"PYTHONPATH": str(tree), "SPILLWAY_TESTS_COMPILED": str(tree / "compiled")}
    os.environ["PATH"] = f"{tree / 'tests/compiler'}:{os.environ['PATH']}"
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in {"", origin})]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    recorder = _Recorder(limits_s)
    recorder.outcome.code = int(pytest.main(arguments, plugins=[recorder]))
    Path("outcome.json").write_bytes(msgspec.json.encode(recorder.outcome))
    sys.stdout.flush()
    os._exit(0)
