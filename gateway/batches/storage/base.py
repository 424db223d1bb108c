"""Interface of a file storage. File names have only letters, digits, ``-``, ``_``, ``.``, and ``/``.

A file exists completely or not at all. After ``writing`` returns, it survives a power failure.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

CHUNK_BYTES: Final = 256 * 1024  # read at a time


class StorageError(Exception):
    """The storage is unavailable, or has lost a file."""


class Writer(Protocol):
    """A file being written."""

    async def write(self, data: bytes) -> None:
        """Append. Raises StorageError."""
        ...


class Storage(Protocol):
    """A file storage. Methods raise StorageError."""

    def writing(self, name: str) -> AbstractAsyncContextManager[Writer]:
        """Write a new file; discard it if the block fails."""
        ...

    def read(self, name: str) -> AsyncIterator[bytes]:
        """Iterate over a file's bytes."""
        ...

    async def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        ...

    async def names(self, prefix: str) -> list[str]:
        """List the files below a folder, such as "file-1/"."""
        ...
