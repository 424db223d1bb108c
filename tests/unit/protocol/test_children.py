"""Child processes: stopping them, describing their end, and bounded restarts."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest

from protocol.process import Restarts, ending, stop_process, write_to
from tests.waiting import HANGS_S, until


@pytest.mark.parametrize(
    ("code", "said"),
    [(0, "exit code 0"), (3, "exit code 3"), (-11, "signal SIGSEGV"), (-9, "signal SIGKILL"), (-40, "signal 40")],
)
def test_an_end_is_described_by_exit_code_or_signal(code: int, said: str) -> None:
    assert ending(code) == said


async def start(code: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-c", code), stdout=asyncio.subprocess.PIPE, env={}
    )


async def first_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("ignored", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN); "])
async def test_a_process_ends_by_its_signal_or_is_killed(ignored: str) -> None:
    process = await start(f"import signal, time; {ignored}print('started', flush=True); time.sleep(600)")
    assert await first_line(process) == "started"
    await stop_process(process, "it", 0.1 if ignored else HANGS_S)
    assert await process.wait() == (-signal.SIGKILL if ignored else -signal.SIGTERM)
    await stop_process(process, "it", HANGS_S)  # again


async def test_the_wait_for_a_killed_process_is_bounded_if_another_holds_its_output(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: asyncio also waits for the end of pipes, so a worker hung until the other process ended."""
    process = await start(
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(600)"
    )
    child = int(await first_line(process))
    try:
        async with asyncio.timeout(HANGS_S):
            await stop_process(process, "it", 0.1, killed_limit_s=0.1)
        await until(lambda: process.returncode is not None)  # may exceed the limit on a loaded machine
        assert process.returncode == -signal.SIGKILL
        assert "did not end within 0.1 s: killing it" in caplog.text
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        assert process.stdout is not None
        await process.stdout.read()  # until its end, which closes the pipe


async def test_writing_to_a_process_that_has_closed_its_input_is_a_connection_error() -> None:
    """Regression: it was a RuntimeError on uvloop once the loop had noticed."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-S", "-c", "", stdin=asyncio.subprocess.PIPE)
    pipe = process.stdin
    assert pipe is not None
    await process.wait()
    await until(pipe.is_closing)
    with pytest.raises(ConnectionError):
        await write_to(pipe, b"too late")


def test_deaths_are_counted_within_a_window() -> None:
    now_s = 0.0
    restarts = Restarts(2, 60.0, 0.5, lambda: now_s)
    assert [restarts.wait_s(), restarts.wait_s(), restarts.wait_s()] == [0.5, 1.0, None]
    now_s = 60.0
    assert restarts.wait_s() == 0.5  # starts again at the first wait
    assert Restarts(0, 60.0, 0.5).wait_s() is None


def test_the_wait_before_a_restart_has_a_limit() -> None:
    restarts = Restarts(20, 1800.0, 0.5, lambda: 0.0)
    assert max(restarts.wait_s() or 0.0 for _ in range(20)) == 60.0
