"""A Deployment, scaled through its scale sub-resource: the extra ``kubernetes``.

Sub-resource, errors: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/deployment-v1/. Which pod
goes when a ReplicaSet shrinks: https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost
and, for the whole order, ActivePodsWithRanks in kubernetes/pkg/controller/controller_utils.go: pods that are not
running go before those that are, regardless of the annotation; among equals the annotation decides.

A pod learns its machine from its own name (``SPILLWAY_MACHINE`` by the downward API): the label comes after its start.
Nothing else may scale the Deployment; the controller may get it, patch its scale, and list, patch and delete pods.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar, Final

import httpx2
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.config.kubeconfig import DEFAULT_KUBECONFIG, SingleConfig
from lightkube.core.exceptions import ConfigError
from lightkube.models.apps_v1 import DeploymentCondition
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod
from lightkube.types import PatchType

from fleet.drivers.replicas import Replica, ReplicaGroup
from fleet.errors import LaunchRefused, OverQuota, ProviderError
from fleet.settings import KubernetesSettings

DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST: Final = -(2**31)
OVER: Final = frozenset({"Succeeded", "Failed"})  # phases of pods that no longer count as replicas
REFUSED: Final = frozenset({400, 401, 403, 404})  # 422: the test of a patch has failed
CALL_LIMIT_S: Final = 10.0


class KubernetesApi:
    """One Deployment and its pods."""

    has_labels: ClassVar[bool] = True

    def __init__(self, settings: KubernetesSettings) -> None:
        """Read the kubeconfig, or the pod's service account. Raises ProviderError if there is none."""
        self._deployment = settings.deployment
        try:
            config = _configuration(settings.context)
            self._client = AsyncClient(config, settings.namespace, timeout=httpx2.Timeout(CALL_LIMIT_S))
        except ConfigError as error:
            raise ProviderError(f"no kubeconfig: {error}") from error

    async def look(self) -> ReplicaGroup:
        """Return the Deployment's size, its pods, and why pods cannot be created."""
        async with _failures():
            deployment = await self._client.get(Deployment, self._deployment)
            pods = [pod async for pod in self._client.list(Pod, labels=_selector(deployment))]
        conditions = (deployment.status.conditions if deployment.status else None) or []
        return ReplicaGroup(
            deployment.spec.replicas or 0,
            tuple(_replica(pod) for pod in pods if _phase(pod) not in OVER),
            next(filter(None, map(_refusal, conditions)), None),
        )

    async def check(self) -> None:
        """Raise LaunchRefused where we may not even look. Whether a node has room is only known once there is a pod."""
        async with _refusals():
            await self._client.get(Deployment, self._deployment)

    async def scale(self, size: int, group: ReplicaGroup) -> None:
        """Scale the Deployment, unless it was changed meanwhile."""
        change = [
            {"op": "test", "path": "/spec/replicas", "value": group.size},
            {"op": "replace", "path": "/spec/replicas", "value": size},
        ]
        async with _refusals():
            await self._client.patch(Deployment.Scale, self._deployment, change, patch_type=PatchType.JSON)

    async def label(self, replica: Replica, labels: Mapping[str, str]) -> None:
        """Label a pod."""
        await self._change_pod(replica, {"labels": dict(labels)})

    async def choose(self, replica: Replica, group: ReplicaGroup) -> None:
        """Annotate the pod; where another would go first nevertheless, delete it: then what replaces it goes first."""
        others = [other for other in group.live.values() if other != replica]
        if any(other.starting for other in others) and not replica.starting:
            async with _failures():
                await self._client.delete(Pod, replica.provider_id)
        else:
            await self._change_pod(replica, {"annotations": {DELETION_COST: str(LOWEST_COST)}})

    async def _change_pod(self, replica: Replica, metadata: dict[str, dict[str, str]]) -> None:
        async with _failures():
            change = {"metadata": metadata}
            await self._client.patch(Pod, replica.provider_id, change, patch_type=PatchType.MERGE)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def _configuration(context: str | None) -> SingleConfig | None:
    """Return a context of the kubeconfig; None: the pod's service account, or the kubeconfig's current context."""
    if context is None:
        return KubeConfig.from_env().get()
    return KubeConfig.from_file(os.environ.get("KUBECONFIG", DEFAULT_KUBECONFIG)).get(context)


def _selector(deployment: Deployment) -> dict[str, Any]:
    """Return the labels of the Deployment's pods. Raises ProviderError where they do not tell them from all others."""
    selector = deployment.spec.selector if deployment.spec is not None else None
    if selector is None or not selector.matchLabels or selector.matchExpressions:
        raise ProviderError("the Deployment's selector must use only matchLabels")
    return dict(selector.matchLabels)


def _phase(pod: Pod) -> str:
    return (pod.status.phase if pod.status else None) or ""


def _replica(pod: Pod) -> Replica:
    metadata = pod.metadata or ObjectMeta()
    return Replica(
        metadata.name or "",
        labels=metadata.labels or {},
        starting=_phase(pod) != "Running",
        is_ending=metadata.deletionTimestamp is not None,
    )


def _refusal(condition: DeploymentCondition) -> LaunchRefused | None:
    """Return what a condition ``ReplicaFailure`` says: pods cannot be made."""
    if condition.type != "ReplicaFailure" or condition.status != "True":
        return None
    message = condition.message or condition.reason or ""
    return OverQuota(message) if "exceeded quota" in message else LaunchRefused(message)


@contextlib.asynccontextmanager
async def _failures() -> AsyncIterator[None]:
    """Raise what goes wrong with a call as ProviderError."""
    try:
        yield
    except httpx2.HTTPError as error:  # ApiError is one
        raise ProviderError(str(error) or type(error).__name__) from error


@contextlib.asynccontextmanager
async def _refusals() -> AsyncIterator[None]:
    """Raise LaunchRefused where a call was surely not done."""
    try:
        async with _failures():
            yield
    except ProviderError as error:
        if isinstance(error.__cause__, ApiError) and error.__cause__.status.code in REFUSED:
            raise LaunchRefused(str(error)) from error
        raise
