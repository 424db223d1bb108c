"""What the steps of ``make compose`` share: the project, the API key, the log of the step, and how a page is run."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from tests.compose.docker import BUILD_ARGS_VARIABLE, CommandFailed, Project, call, remove_labelled
from tests.compose.pages import Page

LABEL: Final = "spillway.tests.compose"  # of containers that are no services
WAIT_LIMIT_S: Final = 600.0
POLL_S: Final = 0.5
REQUEST_LIMIT_S: Final = 300.0


class Skipped(Exception):
    """A step cannot be run here; the text says why."""


class Rig:
    """One run in a folder."""

    def __init__(self, folder: Path) -> None:
        self.name = f"spillway-test-{os.getpid()}"
        self.logs = folder.resolve() / f"{self.name}-logs"
        self.project = Project(folder.resolve() / self.name, self.name)
        self.key = ""
        self.password = ""
        self.log = self.logs / "none.log"

    def begin(self, number: int, name: str) -> None:
        """Open the log of a step."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.log = self.logs / f"{number:02}-{name}.log"
        self.log.touch()

    def ours(self) -> dict[str, str]:
        """Return what is replaced in every command: addresses, and building where this site needs further arguments."""
        found = {
            "http://127.0.0.1:8000": f"http://127.0.0.1:{self.project.port}",
            "http://127.0.0.1:8001": f"http://127.0.0.1:{self.project.pages_port}",
        }
        if os.environ.get(BUILD_ARGS_VARIABLE):
            found |= {"up --build": "up --no-build", "docker compose build": ": # built by tests.compose"}
        return found

    def page(self, page: Page, heading: str, block: int = 0, ours: Mapping[str, str] | None = None) -> str:
        """Say and run a block of commands of a page; return their stdout. ``KEY`` is kept from block to block."""
        for line in page.script(heading, block, {}).splitlines():
            say(f"    + {line}")
        script = page.script(heading, block, {**self.ours(), **(ours or {})})
        kept = self.logs / "key"
        out = self.project.run(f"KEY='{self.key}'\n{script}\nprintf %s \"$KEY\" >'{kept}'", self.log)
        self.key = kept.read_text()
        return out

    def compose(self, *words: str) -> str:
        """Run ``docker compose``."""
        return self.project.compose(*words, log=self.log)

    def container_ids(self) -> dict[str, str]:
        """Return container to id, of all services."""
        lines = self.compose("ps", "--all", "--format", "{{.Name}} {{.ID}}").splitlines()
        return dict(line.split() for line in lines)

    def ask(self, model: str, key: str | None = None) -> httpx.Response:
        """Ask for a short answer, not streamed, through the load balancer."""
        return httpx.post(
            f"http://127.0.0.1:{self.project.port}/v1/chat/completions",
            headers={"Authorization": f"Bearer {self.key if key is None else key}"},
            json={"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "What is a spillway?"}]},
            timeout=REQUEST_LIMIT_S,
        )

    def run_beside(self, name: str, *words: str) -> None:
        """Start a container that is no service, and that goes with the run."""
        call("docker", "run", "--detach", "--name", f"{self.name}-{name}", "--label", f"{LABEL}={self.name}", *words)

    def keep_logs(self) -> None:
        """Write what all containers said, and how they are, into the folder of logs."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for name in call("docker", "ps", "--all", "--format", "{{.Names}}").split():
            if name.startswith(self.name):
                with (self.logs / f"container-{name}.log").open("w") as output:
                    subprocess.run(["docker", "logs", name], stdout=output, stderr=output, check=False)
                    subprocess.run(["docker", "inspect", name], stdout=output, stderr=output, check=False)

    def remove_beside(self) -> None:
        """Remove the containers that are no services, and their volumes."""
        remove_labelled(f"{LABEL}={self.name}")

    def remove(self) -> None:
        """Remove all that was started, and the copy of the checkout."""
        self.remove_beside()
        self.project.down()
        with contextlib.suppress(FileNotFoundError):
            call("rm", "-r", str(self.project.folder))


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def eventually(condition: Callable[[], Any], what: str) -> Any:
    """Wait until a condition returns something true, and return it."""
    deadline_s = time.monotonic() + WAIT_LIMIT_S
    while True:
        problem = ""
        try:
            found = condition()
        except (CommandFailed, httpx.HTTPError) as error:
            found, problem = None, f": {error}"
        if found:
            return found
        assert time.monotonic() < deadline_s, f"{what} within {WAIT_LIMIT_S:.0f} s{problem}"
        time.sleep(POLL_S)
