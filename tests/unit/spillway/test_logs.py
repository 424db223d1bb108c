"""What a command changes in its process ends with the command."""

import logging
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spillway.cli import app

SWITCHES = ("logThreads", "logProcesses", "logMultiprocessing", "_srcfile")


def process_state() -> dict[str, object]:
    loggers = (logging.getLogger(name) for name in ("root", "httpx", "alembic"))
    return {
        "handlers": list(logging.getLogger().handlers),
        "levels": [logger.level for logger in loggers],
        "switches": [getattr(logging, name) for name in SWITCHES],
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
    }


@pytest.mark.parametrize(
    "command", [["up"], ["gateway"], ["worker", "--pool", "p"], ["ledger"], ["fleet", "run"]], ids=lambda args: args[0]
)
def test_nothing_that_a_command_sets_up_outlives_it(command: list[str], tmp_path: Path) -> None:
    """A handler that did wrote to the stream of a command that was over."""
    before = process_state()
    done = CliRunner().invoke(app, [*command, "--config", str(tmp_path / "nowhere.toml")])
    assert done.exit_code == 1
    assert "no such file" in done.stderr
    assert process_state() == before
