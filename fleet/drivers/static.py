"""Machines that the controller does not manage: their workers count, but it never starts or ends them."""

from collections.abc import Sequence
from typing import ClassVar

from fleet.errors import LaunchRefused
from fleet.machine import Order, ProviderMachine


class StaticDriver:
    """Launches nothing and ends nothing."""

    launches_once: ClassVar[bool] = True

    @property
    def places(self) -> Sequence[str]:
        """No place: nothing can be launched."""
        return ()

    async def launch(self, order: Order) -> str:
        """Raise LaunchRefused."""
        raise LaunchRefused(f"pool {order.pool} is static: the controller does not start its machines")

    async def machines(self) -> list[ProviderMachine]:
        """Return nothing: none of them is ours."""
        return []

    async def end(self, provider_id: str) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""
