"""File storage in a local or NFS folder."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Final, TypeVar

from gateway.batches.storage.base import CHUNK_BYTES, StorageError, Writer

UNFINISHED: Final = ".part"  # suffix of unfinished files
_File = TypeVar("_File", BufferedReader, BufferedWriter)


class _LocalWriter:
    def __init__(self, file: BufferedWriter) -> None:
        self._file = file

    async def write(self, data: bytes) -> None:
        try:
            await asyncio.to_thread(self._file.write, data)
        except OSError as error:
            raise StorageError(f"cannot write {self._file.name}: {error.strerror}") from error


class LocalStorage:
    """``Storage`` in a folder. Uses threads, as disks block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @asynccontextmanager
    async def writing(self, name: str) -> AsyncIterator[Writer]:
        """Write a new file."""
        path = self._folder / name
        unfinished = path.with_name(path.name + UNFINISHED)
        try:
            file = await _opened(lambda: _create(unfinished))
            try:
                yield _LocalWriter(file)
                await asyncio.to_thread(_finish, file, unfinished, path)
            finally:
                with suppress(OSError):
                    file.close()
        except OSError as error:
            _remove(unfinished)
            raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
        except BaseException:
            _remove(unfinished)
            raise

    async def read(self, name: str) -> AsyncIterator[bytes]:
        """Iterate over a file's bytes."""
        try:
            file = await _opened(lambda: (self._folder / name).open("rb"))
            try:
                while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    yield chunk
            finally:
                file.close()
        except OSError as error:
            raise StorageError(f"cannot read {self._folder / name}: {error.strerror}") from error

    async def delete(self, name: str) -> None:
        """Delete a file, and its folder if that is empty."""
        try:
            await asyncio.to_thread(self._delete, self._folder / name)
        except OSError as error:
            raise StorageError(f"cannot delete {self._folder / name}: {error.strerror}") from error

    def _delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or already deleted
            path.parent.rmdir()

    async def names(self, prefix: str) -> list[str]:
        """List the files below a folder."""
        folder = self._folder / prefix
        found = await asyncio.to_thread(lambda: sorted(path.name for path in folder.glob("*") if path.is_file()))
        return [prefix + name for name in found]


async def _opened(open_file: Callable[[], _File]) -> _File:
    """Open a file in a thread. If canceled, wait until the thread has opened it, and close it."""
    opening = asyncio.ensure_future(asyncio.to_thread(open_file))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        with suppress(OSError):
            (await opening).close()
        raise


def _create(path: Path) -> BufferedWriter:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


def _finish(file: BufferedWriter, unfinished: Path, path: Path) -> None:
    file.flush()
    os.fsync(file.fileno())
    unfinished.replace(path)
    for folder in (path.parent, path.parent.parent):  # persist the directory entries
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
