"""Bytes of unread answers that this gateway keeps, by tenant."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

TENANT_SHARE: Final = 4  # one tenant has this part of the room at most


class Keeper(Protocol):
    """Keeper of the bytes: a mailbox."""

    held_bytes: int


@dataclass(slots=True)
class _Tenant:
    held_bytes: int = 0
    keepers: dict[Keeper, Callable[[], None]] = field(default_factory=dict)  # and what frees what each holds


class UnreadBytes:
    """Bounds what is unread at this gateway: past a bound, the largest keeper is given up."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._tenants: dict[str, _Tenant] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes held over all tenants."""
        return self._held_bytes

    def count(self, tenant: str, keeper: Keeper, give_up: Callable[[], None], count_bytes: int) -> None:
        """Count a change of a keeper's bytes; ``give_up`` makes it free what it holds."""
        held = self._tenants.get(tenant)
        if held is None:
            held = self._tenants[tenant] = _Tenant()
        held.held_bytes += count_bytes
        self._held_bytes += count_bytes
        if keeper.held_bytes:
            held.keepers[keeper] = give_up
        else:
            held.keepers.pop(keeper, None)
        if not held.keepers:
            del self._tenants[tenant]
        if count_bytes > 0:
            self._keep_bounds(held)

    def _keep_bounds(self, held: _Tenant) -> None:
        if held.held_bytes > self._max_bytes // TENANT_SHARE:
            _give_up_largest(held)
        elif self._held_bytes > self._max_bytes:
            _give_up_largest(max(self._tenants.values(), key=lambda tenant: tenant.held_bytes))


def _give_up_largest(held: _Tenant) -> None:
    held.keepers[max(held.keepers, key=lambda keeper: keeper.held_bytes)]()
