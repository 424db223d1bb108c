"""A container group of SaladCloud, by its public API. Its replicas are the pool's machines.

Requests, answers, errors (problem details without a list of their types): api-specs/salad-cloud.yaml of
https://github.com/SaladTechnologies/salad-cloud-docs, version 0.9.0-alpha.17. Which instance goes when a group shrinks:
https://docs.salad.com/container-engine/explanation/infrastructure-platform/instance-deletion-cost.

An instance cannot have a label, and the group's environment is the same for all: a row refers to an instance by its id,
which its container finds in ``SALAD_INSTANCE_ID``. A node that goes away is replaced by SaladCloud without being asked;
the new instance has a new id.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

import msgspec

from fleet.drivers import rest
from fleet.drivers.replicas import Replica, ReplicaGroup
from fleet.errors import LaunchRefused, NoCapacity, OverQuota, ProviderError
from fleet.settings import SaladSettings
from protocol.http_client import httpx

MERGE_PATCH: Final = {"Content-Type": "application/merge-patch+json"}
REFUSED: Final = frozenset({400, 401, 403, 404, 422})
KEPT_COST: Final = 1  # at least, of the instances that are to stay when one goes
STARTING: Final = frozenset({"allocating", "downloading", "creating"})


class _Resources(msgspec.Struct):
    cpu: int
    memory: int
    gpu_classes: list[str] | None = None


class _Container(msgspec.Struct):
    resources: _Resources


class _Group(msgspec.Struct):
    replicas: int
    container: _Container
    priority: str | None = None
    country_codes: list[str] | None = None


class _Instance(msgspec.Struct):
    id: str
    state: str  # allocating, downloading, creating, running or stopping
    deletion_cost: int = 0


class _Instances(msgspec.Struct):
    instances: list[_Instance]


class _ReplicaQuota(msgspec.Struct):
    container_replicas_quota: int
    container_replicas_used: int


class _Quotas(msgspec.Struct):
    container_groups_quotas: _ReplicaQuota


class SaladApi:
    """One container group and its instances."""

    has_labels: ClassVar[bool] = False

    def __init__(self, settings: SaladSettings) -> None:
        self._client = rest.connect(settings.url, {"Salad-Api-Key": rest.key_of(settings.api_key, "SALAD_API_KEY")})
        self._organization = f"/organizations/{settings.organization}"
        self._group = f"{self._organization}/projects/{settings.project}/containers/{settings.container_group}"

    async def look(self) -> ReplicaGroup:
        """Return the group's size and its instances."""
        group = rest.decoded(await rest.ask(self._client, "GET", self._group), _Group)
        instances = rest.decoded(await rest.ask(self._client, "GET", f"{self._group}/instances"), _Instances)
        return ReplicaGroup(group.replicas, tuple(_replica(one) for one in instances.instances))

    async def check(self) -> None:
        """Raise NoCapacity where no node has a GPU of the group's classes free at its priority."""
        answer = await rest.ask(self._client, "GET", self._group)
        if answer.status_code in REFUSED:
            raise LaunchRefused(rest.said(answer))
        group = rest.decoded(answer, _Group)
        resources = group.container.resources
        if not resources.gpu_classes:
            return
        wanted = {"gpu_classes": resources.gpu_classes, "cpu": resources.cpu, "memory": resources.memory}
        if group.country_codes:
            wanted["country_codes"] = group.country_codes
        path = f"{self._organization}/availability/sce-gpu-availability"
        free = rest.decoded(await rest.ask(self._client, "POST", path, json=wanted), dict[str, int])
        if free.get(f"available_gpu_{group.priority or 'high'}") == 0:
            raise NoCapacity(f"no free node at priority {group.priority or 'high'}")

    async def scale(self, size: int, group: ReplicaGroup) -> None:  # noqa: ARG002 - a change cannot be conditional
        """Change the number of replicas."""
        answer = await self._patch(self._group, {"replicas": size})
        if answer.status_code in REFUSED:
            raise OverQuota(rest.said(answer)) if await self._quota_is_used_up() else LaunchRefused(rest.said(answer))
        if not answer.is_success:
            raise ProviderError(rest.said(answer))

    async def _quota_is_used_up(self) -> bool:
        answer = await rest.ask(self._client, "GET", f"{self._organization}/quotas")
        quotas = rest.decoded(answer, _Quotas).container_groups_quotas if answer.is_success else None
        return quotas is not None and quotas.container_replicas_used >= quotas.container_replicas_quota

    async def label(self, replica: Replica, labels: Mapping[str, str]) -> None:
        """Do nothing: instances have no labels."""

    async def choose(self, replica: Replica, group: ReplicaGroup) -> None:
        """Give this instance the lowest deletion cost. A worker resets its cost when it gets work."""
        if replica.deletion_cost > 0:
            await self._set_cost(replica, 0)
        for other in group.live.values():
            if other.provider_id != replica.provider_id and other.deletion_cost < KEPT_COST:
                await self._set_cost(other, KEPT_COST)

    async def _set_cost(self, replica: Replica, cost: int) -> None:
        answer = await self._patch(f"{self._group}/instances/{replica.provider_id}", {"deletion_cost": cost})
        if not answer.is_success and answer.status_code != httpx.codes.NOT_FOUND:
            raise ProviderError(rest.said(answer))

    async def _patch(self, path: str, change: dict[str, int]) -> httpx.Response:
        return await rest.ask(self._client, "PATCH", path, content=msgspec.json.encode(change), headers=MERGE_PATCH)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _replica(instance: _Instance) -> Replica:
    return Replica(
        instance.id,
        deletion_cost=instance.deletion_cost,
        starting=instance.state in STARTING,
        is_ending=instance.state == "stopping",
    )
