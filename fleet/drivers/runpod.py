"""Pods of RunPod, by version 2 of its REST API; version 1 was retired on 2026-11-15, and 2 has no spot pods.

Requests, answers, what a failed launch means: https://api.runpod.io/v2/openapi.json
(https://docs.runpod.io/api-reference-v2/pods/create-a-pod). "No capacity" is a 400 like any other but for its text, in
no document; it is as users have seen it (https://github.com/mlabonne/llm-autoeval/issues/3,
https://github.com/runpod/runpodctl/issues/189). Pods have no labels, and names need not be unique: a pod's name says
what its labels would, and a launch first looks whether there is one.
"""

from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec

from fleet.drivers import rest
from fleet.errors import LaunchRefused, NoCapacity, OverQuota, ProviderError
from fleet.machine import Order, ProviderMachine, labels_in, name_of
from fleet.settings import RunPodSettings
from protocol.http_client import httpx

NO_CAPACITY: Final = ("any instances available", "instances currently available", "free gpus", "capacity")  # lower case
NEXT_TYPE: Final = frozenset({400, 403})  # another type of GPU may still be had
REFUSED: Final = frozenset({401, 404, 422})


class _Pod(msgspec.Struct):
    id: str
    name: str
    status: str  # PROVISIONING, STARTING, RUNNING, EXITED, ERROR or TERMINATED


class _Pods(msgspec.Struct):
    pods: list[_Pod]


class RunPodDriver:
    """Launches a pod for each machine; the places are data centers."""

    launches_once: ClassVar[bool] = False

    def __init__(self, settings: RunPodSettings, fleet_id: str, pool: str) -> None:
        self._settings = settings
        self._fleet_id = fleet_id
        self._pool = pool
        key = rest.key_of(settings.api_key, "RUNPOD_API_KEY")
        self._client = rest.connect(settings.url, {"Authorization": f"Bearer {key}"})

    @property
    def places(self) -> Sequence[str]:
        """The data centers; [""]: anywhere."""
        return self._settings.data_centers or ("",)

    async def launch(self, order: Order) -> str:
        """Create a pod with the best type of GPU that can be had, unless there is a pod for the order."""
        name = name_of(order.labels)
        for pod in await self._pods():
            if pod.name == name:
                return pod.id
        refusal = LaunchRefused("no type of GPU is configured")
        for gpu_type in self._settings.gpu_types:
            answer = await rest.ask(self._client, "POST", "/pods", json=self._pod_for(order, name, gpu_type))
            if answer.status_code not in NEXT_TYPE:
                _check(answer)
                return rest.decoded(answer, _Pod).id
            refusal = _refusal(answer)
        raise refusal

    async def machines(self) -> list[ProviderMachine]:
        """Return our pods. Stopped and failed ones are listed like the others: they are not gone until deleted."""
        return [
            ProviderMachine(pod.id, labels)
            for pod in await self._pods()
            if (labels := labels_in(pod.name, self._fleet_id, self._pool)) is not None
        ]

    async def end(self, provider_id: str) -> None:
        """Delete a pod, if it is ours."""
        if provider_id not in {machine.provider_id for machine in await self.machines()}:
            return
        answer = await rest.ask(self._client, "DELETE", f"/pods/{provider_id}")
        if not answer.is_success and answer.status_code != httpx.codes.NOT_FOUND:
            raise ProviderError(rest.said(answer))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _pods(self) -> list[_Pod]:
        pods = rest.decoded(await rest.ask(self._client, "GET", "/pods"), _Pods).pods
        return [pod for pod in pods if pod.status != "TERMINATED"]

    def _pod_for(self, order: Order, name: str, gpu_type: str) -> dict[str, object]:
        settings = self._settings
        return {
            "name": name,
            "image": settings.image,
            "env": dict(order.environment),
            "cloud": settings.cloud,
            "gpu": {"id": gpu_type, "count": 1},
            "disk": settings.disk_gib,
            "ports": [],
            "dataCenterIds": [order.place] if order.place else [],
        }


def _check(answer: httpx.Response) -> None:
    """Raise what an answer other than those in NEXT_TYPE says has gone wrong."""
    if answer.status_code == httpx.codes.PAYMENT_REQUIRED:
        raise OverQuota(rest.said(answer))
    if answer.status_code in REFUSED:
        raise LaunchRefused(rest.said(answer))


def _refusal(answer: httpx.Response) -> LaunchRefused:
    text = answer.text.lower()
    if answer.status_code == httpx.codes.BAD_REQUEST and any(words in text for words in NO_CAPACITY):
        return NoCapacity(rest.said(answer))
    return LaunchRefused(rest.said(answer))
