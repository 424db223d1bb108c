"""The parts that the routes of files and batches work with."""

from dataclasses import dataclass

from accounts.keyring import KeyRing
from batches.files import Files
from batches.settings import BatchSettings


@dataclass(frozen=True, slots=True)
class BatchServices:
    """The parts of a process that serves files and batches."""

    settings: BatchSettings
    keys: KeyRing
    files: Files
