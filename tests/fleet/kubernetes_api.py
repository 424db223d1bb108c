"""A mock of a Kubernetes API server: one namespace, a Deployment, its scale, pods, and what controllers make of them.

It follows the API's reference (https://kubernetes.io/docs/reference/kubernetes-api/) and, for which pods go when a
Deployment is scaled in, the order of ActivePodsWithRanks in kubernetes/pkg/controller/controller_utils.go. It is no API
server: nothing here says what a real one does beyond that.
"""

import itertools
from typing import Any

from tests.fleet.provider_server import Call, ProviderServer

TOKEN = "service-account-token"
DEPLOYMENT = "/apis/apps/v1/namespaces/llm/deployments/workers"
PODS = "/api/v1/namespaces/llm/pods"
NOW = "2026-06-01T12:00:00Z"
COST = "controller.kubernetes.io/pod-deletion-cost"


def kind(name: str, kind: str, *verbs: str) -> dict[str, Any]:
    return {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": list(verbs)}


# What kubectl asks for before it does anything.
DISCOVERY: dict[str, Any] = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [
            {
                "name": "apps",
                "versions": [{"groupVersion": "apps/v1", "version": "v1"}],
                "preferredVersion": {"groupVersion": "apps/v1", "version": "v1"},
            }
        ],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [kind("pods", "Pod", "get", "list", "patch", "delete")],
    },
    "/apis/apps/v1": {
        "kind": "APIResourceList",
        "groupVersion": "apps/v1",
        "resources": [
            kind("deployments", "Deployment", "get"),
            {**kind("deployments/scale", "Scale", "get", "patch"), "group": "autoscaling", "version": "v1"},
        ],
    },
}


def failure(code: int, reason: str, message: str) -> tuple[int, Any]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason}
    return code, {**status, "code": code}


