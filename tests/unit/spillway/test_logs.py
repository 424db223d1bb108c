"""What a command changes in its process ends with the command."""

import json
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

import migrations
from db.accounts.token import new_token
from gateway.batches.upload import receive_upload
from gateway.errors import InvalidParameter
from spillway.cli import app
from spillway.cli.context import write_ready
from spillway.logs import configured

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


def test_an_error_that_ends_a_process_is_a_line_of_its_log(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["ledger", "--config", str(tmp_path / "nowhere.toml")])
    line = json.loads(done.stderr)
    assert (line["process"], line["level"]) == ("ledger", "error")
    assert "no such file" in line["event"]
    done = CliRunner().invoke(app, ["usage", "--config", str(tmp_path / "nowhere.toml")])
    assert done.stderr.startswith("error: ")


def test_the_migration_logs_what_it_has_done(tmp_path: Path) -> None:
    env = {"SPILLWAY_DATABASE__URL": f"sqlite:///{tmp_path}/spillway.db"}
    done = CliRunner().invoke(app, ["db", "upgrade", "--data", str(tmp_path)], env=env)
    assert (done.exit_code, done.stdout) == (0, ""), done.output
    line = json.loads(done.stderr)
    assert (line["process"], line["event"]) == ("migrate", f"database schema: none -> {migrations.head()}")


def test_a_ready_file_that_cannot_be_written_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ready"
    path.with_suffix(".draft").symlink_to("/dev/full")
    write_ready(path, {"port": 1})
    assert "No space left on device" in caplog.text
    assert not path.exists()
    path.with_suffix(".draft").unlink()
    write_ready(path, {"port": 1})
    assert json.loads(path.read_text()) == {"port": 1}
    write_ready(path, None)
    assert not path.exists()


@pytest.mark.parametrize("on_terminal", [False, True])
def test_a_key_is_masked_wherever_it_stands_in_a_line(
    on_terminal: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: on_terminal)
    token, other = new_token(), "sk-proj-abcdefghijklmnop0123"
    with configured("gateway"):
        log = logging.getLogger("spillway.test")
        log.warning("refused %s and %s", token, other)
        log.warning("refused", extra={"key": other, "path": f"/{token}"})
        try:
            int(f"no number {token}, {other}")
        except ValueError:
            log.exception("failed")
    text = capfd.readouterr().err
    assert "refused" in text
    assert "ValueError" in text
    assert token not in text
    assert other not in text


async def test_a_form_that_cannot_be_read_is_no_line_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """The client gets the error. The library would log each one, and a client could fill the log."""

    async def form() -> AsyncIterator[bytes]:
        yield b"no form at all"

    with configured("gateway"):
        logging.getLogger("spillway.test").warning("a line of ours")
        with pytest.raises(InvalidParameter):
            await receive_upload(form(), "multipart/form-data; boundary=b", Mock(), max_bytes=1000)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "a line of ours" in lines[0]
