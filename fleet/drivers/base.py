"""The protocol of drivers: one for each way to get a machine.

A driver keeps no state of its own that a restart would miss: what it has launched, it finds again at the provider by
the label. Duties, checked by ``tests/fleet/test_drivers.py`` for each driver:

- ``launch`` with the same order twice makes one machine, as far as the provider allows it (``launches_once``);
- a machine that was launched is listed, with its labels, until it is gone, also by a driver made anew;
- ``end`` of a machine that is ending or gone does nothing;
- other people's machines are neither listed nor ended.

Some providers scale a group of replicas and name these themselves (``replicas``). Where such a replica cannot carry a
label, it is listed without ours: the books know it by the provider's id (``fleet.matching``).
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from fleet.machine import Order, ProviderMachine


class Driver(Protocol):
    """Launches, lists and ends the machines of one pool."""

    launches_once: ClassVar[bool]  # the provider itself refuses a second machine for the same order

    @property
    def places(self) -> Sequence[str]:
        """The places at which this pool's machines may be launched, best first; [""] where there is only one."""
        ...

    async def launch(self, order: Order) -> str:
        """Launch a machine; return the provider's id of it.

        Raises ProviderError (it may exist), or LaunchRefused, NoCapacity, OverQuota (it does not).
        """
        ...

    async def machines(self) -> list[ProviderMachine]:
        """Return all machines of this installation and pool that the provider may charge for. Raises ProviderError."""
        ...

    async def end(self, provider_id: str) -> None:
        """End a machine now; its worker has been drained, or cannot be. Idempotent. Raises ProviderError."""
        ...

    async def close(self) -> None:
        """Close connections; machines stay."""
        ...
