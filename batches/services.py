"""The parts that the routes of files and batches work with."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from accounts.keyring import KeyRing
from batches.files import Files
from batches.settings import BatchSettings
from batches.store import Batches


@dataclass(frozen=True, slots=True)
class BatchServices:
    """The parts of a process that serves files and batches."""

    settings: BatchSettings
    folder: Path  # for indexes
    keys: KeyRing
    files: Files
    batches: Batches
    endpoints: frozenset[str]  # that a batch may be for
    changed: asyncio.Event  # set when a batch is there, or has changed
    uploads: asyncio.Semaphore  # one for each that may be received at a time
