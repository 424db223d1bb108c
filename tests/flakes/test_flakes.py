"""The search for flaky tests, on small suites of its own."""

import asyncio
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.flakes import pauses, record
from tests.flakes.burner import Burner

ROOT = Path(__file__).parents[2]

FAILS_EVERY_OTHER_TIME = """
from pathlib import Path

def test_every_other():
    path = Path(__file__).with_suffix(".count")
    count = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(count))
    assert count % 2
"""
PASSES = "\n".join(f"def test_{n}():\n    pass\n" for n in range(10))
CRASHES_ONCE = """
import os
from pathlib import Path

def test_crash():
    path = Path(__file__).with_suffix(".mark")
    if not path.exists():
        path.touch()
        os._exit(1)
"""
CALLS_PAUSE = """
from tests.flakes.pauses import CALLS

def test_every_call():
    assert all(hasattr(getattr(owner, name), "__wrapped__") for owner, name, _ in CALLS)
"""


class Item(NamedTuple):
    path: Path
    number: int


def command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    line = [sys.executable, "-m", "tests.flakes", "--folder", "found", "--load", "0", "--processes", "1", *arguments]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p xdist",
    }
    return subprocess.Popen(
        line, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def search(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the command in a folder with a suite. Return its exit code and what it printed."""
    with command(folder, *arguments) as process:
        output = process.communicate()[0]
        return process.returncode, output


def test_every_test_that_ever_failed_is_listed_with_how_often_and_its_outputs(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(FAILS_EVERY_OTHER_TIME)
    (tmp_path / "test_passes.py").write_text(PASSES)
    code, output = search(tmp_path, "--times", "4")
    assert code == 1, output
    assert "failed 2 of 4: test_other.py::test_every_other" in output
    assert "11 tests ran 44 times; 1 ever failed" in output
    kept = [path.read_text() for path in (tmp_path / "found/failures").iterdir()]
    assert len(kept) == 2
    assert all("assert (2 % 2)" in text or "assert (4 % 2)" in text for text in kept)


def test_a_test_that_kills_its_process_is_listed_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text(CRASHES_ONCE)
    (tmp_path / "test_passes.py").write_text(PASSES)
    code, output = search(tmp_path, "--times", "2")
    assert code == 1, output
    assert "failed 1 of 2: test_crash.py::test_crash" in output
    assert "11 tests ran 22 times" in output


def test_an_error_of_collection_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    (tmp_path / "test_passes.py").write_text(PASSES)
    code, output = search(tmp_path, "--times", "1")
    assert code == 1, output
    assert "failed 1 of 1: test_broken.py" in output
    assert "11 tests ran 11 times" in output


def test_a_search_of_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_passes.py").write_text(PASSES)
    code, output = search(tmp_path, "--times", "1", "test_passes.py", "test_misspelt.py")
    assert code == 5, output
    assert "no test ran; pytest says why in found/run-1.txt" in output


def test_a_search_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    (tmp_path / "test_waits.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def test_waits():\n"
        "    if not Path('go').exists():\n"
        "        Path('waiting').touch()\n"
        "        try:\n"
        "            time.sleep(600)\n"
        "        except KeyboardInterrupt:\n"
        "            raise AssertionError('it was interrupted') from None\n"
    )
    (tmp_path / "test_other.py").write_text(FAILS_EVERY_OTHER_TIME)
    with command(tmp_path, "--times", "2") as process:
        while not (tmp_path / "waiting").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        output = process.communicate()[0]
    assert process.returncode == 130, output
    assert "continue with" in output
    (tmp_path / "go").touch()
    code, output = search(tmp_path, "--times", "2")
    assert code == 1, output
    assert "failed 1 of 2: test_other.py::test_every_other" in output
    assert "2 tests ran 4 times; 1 ever failed" in output
    code, output = search(tmp_path, "test_other.py", "--times", "2")
    assert code == 2, output
    assert "has a plan of its own" in output


def test_files_stay_together_and_the_seed_decides_the_order() -> None:
    def shuffled(seed: str) -> list[tuple[Path, int]]:
        items = [Item(Path(name), number) for name in "abcdefgh" for number in range(10)]
        record.shuffle(items, seed)  # type: ignore[arg-type]
        return [(item.path, item.number) for item in items]

    order = shuffled("1")
    assert len(set(order)) == 80
    files = [path for path, _ in itertools.groupby(order, key=lambda item: item[0])]
    assert sorted(files) == sorted(set(files))
    assert order == shuffled("1") != shuffled("2")
    assert [number for _, number in order[:10]] != list(range(10))


def test_busy_processes_make_up_for_what_is_missing() -> None:
    others = 3.0
    burner = Burner(5, look=lambda: others + len(burner))
    try:
        burner.adjust(sample_s=0)
        assert len(burner) == 2
        others = 0.0
        burner.adjust(sample_s=0)
        assert len(burner) == 5
        others = 9.0
        burner.adjust(sample_s=0)
        assert len(burner) == 0
    finally:
        burner.close()


def test_without_a_look_at_the_machine_all_are_busy() -> None:
    burner = Burner(2, look=lambda: None)
    try:
        burner.adjust(sample_s=0)
        assert len(burner) == 2
    finally:
        burner.close()


def test_a_record_whose_last_line_was_cut_off_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run-1.jsonl"
    path.write_text('{"finished": "a", "outcome": "passed"}\n{"finished": "b", "outc')
    assert record.outcomes(record.read(path)) == {"a": "passed"}


def test_its_pauses_are_around_every_call_and_let_others_come_first(tmp_path: Path) -> None:
    (tmp_path / "test_calls.py").write_text(CALLS_PAUSE)
    code, output = search(tmp_path, "test_calls.py", "--times", "1", "--", "-p", "tests.flakes.pauses")
    assert code == 0, output
    said: list[int] = []

    async def say(number: int) -> None:
        said.append(number)

    async def say_all() -> None:
        await asyncio.gather(*map(pauses.pausing(say, pauses.PAUSED), range(200)))

    asyncio.run(say_all())
    assert said != sorted(said) == list(range(200))
