"""The protocol of drivers, which launch, list and end machines at a provider.

A driver keeps no state that a restart would lose: it finds its machines again at the provider by their
labels. Requirements, checked by ``tests/fleet/test_drivers.py`` for each driver:

- ``launch`` with the same order twice creates one machine, if the provider supports that (``launches_once``);
- a launched machine is listed with its labels until it is gone, also by a new driver object;
- ``end`` of an ending or ended machine does nothing;
- machines of others are neither listed nor ended.

Some providers scale a group of replicas and name these themselves (``replicas``). Where such a replica cannot carry a
label, it is listed without one: its row has the provider's id (``fleet.matching``).
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from fleet.machine import Order, ProviderMachine


class Driver(Protocol):
    """Launches, lists and ends the machines of one pool."""

    launches_once: ClassVar[bool]  # the provider itself refuses a second machine for the same order

    @property
    def places(self) -> Sequence[str]:
        """The places where this pool's machines can be launched, best first; [""] if there is only one."""
        ...

    async def launch(self, order: Order) -> str:
        """Launch a machine; return the provider's id.

        Raises ProviderError (it may exist), or LaunchRefused, NoCapacity, OverQuota (it does not).
        """
        ...

    async def machines(self) -> list[ProviderMachine]:
        """Return all machines of this installation and pool that the provider may charge for. Raises ProviderError."""
        ...

    async def end(self, provider_id: str) -> None:
        """End a machine now. Its worker has been drained or cannot be. Idempotent. Raises ProviderError."""
        ...

    async def close(self) -> None:
        """Close connections. Machines keep running."""
        ...
