"""The server's process: its log, its last lines, its environment, and how often it may crash."""

import asyncio
import logging
import shlex
import signal
import subprocess
import sys

import pytest

from pool_worker.engines.base import EngineDiedError
from pool_worker.engines.sidecar import keeper
from pool_worker.engines.sidecar.process import LOG_BURST_S, LOG_LINE_BYTES, LOG_LINES_PER_S, LogLines, ServerProcess


async def run(code: str) -> EngineDiedError:
    process = ServerProcess(shlex.join([sys.executable, "-S", "-c", code]), stop_limit_s=1.0)
    await process.start()
    try:
        return await process.wait()
    finally:
        await process.stop()


def log_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().removeprefix("server: ") for record in caplog.records if record.msg == "server: %s"]


async def test_a_line_of_100_megabytes_is_cut_and_the_next_is_complete(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    code = "import sys\nfor _ in range(100): sys.stdout.write('x' * 1_000_000)\nprint('\\nthe reason'); sys.exit(4)"
    death = await run(code)
    assert "exit code 4" in str(death)
    assert str(death).endswith("the reason")
    assert len(str(death)) < 1000
    long, reason = log_lines(caplog)
    assert long == "x" * LOG_LINE_BYTES + " … (cut)"
    assert reason == "the reason"


async def test_a_flood_of_lines_is_dropped_from_the_log_but_kept_in_the_last_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    death = await run("for n in range(100_000): print('line', n)")
    assert str(death).endswith("line 99999")
    assert LOG_BURST_S * LOG_LINES_PER_S <= len(log_lines(caplog)) < 10_000


async def test_dropped_lines_are_counted_afterwards(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now_s = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s, raising=False)
    lines, stream = LogLines(), asyncio.StreamReader()
    allowed = LOG_BURST_S * LOG_LINES_PER_S
    stream.feed_data(b"again\n" * (allowed + 7))
    stream.feed_eof()
    await lines.copy(stream)
    assert len(log_lines(caplog)) == allowed
    now_s, stream = 1.0, asyncio.StreamReader()
    stream.feed_data(b"after\n\nthe last has no end")
    stream.feed_eof()
    await lines.copy(stream)
    assert log_lines(caplog)[allowed:] == ["after", "the last has no end"]
    assert any(record.getMessage().startswith("dropped 7 lines") for record in caplog.records)


async def test_the_server_gets_its_port_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_NATS__URLS", '["tls://user:secret@queue"]')
    monkeypatch.setenv("HF_TOKEN", "needed")
    code = (
        "import os; ours = [name for name in os.environ if name.startswith('SPILL')]"
        "; print(ours, os.environ['HF_TOKEN'], os.environ['PORT'] == '{port}')"
    )
    assert str(await run(code)).endswith("[] needed True")


async def test_a_missing_program_is_reported() -> None:
    process = ServerProcess("no-such-server --port 1", stop_limit_s=1.0)
    await process.start()
    assert "no-such-server: No such file or directory" in str(await process.wait())
    await process.stop()


async def test_stopping_before_starting() -> None:
    await ServerProcess("no-such-server", stop_limit_s=1.0).stop()


async def test_a_hanging_keeper_is_killed() -> None:
    command = shlex.join([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    process = ServerProcess(command, stop_limit_s=0.0, keeper_margin_s=0.1)
    await process.start()
    await process.stop()
    assert "the server ended with" in str(await process.wait())


def test_a_server_ends_if_its_keeper_died_before_prctl() -> None:
    """The kernel ends it with its keeper only after prctl, and the keeper may be killed before."""
    no_process = 2**22 + 1  # greater than any process id
    code = f"from {keeper.__name__} import _reset_signals as tie; tie({{}}); print('lives')"
    for whose, outcome in (("__import__('os').getppid()", (0, b"lives\n")), (no_process, (-signal.SIGKILL, b""))):
        ended = subprocess.run([sys.executable, "-c", code.format(whose)], capture_output=True, check=False)
        assert (ended.returncode, ended.stdout) == outcome
