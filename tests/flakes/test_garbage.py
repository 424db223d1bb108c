"""What a test leaves open fails a test of its own file (tests/conftest.py), not one that happens to run later."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A cycle: only a collection of garbage finds it.
LEAKS = """
import socket

class Holder:
    pass

def test_leaks():
    holder = Holder()
    holder.itself, holder.socket = holder, socket.socket()

def test_that_is_the_last_of_the_file():
    pass
"""


def test_a_leak_fails_the_file_that_leaves_it(tmp_path: Path) -> None:
    (tmp_path / "test_a_leaks.py").write_text(LEAKS)
    (tmp_path / "test_b_innocent.py").write_text("def test_innocent():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", "pyproject.toml", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_a_leaks.py::test_that_is_the_last_of_the_file" in done.stdout.split("short test summary")[1]
    assert "ResourceWarning: unclosed <socket" in done.stdout
    assert "3 passed, 1 error" in done.stdout.splitlines()[-1]
