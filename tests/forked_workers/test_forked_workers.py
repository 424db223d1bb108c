"""Small suites of their own, whose workers are forked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEAVES_A_LINE = """
from pathlib import Path

with Path(__file__).with_suffix(".imported").open("a") as file:
    file.write("once\\n")

def test_passes():
    pass
"""
FORKS = """
from pathlib import Path

from tests.forks import Process

with Path(__file__).with_suffix(".imported").open("a") as file:
    file.write("once\\n")

def test_a_process(tmp_path):
    process = Process(tmp_path / "log", print, "hello")
    assert process.wait() == 0
    assert process.said("hello")
    process = Process(tmp_path / "log", of_this_module)
    assert process.wait() == 0

def of_this_module():
    pass
"""
FAILS = "def test_fails():\n    assert 1 == 2\n"
CRASHES = "import os\n\ndef test_crashes():\n    os._exit(1)\n"
BROKEN = "import no_such_module\n"
SKIPS = "import pytest\n\npytest.skip('now', allow_module_level=True)\n"
STARTS_A_THREAD = """
import threading

threading.Thread(target=threading.Event().wait, daemon=True, name="left-behind").start()

def test_passes():
    pass
"""
USES_TORCH = """
import os, threading
import torch
import tests.forks

torch.set_num_threads(1)
halves = torch.zeros(200_000, dtype=torch.float16)  # enough to be worth more than one thread

def convert(together, failed):
    together.wait()
    try:
        halves.to(torch.float32)
    except RuntimeError as error:
        failed.append(error)

def use():
    together, failed = threading.Barrier(16), []
    threads = [threading.Thread(target=convert, args=(together, failed)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(len(failed))

for _ in range(40):
    if not (process_id := os.fork()):
        use()
    assert os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]) == 0
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pytest-xdist starts its workers anew")


def run(folder: Path, **files: str) -> tuple[int, str]:
    """Run these files as a suite of two workers. Return pytest's exit code and what it printed."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    plugins = ["-p", "xdist", "-p", "tests.forked_workers.plugin"]
    command = [sys.executable, "-m", "pytest", *plugins, "-n", "2", "--dist", "loadfile", "--import-mode=importlib"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_tests_are_imported_once_and_a_failure_is_explained(tmp_path: Path) -> None:
    code, output = run(tmp_path, first=LEAVES_A_LINE, second=LEAVES_A_LINE, fails=FAILS)
    assert code == 1
    assert "1 failed, 2 passed" in output.splitlines()[-1]
    assert "assert 1 == 2" in output
    imported = [path.read_text() for path in sorted(tmp_path.glob("*.imported"))]
    assert imported == ["once\n", "once\n"]


def test_processes_of_tests_are_forked_from_it_too(tmp_path: Path) -> None:
    code, output = run(tmp_path, forks=FORKS)
    assert code == 0, output
    assert (tmp_path / "test_forks.imported").read_text() == "once\n"


def test_a_worker_that_crashes_is_reported_and_replaced(tmp_path: Path) -> None:
    code, output = run(tmp_path, crashes=CRASHES, passes=LEAVES_A_LINE)
    assert code == 1
    assert "crashed while running 'test_crashes.py::test_crashes'" in output
    assert "1 passed" in output.splitlines()[-1]


def test_files_that_cannot_be_imported_or_skip_themselves_are_reported(tmp_path: Path) -> None:
    code, output = run(tmp_path, broken=BROKEN, skips=SKIPS, passes=LEAVES_A_LINE)
    assert code == 1
    assert "No module named 'no_such_module'" in output
    assert "1 skipped, 1 error" in output.splitlines()[-1]


def test_a_thread_that_a_fork_would_lose_is_named(tmp_path: Path) -> None:
    code, output = run(tmp_path, thread=STARTS_A_THREAD)
    assert code != 0
    assert "left-behind" in output


def test_threads_of_a_forked_process_find_torchs_pool() -> None:
    # A model that was loaded in a forked process failed all tests of a package, in one whole run of many.
    done = subprocess.run([sys.executable, "-c", USES_TORCH], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
