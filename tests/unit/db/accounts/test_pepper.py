import subprocess
import sys
from pathlib import Path

import pytest

from db.accounts.errors import PepperError
from db.accounts.token import PEPPER_FILE, load_or_create_pepper
from tests.waiting import HANGS_S

PRINT_PEPPER = (
    "import sys, pathlib; from db.accounts.token import load_or_create_pepper;"
    "print(load_or_create_pepper(pathlib.Path(sys.argv[1])).get_secret_value())"
)


def test_a_pepper_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    first = load_or_create_pepper(data_dir)
    assert load_or_create_pepper(data_dir) == first
    assert len(bytes.fromhex(first.get_secret_value())) == 32
    assert (data_dir / PEPPER_FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in data_dir.iterdir()] == [PEPPER_FILE]
    assert load_or_create_pepper(tmp_path / "other") != first


def test_processes_that_start_at_once_get_the_same_pepper(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PRINT_PEPPER, str(tmp_path / "data")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = {process.communicate(timeout=HANGS_S)[0] for process in processes}
    assert len(printed) == 1
    assert len(printed.pop().strip()) == 64


@pytest.mark.parametrize("content", ["", "abc\n"])
def test_a_spoilt_pepper_is_an_error_and_is_not_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / PEPPER_FILE).write_text(content)
    with pytest.raises(PepperError, match=PEPPER_FILE):
        load_or_create_pepper(tmp_path)
    assert (tmp_path / PEPPER_FILE).read_text() == content


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PepperError, match="cannot read or create"):
        load_or_create_pepper(tmp_path / "file" / "data")
