"""A fake of SkyPilot: the few functions that the runner calls, over a JSON file instead of clouds.

Names, arguments and what is raised are those of skypilot 0.14.1 (sky/client/sdk.py); nothing else of it is here.
"""

import contextlib
import fcntl
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from sky import exceptions

STATE = Path(os.environ["FAKE_SKYPILOT_STATE"])
_results: dict[str, Any] = {}
_numbers = itertools.count(1)


class Resources:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.labels = fields.get("labels")
        if fields.get("infra") and fields.get("cloud"):
            raise ValueError("Cannot specify both infra and cloud")  # as the real one does

    def copy(self, **override: Any) -> "Resources":
        return Resources(**{**self.fields, **override})


class Task:
    def __init__(self, config: dict[str, Any]) -> None:
        self.envs = dict(config.get("envs") or {})
        self.resources = {Resources(**(config.get("resources") or {}))}

    @staticmethod
    def from_yaml(path: str) -> "Task":
        return Task(yaml.safe_load(Path(path).read_text()))

    def update_envs(self, envs: dict[str, str]) -> "Task":
        self.envs |= envs
        return self

    def set_resources(self, resources: set[Resources]) -> "Task":
        self.resources = resources
        return self


@contextlib.contextmanager
def _changing() -> Iterator[dict[str, Any]]:
    with STATE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state = json.load(file)
        yield state
        file.seek(0)
        file.truncate()
        json.dump(state, file)


def _request(result: Any) -> str:
    request_id = f"request-{next(_numbers)}"
    _results[request_id] = result
    return request_id


def get(request_id: str) -> Any:
    result = _results[request_id]
    if isinstance(result, Exception):
        raise result
    return result


def status(cluster_names: list[str] | None = None, refresh: Any = None, all_users: bool = False) -> str:
    assert all_users
    with _changing() as state:
        print("Fetching cluster statuses")  # noqa: T201 - the real one prints, too
        return _request(
            [
                SimpleNamespace(name=name, status=SimpleNamespace(value=cluster["status"]))
                for name, cluster in state["clusters"].items()
                if (cluster_names is None or name in cluster_names) and _is_listed(cluster)
            ]
        )


def launch(task: Task, cluster_name: str, *, down: bool) -> str:
    assert down
    with _changing() as state:
        refusal = _refusal(state["refuses"])
        if refusal is not None:
            return _request(refusal)
        [resources] = task.resources
        jobs = state["clusters"].get(cluster_name, {"jobs": 0})["jobs"] + 1  # a cluster that is there gets one more
        state["clusters"][cluster_name] = {"status": "INIT", "envs": task.envs, "jobs": jobs, **resources.fields}
        dies = _count_down(state)
        if dies:  # the real one lists a cluster some seconds after it was asked for, and before the launch is over
            state["clusters"][cluster_name]["unlisted"] = 2
    if dies:
        os._exit(1)  # after it is done, before there is an answer
    if state["refuses"] == "SetupFails":  # the cluster is there
        return _request(RuntimeError("Failed to run setup commands on an instance. (exit code 1)."))
    return _request((1, None))


def down(cluster_name: str) -> str:
    with _changing() as state:
        if state["clusters"].pop(cluster_name, None) is None:
            return _request(exceptions.ClusterDoesNotExist(cluster_name))
        dies = _count_down(state)
    if dies:
        os._exit(1)
    return _request(None)


def _is_listed(cluster: dict[str, Any]) -> bool:
    cluster["unlisted"] = cluster.get("unlisted", 0) - 1
    is_listed: bool = cluster["unlisted"] < 0
    if is_listed:
        del cluster["unlisted"]
    return is_listed


def _count_down(state: dict[str, Any]) -> bool:
    dies: bool = state["dies"] > 0
    state["dies"] -= dies
    return dies


def _refusal(kind: str) -> Any:
    unavailable = exceptions.ResourcesUnavailableError("Failed to provision all possible launchable resources.")
    match kind:
        case "NoCapacity":
            return unavailable.with_failover_history([Exception("InsufficientInstanceCapacity in us-east-1a")])
        case "OverQuota":
            return unavailable.with_failover_history([Exception("VcpuLimitExceeded: your current vCPU limit of 0")])
        case "NothingFits":
            return unavailable
        case "LaunchRefused":
            return exceptions.NoCloudAccessError("No cloud access is set up.")
    return None
