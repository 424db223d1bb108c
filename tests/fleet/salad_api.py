"""A stand-in for SaladCloud's public API: one container group of api-specs/salad-cloud.yaml (0.9.0-alpha.17)."""

import itertools
import uuid
from typing import Any

from tests.fleet.provider_server import Call, ProviderServer

KEY = "salad-test"
GROUP = "organizations/acme-corp/projects/llm/containers/workers"
UPDATED = "2026-06-01T12:00:00Z"


def problem(status: int, title: str, detail: str) -> tuple[int, Any]:
    return status, {"type": "about:blank", "title": title, "status": status, "detail": detail}


class SaladApi(ProviderServer):
    """``slow``: how many listings it takes until a new instance is listed, and until one that stops is gone."""

    def __init__(self, slow: int = 0) -> None:
        super().__init__()
        self.replicas = 0
        self.instances: dict[str, dict[str, Any]] = {}
        self.quota = 100
        self.may_scale = True
        self.free_gpus = 100
        self.slow = slow
        self.ignores_costs = False
        self._due: dict[str, int] = {}  # listings until an instance appears or is gone
        self._numbers = itertools.count(1)

    def lose_node(self) -> str:
        """Take the oldest instance away and replace it, as the platform does; returns its id."""
        gone = next(iter(self.instances))
        del self.instances[gone]
        self._settle()
        return gone

    def run_all(self) -> None:
        for instance in self.instances.values():
            if instance["state"] == "allocating":
                instance["state"] = "running"

    def answer(self, call: Call) -> tuple[int, Any]:
        if call.headers.get("salad-api-key") != KEY:
            return problem(401, "Unauthorized", "The API key is not valid.")
        is_patch = call.method == "PATCH"
        if is_patch and call.headers.get("content-type") != "application/merge-patch+json":
            return problem(415, "Unsupported Media Type", "A merge patch is needed.")
        match call.method, call.path.removeprefix("/").removeprefix(GROUP).strip("/").split("/"):
            case "GET", [""]:
                return 200, self._group()
            case "PATCH", [""]:
                return self._scale(call.body)
            case "GET", ["instances"]:
                return 200, {"instances": self._list()}
            case "PATCH", ["instances", instance_id] if instance_id in self.instances:
                self.instances[instance_id]["deletion_cost"] = call.body["deletion_cost"]
                return 200, self.instances[instance_id]
            case "GET", ["organizations", "acme-corp", "quotas"]:
                used = {"container_replicas_quota": self.quota, "container_replicas_used": self.replicas}
                return 200, {"container_groups_quotas": used}
            case "POST", ["organizations", "acme-corp", "availability", "sce-gpu-availability"]:
                assert call.body["gpu_classes"] == self._group()["container"]["resources"]["gpu_classes"]
                return 200, {"available_gpu_high": 0, "available_gpu_batch": self.free_gpus}
        return problem(404, "Not Found", "The container group could not be found.")

    def _group(self) -> dict[str, Any]:
        resources = {"cpu": 4, "memory": 16384, "gpu_classes": ["ed563892-aacd-40f5-80b7-90c9be6c759b"]}
        return {
            "id": "9b7eea4d-7b7b-4b0b-8b0b-3b0b7b7b7b7b",
            "name": "workers",
            "display_name": "workers",
            "organization_name": "acme-corp",
            "project_name": "llm",
            "replicas": self.replicas,
            "priority": "batch",
            "container": {"image": "spillway/worker", "command": [], "resources": resources, "priority": "batch"},
            "country_codes": [],
            "autostart_policy": True,
            "restart_policy": "always",
            "current_state": {
                "status": "running" if self.replicas else "stopped",
                "start_time": UPDATED,
                "finish_time": UPDATED,
                "instance_status_counts": {
                    f"{state}_count": sum(one["state"] == state for one in self.instances.values())
                    for state in ("allocating", "creating", "running", "stopping")
                },
            },
            "pending_change": False,
            "scheduled-scaling-enabled": False,
            "scaling-actions": [],
            "create_time": UPDATED,
            "update_time": UPDATED,
            "version": 1,
        }

    def _scale(self, change: dict[str, Any]) -> tuple[int, Any]:
        wanted = change["replicas"]
        if not 0 <= wanted <= 500:
            return problem(400, "Bad Request", "replicas must be between 0 and 500.")
        if not self.may_scale:
            return problem(403, "Forbidden", "The API key may not change container groups.")
        if wanted > self.quota:
            return problem(403, "Forbidden", "The organization cannot have more replicas.")
        self.replicas = wanted
        self._settle()
        return 200, self._group()

    def _settle(self) -> None:
        alive = [one for one in self.instances.values() if one["state"] != "stopping"]
        for _ in range(self.replicas - len(alive)):
            instance_id = str(uuid.UUID(int=next(self._numbers)))
            self._due[instance_id] = self.slow
            self.instances[instance_id] = {
                "id": instance_id,
                "machine_id": str(uuid.uuid4()),
                "state": "allocating",
                "update_time": UPDATED,
                "version": 1,
                "deletion_cost": 0,
            }
        if not self.ignores_costs:
            alive.sort(key=lambda one: one["deletion_cost"])  # of equal costs the oldest: nothing says which
        for one in alive[: max(0, len(alive) - self.replicas)]:
            one["state"] = "stopping"
            self._due[one["id"]] = self.slow + 1

    def _list(self) -> list[dict[str, Any]]:
        listed = []
        for instance_id, instance in list(self.instances.items()):
            is_due = self._due.get(instance_id, 0) <= 0
            self._due[instance_id] = self._due.get(instance_id, 0) - 1
            if instance["state"] == "stopping" and is_due:
                del self.instances[instance_id]
            elif instance["state"] == "stopping" or is_due:
                listed.append(instance)
        return listed
