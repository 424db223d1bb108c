"""A tenant's stored responses, counted by the queue server: sizes are part of the message subjects."""

import asyncio
import time
import uuid
from collections import Counter
from typing import Final, NamedTuple

from gateway.responses.messages import KIB, Key, Messages, NotKept
from gateway.settings import ResponseSettings
from protocol import subjects

USAGE_AGE_S: Final = 10.0  # maximum age of a tenant's cached usage
MAX_USAGES: Final = 1000  # tenants with cached usage


class TenantFull(NotKept):
    """The tenant has reached its storage limit."""


class Usage(NamedTuple):
    """Storage usage of a tenant."""

    responses: int
    size_bytes: int


class TenantUsages:
    """Storage usage of tenants. Methods raise BusError. Use only from the event loop."""

    def __init__(self, messages: Messages, settings: ResponseSettings) -> None:
        self._messages = messages
        self._settings = settings
        self._known: dict[str, tuple[float, Usage]] = {}  # by tenant, with the time of the read

    async def why_full(self, tenant: str, size_bytes: int = 1) -> str | None:
        """Return why a tenant may not store another response of this size; None: it may."""
        usage, settings = await self._usage(tenant), self._settings
        has_room = usage.size_bytes + size_bytes <= settings.max_tenant_bytes
        if usage.responses < settings.max_tenant_responses and has_room:
            return None
        return f"This API key or its team has {usage.responses} stored responses with {usage.size_bytes} bytes in total"

    async def take(self, tenant: str, size_bytes: int) -> None:
        """Count a response before it is stored. Raises TenantFull."""
        why = await self.why_full(tenant, size_bytes)
        if why is not None:
            raise TenantFull(f"{why}, and this response has {size_bytes} bytes")
        self.add(tenant, 1, size_bytes)

    def add(self, tenant: str, responses: int, size_bytes: int) -> None:
        """Adjust the cached usage until it is read again."""
        if tenant in self._known:
            read_s, usage = self._known[tenant]
            self._known[tenant] = (read_s, Usage(usage.responses + responses, usage.size_bytes + size_bytes))

    def forget(self, tenant: str) -> None:
        """Drop the cached usage."""
        self._known.pop(tenant, None)

    async def mark(self, key: Key, size_bytes: int, *, ttl_s: int) -> None:
        """Publish the size of a running response or of its events, so that all gateways count it."""
        await self._messages.mark(key, f"size.{-(-size_bytes // KIB)}", ttl_s=ttl_s, identity=uuid.uuid4().hex)

    async def _usage(self, tenant: str) -> Usage:
        read_s, usage = self._known.get(tenant, (float("-inf"), Usage(0, 0)))
        if time.monotonic() - read_s < USAGE_AGE_S:
            return usage
        prefix, count = f"res.{subjects.escape(tenant)}.*.", self._messages.count
        usage = usage_of(*await asyncio.gather(count(f"{prefix}done.*"), count(f"{prefix}size.*")))
        if len(self._known) >= MAX_USAGES:
            self._known.clear()
        self._known[tenant] = (time.monotonic(), usage)
        return usage


def usage_of(ended: dict[str, int], made: dict[str, int]) -> Usage:
    """Add up the sizes in subjects: all of ended responses, and the largest of each background response."""
    sizes, held = Counter[str](), Counter[str]()
    for subject in ended:
        prefix, _, size_kib = subject.rpartition(".")
        sizes[prefix.rpartition(".")[0]] += int(size_kib)
    for subject in made:
        prefix, _, size_kib = subject.rpartition(".")
        response = prefix.rpartition(".")[0]
        held[response] = max(held[response], int(size_kib))
    return Usage(len(sizes.keys() | held.keys()), KIB * (sizes.total() + held.total()))
