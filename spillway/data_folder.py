"""The data folder of ``spillway up``. It holds prompts, answers and secrets, so only its owner may read it."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from db.accounts.token import PEPPER_FILE
from protocol.errors import ExpectedError

OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
# Every data folder contains at least one of these. Only such a folder is closed to other users.
OUR_NAMES: Final = ("run", "spillway.db", PEPPER_FILE)


class DataFolderError(ExpectedError):
    """The data folder cannot be used; the message says why and what to do."""


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """Set umask 077: files that this process and its children create are private."""
    before = os.umask(OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def open_data_folder(folder: Path) -> str:
    """Create the folder if it is missing, and close it to other users; return a message, empty if nothing changed.

    A closed folder protects all files below it, regardless of their modes. An open data folder is closed: earlier
    releases left it open. A folder that other users can write to is rejected, because its content cannot be trusted. So
    is a folder with other files, such as a home folder, because closing it may break other programs.

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
            f"cannot write to the data folder {folder}: {error.strerror}. Choose another folder with --data"
        ) from error
    try:
        folder.chmod(mode & ~OTHERS)
    except OSError as error:
        raise DataFolderError(
            f"other users can open the data folder {folder} (mode {mode:04o}), and its mode cannot be changed: "
            f"{error.strerror}. Ask its owner to run `chmod 700 {folder}`, or choose another folder with --data"
        ) from error
    return f"closed {folder} to other users (its mode was {mode:04o})"


def _check_may_be_closed(folder: Path, mode: int) -> None:
    if mode & stat.S_IWOTH:
        raise DataFolderError(
            f"every user can write to the data folder {folder} (mode {mode:04o}). Choose another folder with --data"
        )
    names = {entry.name for entry in folder.iterdir()}
    if names and not names.intersection(OUR_NAMES):
        raise DataFolderError(
            f"other users can open the data folder {folder} (mode {mode:04o}), and it contains files that Spillway did "
            f"not create. Run `chmod 700 {folder}`, or choose an empty folder with --data"
        )


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read, replacing an existing one."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
