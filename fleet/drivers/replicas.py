"""Providers that scale a group of equal replicas and name them themselves: a Deployment, a container group.

    launch   check ── look ── scale to one more ── look until there is a new replica ── label it, where it can be
    end      look ── make the provider choose this one ── scale to one fewer ── look until it is on its way

A group belongs to exactly one pool. Changes happen one at a time, each only after the previous one has taken effect,
so that the replicas of two launches cannot be mixed up. What another controller, an autoscaler or the provider itself
does in between is found by the next look: an unknown replica is assigned to the next launch if replicas have
labels, and ended otherwise (``fleet.matching``).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, Protocol

from msgspec import Struct

from fleet.errors import LaunchRefused, ProviderError
from fleet.machine import MACHINE_LABEL, Order, ProviderMachine
from protocol.process import backoff_s

SETTLE_LIMIT_S: Final = 25.0  # until the provider lists what a change of size has brought


class Replica(Struct, frozen=True):
    """One replica, as its provider lists it."""

    provider_id: str
    labels: Mapping[str, str] = {}
    deletion_cost: int = 0  # of two equal replicas the one with the lower cost goes first
    starting: bool = False
    is_ending: bool = False


class ReplicaGroup(Struct, frozen=True):
    """A group at one moment."""

    size: int  # the number of replicas that it is to have
    replicas: tuple[Replica, ...]
    refusal: LaunchRefused | None = None  # why the provider cannot make the replicas that are missing

    @property
    def live(self) -> dict[str, Replica]:
        """The replicas that count towards the size, by the provider's ids."""
        return {replica.provider_id: replica for replica in self.replicas if not replica.is_ending}


class ReplicaApi(Protocol):
    """What a provider can do with its group. All methods raise ProviderError."""

    has_labels: ClassVar[bool]

    async def look(self) -> ReplicaGroup:
        """Return the group as it is."""
        ...

    async def check(self) -> None:
        """Raise LaunchRefused where it is known before that one more replica cannot be had."""
        ...

    async def scale(self, size: int, group: ReplicaGroup) -> None:
        """Change the group's size, if possible only if it has not been changed meanwhile. Raises LaunchRefused."""
        ...

    async def label(self, replica: Replica, labels: Mapping[str, str]) -> None:
        """Label a replica; only called where ``has_labels``."""
        ...

    async def choose(self, replica: Replica, group: ReplicaGroup) -> None:
        """Make the provider choose this replica when the group is scaled in."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class ReplicaDriver:
    """Keeps a group's size at the number of machines that were launched and not ended."""

    launches_once: ClassVar[bool] = False  # but where replicas have labels, the same order finds its replica again

    def __init__(self, api: ReplicaApi, labels: Mapping[str, str], *, settle_limit_s: float = SETTLE_LIMIT_S) -> None:
        """``labels``: what all replicas have in common for us."""
        self._api = api
        self._labels = labels
        self._settle_limit_s = settle_limit_s
        self._changing = asyncio.Lock()

    @property
    def places(self) -> Sequence[str]:
        """Where replicas go is the provider's business."""
        return ("",)

    async def launch(self, order: Order) -> str:
        """Take an unassigned replica, or scale out by one."""
        async with self._changing:
            await self._api.check()
            group = await self._looked("a replica that is to go is still there", _is_settled)
            replica = self._known(group, order)
            if replica is None:
                await self._api.scale(max(group.size, len(group.live) + 1), group)
                replica = await self._arrived(group)
            if self._api.has_labels and MACHINE_LABEL not in replica.labels:
                await self._api.label(replica, order.labels)
            return replica.provider_id

    def _known(self, group: ReplicaGroup, order: Order) -> Replica | None:
        """Return the order's replica, or one that has no machine's label."""
        if not self._api.has_labels:
            return None
        by_machine = {replica.labels.get(MACHINE_LABEL): replica for replica in group.live.values()}
        return by_machine.get(order.machine_id) or by_machine.get(None)

    async def machines(self) -> list[ProviderMachine]:
        group = await self._api.look()
        return [
            ProviderMachine(one.provider_id, {**self._labels, **one.labels}, one.is_ending) for one in group.replicas
        ]

    async def end(self, provider_id: str) -> None:
        """Scale to one fewer, so that this replica goes."""
        async with self._changing:
            group = await self._api.look()
            if provider_id not in group.live:
                return
            await self._api.choose(group.live[provider_id], group)
            await self._scale_in(min(group.size, len(group.live) - 1), group)
            await self._looked(
                f"{provider_id} still exists", lambda now: provider_id not in now.live and _is_settled(now)
            )

    async def _arrived(self, before: ReplicaGroup) -> Replica:
        """Return a replica that was not there before. Raises ProviderError: it may still come."""
        group = await self._looked(
            "the replica is not there yet", lambda now: now.refusal is not None or bool(_new(now, before))
        )
        if group.refusal is not None and not _new(group, before):
            await self._scale_in(len(group.live), group)  # what cannot be made now is not to come later
            raise group.refusal
        return _new(group, before)[0]

    async def _looked(self, otherwise: str, is_done: Callable[[ReplicaGroup], bool]) -> ReplicaGroup:
        """Look until something is done. Raises ProviderError if that takes too long."""
        waits_s = backoff_s()
        try:
            async with asyncio.timeout(self._settle_limit_s):
                while True:
                    group = await self._api.look()
                    if is_done(group):
                        return group
                    await asyncio.sleep(next(waits_s))
        except TimeoutError as error:
            raise ProviderError(f"after {self._settle_limit_s:g} s {otherwise}") from error

    async def _scale_in(self, size: int, group: ReplicaGroup) -> None:
        try:
            await self._api.scale(size, group)
        except LaunchRefused as error:
            raise ProviderError(str(error)) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()


def _is_settled(group: ReplicaGroup) -> bool:
    """Whether every replica that is to go is on its way."""
    return len(group.live) <= group.size


def _new(group: ReplicaGroup, before: ReplicaGroup) -> list[Replica]:
    """Return the replicas that were not there before."""
    return [group.live[provider_id] for provider_id in sorted(group.live.keys() - before.live.keys())]
