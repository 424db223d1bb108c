"""The data folder is for its owner alone: what is closed, and what is refused."""

import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spillway.children import resolved_config_path
from spillway.cli import app
from spillway.data_folder import DataFolderError, open_data_folder, private_umask, write_private


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_for_its_owner(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "data"
    assert open_data_folder(folder) == ""
    assert mode_of(folder) == 0o700
    assert open_data_folder(folder) == ""


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o750, 0o2770])
@pytest.mark.parametrize("content", ["", "run", "spillway.db", "key-pepper"])
def test_a_folder_of_ours_is_closed(tmp_path: Path, mode: int, content: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    if content:
        (folder / content).touch()
    folder.chmod(mode)
    said = open_data_folder(folder)
    assert said == f"closed {folder} to other users (its mode was {mode:04o})"
    assert mode_of(folder) & 0o777 == 0o700


@pytest.mark.parametrize(
    ("mode", "content", "reason"),
    [
        (0o755, "diary", "contains files that Spillway did not create"),
        (0o777, "run", "every user can write"),
        (0o1777, "", "every user can write"),
    ],
)
def test_a_folder_that_others_use_is_refused(tmp_path: Path, mode: int, content: str, reason: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    if content:
        (folder / content).touch()
    folder.chmod(mode)
    with pytest.raises(DataFolderError, match=reason) as caught:
        open_data_folder(folder)
    assert str(folder) in str(caught.value)
    assert mode_of(folder) == mode


def test_a_folder_of_another_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_permitted(_path: Path, _mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    tmp_path.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", not_permitted)
    with pytest.raises(
        DataFolderError, match="its mode cannot be changed: Operation not permitted. Ask its owner to run"
    ):
        open_data_folder(tmp_path)


def test_what_is_made_meanwhile_is_for_its_owner(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with private_umask():
            (tmp_path / "file").touch(0o666)
            (tmp_path / "folder").mkdir()
        (tmp_path / "later").touch(0o666)
    finally:
        os.umask(before)
    assert [mode_of(tmp_path / name) for name in ("file", "folder", "later")] == [0o600, 0o700, 0o644]


def test_a_private_file_replaces_an_open_one(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.touch(0o644)
    write_private(path, "new")
    assert (path.read_text(), mode_of(path)) == ("new", 0o600)


def test_another_users_command_says_whose_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = Path.exists

    def closed(path: Path) -> bool:
        if path == resolved_config_path(tmp_path):
            raise PermissionError(13, "Permission denied")  # Python 3.14 answers False
        return exists(path)

    monkeypatch.setattr(Path, "exists", closed)
    done = CliRunner().invoke(app, ["usage", "--data", str(tmp_path)])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert f"the data folder {tmp_path} belongs to another user" in done.stderr
