"""What a place for files must offer. Names are ours: letters, digits, ``-``, ``_``, ``.`` and ``/``.

A file is there whole, or not at all, and once ``writing`` has returned it survives a power cut.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

CHUNK_BYTES: Final = 256 * 1024  # of what is read at a time


class StorageError(Exception):
    """The place for files cannot be used at the moment, or has lost a file."""


class Writer(Protocol):
    """A file that is being written."""

    async def write(self, data: bytes) -> None:
        """Append. Raises StorageError."""
        ...


class Storage(Protocol):
    """A place for files. All of it raises StorageError."""

    def writing(self, name: str) -> AbstractAsyncContextManager[Writer]:
        """Write a new file; if the block fails, there is none."""
        ...

    def read(self, name: str) -> AsyncIterator[bytes]:
        """Iterate over a file's bytes."""
        ...

    async def delete(self, name: str) -> None:
        """Delete a file; one that is not there is none."""
        ...

    async def names(self, prefix: str) -> list[str]:
        """List the files below a folder, such as "file-1/"."""
        ...
