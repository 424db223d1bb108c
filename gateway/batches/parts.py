"""The parts that the routes of files and batches work with."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from db.accounts.keyring import KeyRing
from db.accounts.principal import Principal
from gateway.batches.files import Files, UploadSlots
from gateway.batches.store import Batches
from gateway.http.pages import Exchange
from gateway.settings import BatchSettings

_Result = TypeVar("_Result")
# Counts a request of a key and its team while it runs (gateway.endpoints.endpoint.counted).
Counted = Callable[[Exchange, Principal], AbstractAsyncContextManager[None]]


class Threads(Protocol):
    """The gateway's threads, which tenants share (gateway.tokenizing.encoder_pool)."""

    async def run(
        self, tenant: str, size_bytes: int, work: Callable[[], _Result], *, is_quick: bool = False
    ) -> _Result:
        """Run ``work`` in one. Raises RateLimitExceeded and Overloaded where too much waits for them."""
        ...


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
    uploads: UploadSlots
    counted: Counted
    threads: Threads
