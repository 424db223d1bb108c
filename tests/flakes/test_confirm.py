"""What `make test` says of failures: each case is a small suite of its own, run as `make test` runs ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PASSES = "def test_passes():\n    pass\n"
FAILS_ONCE = """
from pathlib import Path

def test_fails_once():
    mark = Path(__file__).with_suffix(".mark")
    first = not mark.exists()
    mark.touch()
    print("first time" if first else "second time")
    assert not first
"""
FAILS = "def test_fails():\n    assert 1 == 2\n"
TEARDOWN_FAILS_ONCE = """
import pytest
from pathlib import Path

@pytest.fixture
def closed():
    yield
    mark = Path(__file__).with_suffix(".mark")
    first = not mark.exists()
    mark.touch()
    assert not first

def test_teardown(closed):
    pass
"""
CRASHES = "import os\n\ndef test_crashes():\n    os._exit(1)\n"
BROKEN = "import no_such_module\n"
INTERRUPTED = "def test_interrupted():\n    raise KeyboardInterrupt\n"
SKIPS_LATER = FAILS_ONCE + "    import pytest\n    pytest.skip('now')\n"


def run(folder: Path, *arguments: str, **files: str) -> tuple[int, str]:
    """Run these files as a suite. Return pytest's exit code and what it printed."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.flakes.confirm", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def kept(folder: Path) -> str:
    """All outputs that the run kept."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("build/flaky/*/*.txt")))


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_failure_that_does_not_come_back_is_named_and_the_run_passes(tmp_path: Path, processes: str) -> None:
    code, output = run(tmp_path, "-n", processes, once=FAILS_ONCE, passes=PASSES)
    assert code == 0, output
    assert "FLAKY, it passed when repeated alone: test_once.py::test_fails_once" in output
    assert "1 passed, 1 flaky" in output.splitlines()[-1]
    assert "first time" in kept(tmp_path)
    assert "second time" in kept(tmp_path)
    assert str(next((tmp_path / "build/flaky").iterdir())) in output


def test_a_failure_that_comes_back_fails_the_run_and_the_flaky_one_beside_it_is_named(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-n", "0", once=FAILS_ONCE, fails=FAILS, passes=PASSES)
    assert code == 1, output
    assert "FAILED again when repeated alone: test_fails.py::test_fails" in output
    assert "FLAKY, it passed when repeated alone: test_once.py::test_fails_once" in output
    assert "1 failed, 1 passed, 1 flaky" in output.splitlines()[-1]
    assert "assert 1 == 2" in output


def test_a_failed_teardown_is_repeated_too(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-n", "0", teardown=TEARDOWN_FAILS_ONCE)
    assert code == 0, output
    assert "FLAKY, it passed when repeated alone: test_teardown.py::test_teardown" in output


def test_a_test_that_is_skipped_when_repeated_is_no_pass(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-n", "0", skips=SKIPS_LATER)
    assert code == 1, output
    assert "FAILED again" in output


@pytest.mark.parametrize("fault", [CRASHES, BROKEN, INTERRUPTED], ids=["crash", "collection", "interrupted"])
def test_what_cannot_be_repeated_is_red_at_once(tmp_path: Path, fault: str) -> None:
    code, output = run(tmp_path, "-n", "1", once=FAILS_ONCE, other=fault)
    assert code != 0, output
    assert kept(tmp_path) == ""


def test_more_failures_than_chance_explains_are_not_repeated(tmp_path: Path) -> None:
    many = "\n".join(f"def test_{n}():\n    assert False\n" for n in range(21))
    code, output = run(tmp_path, "-n", "0", many=many, once=FAILS_ONCE)
    assert code == 1, output
    assert "22 tests failed: too many to repeat" in output
    assert kept(tmp_path) == ""


def test_options_hold_for_the_repetition(tmp_path: Path) -> None:
    option = FAILS_ONCE.replace("():", "(pytestconfig):") + "    assert pytestconfig.option.keyword == 'once'\n"
    code, output = run(tmp_path, "-n", "0", "-k", "once", once=option, passes=PASSES)
    assert code == 0, output
    assert "1 deselected, 1 flaky" in output.splitlines()[-1]


def test_a_run_that_passes_keeps_nothing(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-n", "0", passes=PASSES)
    assert code == 0, output
    assert "1 passed" in output.splitlines()[-1]
    assert not (tmp_path / "build").exists()
