"""A whole Spillway as its users start it: ``spillway up`` in its own folder, on a free port."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from typer.testing import CliRunner

from benchmarks.ports import free_port
from spillway.cli import app
from tests.waiting import HANGS_S


@dataclass
class System:
    """``start`` returns once the banner is printed, that is once a worker serves the model."""

    data_dir: Path
    arguments: list[str]
    host: str = "127.0.0.1"  # as a part of a URL
    port: int = field(default_factory=free_port)
    program: tuple[str, ...] = (sys.executable, "-m", "spillway")
    folder: Path | None = None  # in which it is started; None: this process's own
    output: str = ""
    _process: subprocess.Popen[str] | None = None

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def api_key(self) -> str:
        return (self.data_dir / "api-key").read_text().strip()

    @property
    def model(self) -> str:
        return str(next(iter(json.loads((self.data_dir / "run" / "config.json").read_text())["models"])))

    @property
    def _log_path(self) -> Path:
        return self.data_dir.parent / f"{self.data_dir.name}.out"

    def launch(self) -> None:
        """Start it, and wait for nothing."""
        command = [*self.program, "up", "--port", str(self.port), "--data", str(self.data_dir)]
        log_path = self._log_path
        with log_path.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *self.arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=clean_environment(),
                cwd=self.folder,
            )
        self.output = ""

    def start(self) -> None:
        self.launch()
        assert self._process is not None
        log_path = self._log_path
        deadline = time.monotonic() + HANGS_S
        while "Try it from another terminal" not in self.output or "curl" not in self.output:
            assert self._process.poll() is None, f"`spillway up` ended:\n{log_path.read_text()}"
            assert time.monotonic() < deadline, f"not running in time:\n{log_path.read_text()}\n{self.logs()}"
            time.sleep(0.05)
            self.output = log_path.read_text()

    def printed(self) -> str:
        return self._log_path.read_text()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def wait_for_output(self, text: str) -> None:
        deadline = time.monotonic() + HANGS_S
        while text not in (output := self._log_path.read_text()):
            assert time.monotonic() < deadline, f"it never said {text!r}:\n{output}"
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> int:
        assert self._process is not None
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(how)
        code = self._process.wait(timeout=HANGS_S)
        _, alive = psutil.wait_procs(family, timeout=HANGS_S)
        assert alive == [], f"left behind: {alive}"
        self._process = None
        return code

    def kill_if_running(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop(signal.SIGTERM)

    def children(self, command: str) -> list[psutil.Process]:
        """The processes whose command line holds a word, such as "ledger" or "nats-server"."""
        assert self._process is not None
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if command in " ".join([*process.cmdline(), ""]):
                    found.append(process)
        return found

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}" for path in (self.data_dir / "logs").glob("*.log")
        )

    def command(self, *arguments: str) -> str:
        """Run another ``spillway`` command against this system's data folder; here, where all is imported already."""
        ours = dict.fromkeys(os.environ.keys() - clean_environment().keys())
        done = CliRunner().invoke(app, [*arguments, "--data", str(self.data_dir)], env=ours)
        assert done.exit_code == 0, done.output
        return done.stdout

    def usage(self, by: str = "model") -> list[dict[str, Any]]:
        """Return what is in the ledger now; of an answer that has just ended, perhaps nothing yet."""
        return list(json.loads(self.command("usage", "--by", by, "--format", "json")))

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What is in the ledger's SQLite file now."""
        file = sqlite3.connect(f"file:{self.data_dir / 'spillway.db'}?mode=ro", uri=True)
        with contextlib.closing(file) as database:
            return list(database.execute(query, values))

    def wait_for_requests(self, count: int) -> None:
        """Wait until the ledger has written so many requests."""
        deadline = time.monotonic() + HANGS_S
        while (written := self.rows("SELECT count(*) FROM requests")[0][0]) < count:
            assert time.monotonic() < deadline, f"{written} of {count} requests"
            time.sleep(0.05)

    def wait_for_usage_of(self, key: str) -> dict[str, Any]:
        """The key's only row, once the ledger has written it."""
        deadline = time.monotonic() + HANGS_S
        while not self.rows("SELECT 1 FROM requests WHERE key_name = ?", key):
            assert time.monotonic() < deadline, f"nothing in the ledger from the key {key!r}"
            time.sleep(0.05)
        [row] = [row for row in self.usage("model,key") if row["key_name"] == key]
        return row

    def http(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.base_url, headers={"Authorization": f"Bearer {self.api_key}"}, timeout=HANGS_S
        )


def clean_environment() -> dict[str, str]:
    """Ours, without settings of another Spillway, and with few threads: tests share the machine."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SPILLWAY_")}
    return {**env, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@contextmanager
def run_system(system: System) -> Iterator[System]:
    """Start it, and end it in order."""
    system.start()
    try:
        yield system
        assert system.stop(signal.SIGTERM) == 0
    finally:
        system.kill_if_running()