class KubernetesApi(ProviderServer):
    """``slow``: how many listings it takes until a change of size is acted on, and until a deleted pod is gone."""

    def __init__(self, slow: int = 0) -> None:
        super().__init__()
        self.replicas = 0
        self.pods: dict[str, dict[str, Any]] = {}
        self.nodes = 100  # pods beyond this number stay Pending
        self.pod_quota = 100
        self.may_scale = True
        self.selector: dict[str, Any] = {"matchLabels": {"app": "workers"}}
        self.slow = slow
        self._act_in = 0
        self._gone_in: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def add(self, app: str, **labels: str) -> str:
        number = next(self._numbers)
        name = f"{app}-6d4cf56db6-{number:05d}"
        running = sum(pod["status"]["phase"] == "Running" for pod in self.pods.values())
        self.pods[name] = {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": {
                "name": name,
                "namespace": "llm",
                "uid": f"00000000-0000-0000-0000-{number:012d}",
                "creationTimestamp": NOW,
                "labels": {"app": app, "pod-template-hash": "6d4cf56db6", **labels},
                "annotations": {},
            },
            "status": {"phase": "Running" if running < self.nodes else "Pending"},
        }
        return name

    def lose_node(self) -> str:
        """Take the oldest pod of the Deployment away; its controller replaces it. Returns the pod's name."""
        name = next(name for name in self.pods if name.startswith("workers-"))
        del self.pods[name]
        self._control()
        return name

    def answer(self, call: Call) -> tuple[int, Any]:
        is_kubectl = call.headers.get("user-agent", "").startswith("kubectl/")  # it sends no token without TLS
        if call.headers.get("authorization") != f"Bearer {TOKEN}" and not is_kubectl:
            return failure(401, "Unauthorized", "Unauthorized")
        return (200, DISCOVERY[call.path]) if call.path in DISCOVERY else self._answer(call)

    def _answer(self, call: Call) -> tuple[int, Any]:
        patch = call.headers.get("content-type", "").removeprefix("application/").removesuffix("+json")
        match call.method, call.path.removeprefix(DEPLOYMENT).removeprefix(PODS).strip("/"):
            case "GET", "" if call.path == DEPLOYMENT:
                return 200, self._deployment()
            case "GET", "scale":
                return 200, self._scale()
            case "PATCH", "scale" if patch == "json-patch":
                return self._patch_scale(call.body)
            case "PATCH", "scale" if patch == "merge-patch":
                return self._patch_scale(
                    [{"op": "replace", "path": "/spec/replicas", "value": call.body["spec"]["replicas"]}]
                )
            case "GET", "":
                return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": self._list(call)}
            case "GET", name if name in self.pods:
                return 200, self.pods[name]
            case "PATCH", name if name in self.pods and patch == "merge-patch":
                for part, values in call.body["metadata"].items():
                    self.pods[name]["metadata"][part] |= values
                return 200, self.pods[name]
            case "DELETE", name if name in self.pods:
                self._delete(name)
                self._control()
                return 200, self.pods.get(name, {"kind": "Status", "status": "Success"})
        return failure(404, "NotFound", f"{call.path} not found")

    def _deployment(self) -> dict[str, Any]:
        conditions = [{"type": "Available", "status": "True", "reason": "MinimumReplicasAvailable"}]
        if self.replicas > self.pod_quota:
            message = f'pods "workers-x" is forbidden: exceeded quota: gpus, used: pods={self.pod_quota}'
            conditions.append(
                {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
            )
        return {
            "kind": "Deployment",
            "apiVersion": "apps/v1",
            "metadata": {"name": "workers", "namespace": "llm", "uid": "00000000-0000-0000-0000-000000000000"},
            "spec": {
                "replicas": self.replicas,
                "selector": self.selector,
                "template": {"metadata": {"labels": {"app": "workers"}}, "spec": {"containers": []}},
            },
            "status": {"replicas": len(self._active()), "conditions": conditions},
        }

    def _scale(self) -> dict[str, Any]:
        scale = {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": {"name": "workers", "namespace": "llm"}}
        return {**scale, "spec": {"replicas": self.replicas}, "status": {"replicas": len(self._active())}}

    def _patch_scale(self, patch: list[dict[str, Any]]) -> tuple[int, Any]:
        if not self.may_scale:
            return failure(403, "Forbidden", 'deployments.apps "workers" is forbidden: cannot patch deployments/scale')
        for step in patch:
            assert step["path"] == "/spec/replicas"
            if step["op"] == "test" and step["value"] != self.replicas:
                return failure(422, "Invalid", "the server rejected our request due to an error in our request")
            if step["op"] == "replace":
                self.replicas = step["value"]
        self._act_in = self.slow
        self._control()
        return 200, self._scale()

    def _list(self, call: Call) -> list[dict[str, Any]]:
        self._act_in -= 1
        self._control()
        for name in [name for name, looks in self._gone_in.items() if looks <= 0]:
            del self.pods[name], self._gone_in[name]
        self._gone_in = {name: looks - 1 for name, looks in self._gone_in.items()}
        selector = dict(part.split("=", 1) for part in call.query.get("labelSelector", "").split(",") if part)
        return [pod for pod in self.pods.values() if selector.items() <= pod["metadata"]["labels"].items()]

    def _active(self) -> list[str]:
        return [
            name
            for name, pod in self.pods.items()
            if pod["metadata"]["labels"]["app"] == "workers" and "deletionTimestamp" not in pod["metadata"]
        ]

    def _control(self) -> None:
        """Do what the Deployment's and the ReplicaSet's controllers do."""
        if self._act_in > 0:
            return
        while len(self._active()) < min(self.replicas, self.pod_quota):
            self.add("workers")
        latest_first = self._active()[::-1]
        by_rank = sorted(latest_first, key=self._rank)
        for name in by_rank[: max(0, len(by_rank) - self.replicas)]:
            self._delete(name)

    def _rank(self, name: str) -> tuple[bool, int]:
        pod = self.pods[name]
        return pod["status"]["phase"] == "Running", int(pod["metadata"]["annotations"].get(COST, "0"))

    def _delete(self, name: str) -> None:
        if "deletionTimestamp" not in self.pods[name]["metadata"]:
            self.pods[name]["metadata"]["deletionTimestamp"] = NOW
            self._gone_in[name] = self.slow
