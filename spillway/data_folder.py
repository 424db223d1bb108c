"""The data folder of ``spillway up``: it holds prompts, answers and secrets, so that only its owner may read it."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from db.accounts.token import PEPPER_FILE
from protocol.errors import ExpectedError

OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
# One of these is in every folder that a command of ours has used: such a folder is ours to close.
OUR_NAMES: Final = ("run", "spillway.db", PEPPER_FILE)


class DataFolderError(ExpectedError):
    """The data folder cannot be used; the message says why and what to do."""


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Let what this process and its children create be for their user alone (umask 077)."""
    before = os.umask(OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def open_data_folder(folder: Path) -> str:
    """Create the folder if it is missing, and close it to other users; return what was changed, empty for nothing.

    A closed folder protects all files below it, whatever their modes. A folder of ours that is open is closed, because
    earlier releases left it so. One that others may write to, or that holds other things than ours, such as a home
    folder, is refused: what others have put there cannot be trusted, and closing it may break what else uses it.

    Raises DataFolderError.
    """
    try:
        folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & OTHERS:
            return ""
        _check_may_be_closed(folder, mode)
    except OSError as error:
        raise DataFolderError(
            f"cannot write to the data folder {folder}: {error.strerror}; choose another one with --data"
        ) from error
    try:
        folder.chmod(mode & ~OTHERS)
    except OSError as error:
        raise DataFolderError(
            f"other users can open the data folder {folder} (mode {mode:04o}), and closing it failed: "
            f"{error.strerror}; let its owner run `chmod 700 {folder}`, or choose another one with --data"
        ) from error
    return f"closed {folder} to other users (its mode was {mode:04o})"


def _check_may_be_closed(folder: Path, mode: int) -> None:
    if mode & stat.S_IWOTH:
        raise DataFolderError(
            f"every user can write to the data folder {folder} (mode {mode:04o}); choose another one with --data"
        )
    names = {entry.name for entry in folder.iterdir()}
    if names and not names.intersection(OUR_NAMES):
        raise DataFolderError(
            f"other users can open the data folder {folder} (mode {mode:04o}), and it holds files that are not "
            f"Spillway's; run `chmod 700 {folder}`, or choose an empty one with --data"
        )


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read, replacing an existing one."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
