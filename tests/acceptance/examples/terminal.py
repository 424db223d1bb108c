"""A shell that a reader of a page types the page's commands into."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Self

from tests.acceptance.system import clean_environment
from tests.waiting import HANGS_S, LONGEST_POLL_S

STARTED = "Try it from another terminal"


class Terminal:
    """One bash, which ends at the first command that fails. A context manager."""

    def __init__(self, folder: Path, log: Path, variables: Mapping[str, str]) -> None:
        """``folder``: the working directory; ``log``: gets all output; ``variables``: added to the environment."""
        self._log = log
        self._blocks = count()
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**clean_environment(), "PATH": programs, **variables}
        with log.open("w") as output:
            self._shell = subprocess.Popen(
                ["bash", "-eu"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        """End the shell and all processes that its commands have left running."""
        self._close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._shell.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._shell.wait(HANGS_S)

    def type(self, commands: str) -> None:
        """Enter commands, and wait for nothing."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(commands)
        self._shell.stdin.flush()

    def run(self, commands: str) -> str:
        """Enter commands, and return their output once all of them have succeeded."""
        before = len(self.output())
        end = f"end of block {next(self._blocks)} of {self._shell.pid}"
        self.type(f"{commands}\necho '{end}'\n")
        self.wait_for(f"{end}\n")
        return self.output()[before:].replace(f"{end}\n", "")

    def wait_for(self, text: str) -> None:
        """Wait until the output has a text. Fails if the shell ends first, or prints nothing for ``HANGS_S``."""
        printed, deadline_s = "", time.monotonic() + HANGS_S
        while text not in printed:
            before, has_ended = printed, self._shell.poll() is not None
            printed = self.output()
            assert not has_ended or text in printed, f"a command failed:\n{printed}"
            if printed != before:
                deadline_s = time.monotonic() + HANGS_S
            assert time.monotonic() < deadline_s, f"it never said {text!r}:\n{printed}"
            time.sleep(LONGEST_POLL_S)

    def press_ctrl_c(self) -> None:
        """Interrupt what runs in the foreground, and wait for its end, which must be in order."""
        os.killpg(self._shell.pid, signal.SIGINT)
        self._close()
        assert self._shell.wait(HANGS_S) == 0, self.output()

    def output(self) -> str:
        """Everything that was printed so far."""
        return self._log.read_text()

    def _close(self) -> None:
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.close()
