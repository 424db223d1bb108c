"""A provider of machines that forgets nothing, lists late, loses answers and takes machines away."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fleet.errors import NoCapacity, ProviderError
from fleet.machine import FLEET_LABEL, Order, ProviderMachine


@dataclass
class RunningMachine:
    """One machine, as the provider sees it."""

    provider_id: str
    labels: dict[str, str]
    place: str
    age: int = 0  # in listings


@dataclass
class FakeProvider:
    """The provider: outlives every controller."""

    rng: random.Random
    capacity: int = 1000
    late_listing: int = 0  # listings from which a new machine is missing
    lost_answers: float = 0.0  # share of calls that are done and not answered
    machines: dict[str, RunningMachine] = field(default_factory=dict)
    launched: int = 0
    ended: list[str] = field(default_factory=list)
    ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def live(self) -> dict[str, dict[str, str]]:
        """Return the labels of all machines, by id."""
        return {one.provider_id: one.labels for one in self.machines.values()}

    def take(self, provider_id: str) -> None:
        """End a machine as a spot market does."""
        del self.machines[provider_id]


class FakeDriver:
    """A controller's way to it."""

    launches_once: ClassVar[bool] = False

    def __init__(self, provider: FakeProvider, fleet_id: str, places: Sequence[str] = ("a", "b")) -> None:
        self._provider = provider
        self._fleet_id = fleet_id
        self._places = tuple(places)

    @property
    def places(self) -> Sequence[str]:
        return self._places

    async def launch(self, order: Order) -> str:
        provider = self._provider
        if len(provider.machines) >= provider.capacity:
            raise NoCapacity(f"nothing left at {order.place}")
        provider_id = f"i-{next(provider.ids)}"
        provider.machines[provider_id] = RunningMachine(provider_id, dict(order.labels), order.place)
        provider.launched += 1
        self._maybe_lose_the_answer()
        return provider_id

    async def machines(self) -> list[ProviderMachine]:
        found = []
        for machine in self._provider.machines.values():
            machine.age += 1
            if machine.age > self._provider.late_listing and machine.labels.get(FLEET_LABEL) == self._fleet_id:
                found.append(ProviderMachine(machine.provider_id, machine.labels))
        return found

    async def end(self, provider_id: str) -> None:
        if self._provider.machines.pop(provider_id, None) is not None:
            self._provider.ended.append(provider_id)
        self._maybe_lose_the_answer()

    async def close(self) -> None:
        pass

    def _maybe_lose_the_answer(self) -> None:
        if self._provider.rng.random() < self._provider.lost_answers:
            raise ProviderError("the connection was cut")
