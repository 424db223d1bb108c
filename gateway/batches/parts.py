"""Dependencies of the routes of files and batches."""

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
# Counts a running request of a key and its team (gateway.endpoints.endpoint.counted).
Counted = Callable[[Exchange, Principal], AbstractAsyncContextManager[None]]


class Threads(Protocol):
    """Threads shared between tenants (gateway.tokenizing.encoder_pool)."""

    async def run(
        self, tenant: str, size_bytes: int, work: Callable[[], _Result], *, is_quick: bool = False
    ) -> _Result:
        """Run ``work`` in a thread. Raises RateLimitExceeded or Overloaded if too much work is queued."""
        ...


@dataclass(frozen=True, slots=True)
class BatchServices:
    """Dependencies of a process that serves files and batches."""

    settings: BatchSettings
    folder: Path  # for indexes
    keys: KeyRing
    files: Files
    batches: Batches
    endpoints: frozenset[str]  # allowed endpoints of batches
    changed: asyncio.Event  # set when a batch was created or changed
    uploads: UploadSlots
    counted: Counted
    threads: Threads
