"""A stand-in for pods of RunPod's REST API, version 2 (https://api.runpod.io/v2/openapi.json).

The text of "no capacity" is in no document: it is as a user has recorded it from a call.
"""

import itertools
from typing import Any

from tests.fleet.provider_server import Call, ProviderServer

KEY = "rpa_test"
CREATE = {  # fields of CreatePodRequest that the driver may send, and their types
    "name": str,
    "image": str,
    "env": dict,
    "cloud": str,
    "gpu": dict,
    "dataCenterIds": list,
    "disk": int,
    "ports": list,
}
NO_CAPACITY = (
    "There are no longer any instances available with the requested specifications. Please refresh and try again."
)


def problem(status: int, title: str, detail: str) -> tuple[int, Any]:
    return status, {"title": title, "status": status, "detail": detail}


class RunPodApi(ProviderServer):
    def __init__(self) -> None:
        super().__init__()
        self.pods: dict[str, dict[str, Any]] = {}
        self.free_gpus = {"NVIDIA L40S": 100, "NVIDIA A40": 100}  # by type
        self.forbidden_types: set[str] = set()
        self.balance_usd = 50.0
        self.knows_image = True
        self.copies = 1  # of a pod that is created: a request that something between us has repeated
        self._numbers = itertools.count(1)

    def add(self, name: str, **fields: Any) -> str:
        pod = {
            "id": f"7h9k2m4n{next(self._numbers)}p",
            "status": "PROVISIONING",
            "actions": ["start", "terminate"],
            "image": "spillway/worker",
            "args": "",
            "disk": 50,
            "ports": [],
            "env": {},
            "cloud": "SECURE",
            "mounts": {},
            "registry": None,
            "dataCenterId": None,
            "cudaVersion": None,
            "template": None,
            "cost": 0.79,
            "locked": False,
            "globalNetworking": {"enabled": False},
            "ssh": {"proxy": None, "direct": None},
            "runtime": None,
            "createdAt": "2026-06-01T12:00:00Z",
            "startedAt": None,
            **fields,
            "name": name,
        }
        self.pods[pod["id"]] = pod
        return str(pod["id"])

    def answer(self, call: Call) -> tuple[int, Any]:
        if call.headers.get("authorization") != f"Bearer {KEY}":
            return problem(401, "Unauthorized", "missing bearer token")
        match call.method, call.path.removeprefix("/v2").strip("/").split("/"):
            case "GET", ["pods"]:
                return 200, {"pods": list(self.pods.values())}
            case "POST", ["pods"]:
                return self._create(call.body)
            case "DELETE", ["pods", pod_id] if pod_id in self.pods:
                del self.pods[pod_id]
                return 204, None
        return problem(404, "Not Found", "resource not found")

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any]:
        wrong = [name for name, value in wanted.items() if not isinstance(value, CREATE.get(name, ()))]
        if wrong or wanted["gpu"].keys() != {"id", "count"} or not self.knows_image:
            return problem(422, "Unprocessable Entity", "Request validation failed.")
        if self.balance_usd <= 0:
            return problem(402, "Payment Required", "insufficient balance")
        gpu_type = wanted["gpu"]["id"]
        if gpu_type in self.forbidden_types:
            return problem(403, "Forbidden", "access denied")
        if self.free_gpus.get(gpu_type, 0) <= 0:
            return problem(400, "Bad Request", NO_CAPACITY)
        self.free_gpus[gpu_type] -= 1
        made = [self.add(**wanted) for _ in range(self.copies)]
        return 201, self.pods[made[0]]
