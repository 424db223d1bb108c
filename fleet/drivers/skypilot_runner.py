"""SkyPilot in a separate process, started by ``fleet.drivers.skypilot`` with the Python that it is installed in.

One JSON object a line: ``{"id": 1, "verb": "list", "arguments": {}}`` in, ``{"id": 1, "result": …}`` or ``{"id": 1,
"error": "NoCapacity", "text": "…"}`` out, in any order. It imports nothing of ours, and ends with its standard input.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

import sky
from sky import exceptions
from sky.utils.common import StatusRefreshMode

REFUSED = (
    exceptions.ClusterOwnerIdentityMismatchError,
    exceptions.InvalidClusterNameError,
    exceptions.InvalidCloudConfigs,
    exceptions.InvalidCloudCredentials,
    exceptions.NoCloudAccessError,
    exceptions.NotSupportedError,
    exceptions.PermissionDeniedError,
    exceptions.ResourcesMismatchError,
    exceptions.UserRequestRejectedByPolicy,
    OSError,  # of the task file
    ValueError,  # likewise
)
QUOTA_WORDS = ("quota", "limitexceeded", "maxspotinstancecountexceeded")


def launch(
    *,
    name: str,
    task: str,
    infra: str,
    use_spot: bool,
    labels: dict[str, str],
    environment: dict[str, str],
    wait_s: float,
) -> str:
    """Ask for a cluster, unless it is there; returns its name once it is up, or after ``wait_s``."""
    if sky.get(sky.status(cluster_names=[name], all_users=True)):
        return name
    chosen = sky.Task.from_yaml(task).update_envs(environment)
    place = {"cloud": None, "region": None, "zone": None, "infra": infra} if infra else {}
    resources = [
        one.copy(use_spot=use_spot, labels={**(one.labels or {}), **labels}, **place) for one in chosen.resources
    ]
    chosen.set_resources(type(chosen.resources)(resources))
    _wait(sky.launch(chosen, cluster_name=name, down=True), wait_s)
    return name


def list_clusters() -> list[dict[str, str]]:
    """Return all clusters; SkyPilot asks the clouds about spot machines."""
    records = sky.get(sky.status(refresh=StatusRefreshMode.AUTO, all_users=True))
    return [{"name": record.name, "status": record.status.value} for record in records]


def down(*, name: str, wait_s: float) -> None:
    """End a cluster; returns once it is gone, or after ``wait_s``."""
    with contextlib.suppress(exceptions.ClusterDoesNotExist):
        _wait(sky.down(name), wait_s)


def _wait(request_id: object, wait_s: float) -> None:
    """Wait for a request up to a limit; it continues in SkyPilot's server. Raises its exception."""
    failures: list[Exception] = []

    def get() -> None:
        try:
            sky.get(request_id)
        except Exception as error:  # noqa: BLE001 - it is raised below
            failures.append(error)

    waiting = threading.Thread(target=get, daemon=True)
    waiting.start()
    waiting.join(wait_s)
    if failures:
        raise failures[0]


VERBS: dict[str, Callable[..., object]] = {"launch": launch, "list": list_clusters, "down": down}


def kind_of(error: Exception) -> str:
    """Return the name of the error in ``fleet.errors`` that this is."""
    if isinstance(error, exceptions.ResourcesUnavailableError):
        tried = [str(one).lower() for one in error.failover_history]
        if not tried:  # no offer of any cloud fits the task
            return "LaunchRefused"
        if all(any(word in text for word in QUOTA_WORDS) for text in tried):
            return "OverQuota"
        return "NoCapacity"
    return "LaunchRefused" if isinstance(error, REFUSED) else "ProviderError"


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"id": request["id"], "result": VERBS[request["verb"]](**request["arguments"])}
    except Exception as error:  # noqa: BLE001 - every error is reported to the driver
        text = f"{type(error).__name__}: {error}"
        return {"id": request["id"], "error": kind_of(error), "text": text}


def main() -> None:
    """Answer requests, each in its own thread, until the input ends."""
    # SkyPilot prints: what it prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    writing = threading.Lock()

    def serve(line: str, to: TextIO) -> None:
        text = json.dumps(_answer(json.loads(line)))
        with writing:
            to.write(text + "\n")
            to.flush()

    for line in sys.stdin:
        threading.Thread(target=serve, args=(line, answers), daemon=True).start()


if __name__ == "__main__":
    main()
