"""A provider to try each driver with: a stand-in for its API, and what a test must be able to do to it.

A new driver joins ``test_drivers.py`` with a rig of its own in ``RIGS``.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
import yaml
from pydantic import SecretStr

from fleet.drivers import registry
from fleet.drivers.base import Driver
from fleet.drivers.process import LABELS, id_of
from fleet.errors import LaunchRefused, NoCapacity, OverQuota
from fleet.machine import labels_of, name_of
from fleet.settings import (
    AnyDriverSettings,
    Ec2Settings,
    KubernetesSettings,
    ProcessSettings,
    RunPodSettings,
    SaladSettings,
    SkyPilotSettings,
)
from tests.fleet import kubernetes_api, runpod_api, salad_api
from tests.fleet.ec2_box import CREDENTIALS, Ec2Box

FLEET = "test-fleet"
POOL = "gpu"
WORKER = (sys.executable, "-c", "import time; time.sleep(600)")  # that a process pool starts


class Rig(Protocol):
    """A provider with nothing of ours."""

    @property
    def fleet(self) -> str:
        """What labels call the installation."""
        ...

    labels_machines: bool  # each machine carries a label of its own
    finds_orders: bool  # the same order, launched again, is the same machine

    @property
    def refusals(self) -> Collection[type[LaunchRefused]]:
        """What its API can express."""
        ...

    def driver(self) -> Driver:
        """Make a driver anew."""
        ...

    def alive(self) -> set[str]:
        """Return what is really there, whoever it belongs to; without what is on its way out."""
        ...

    def add_foreign(self) -> str:
        """Add a machine of somebody else; returns its id."""
        ...

    def lose_answer(self) -> None:
        """Do the next change, and answer nothing."""
        ...

    def refuse(self, error: type[LaunchRefused] | None) -> None:
        """Refuse launches with this error; None: no longer."""
        ...

    def go_away(self) -> None:
        """Be out of reach from now on."""
        ...


def driver_of(settings: AnyDriverSettings, tier: str = "on-demand") -> Driver:
    return registry.create(
        settings, fleet_id=FLEET, pool=POOL, tier=tier, worker_command=WORKER, log_dir=Path(tempfile.gettempdir())
    )


class RunPodRig:
    fleet = FLEET
    labels_machines = True
    finds_orders = True
    refusals = (NoCapacity, OverQuota, LaunchRefused)

    def __init__(self, api: runpod_api.RunPodApi) -> None:
        self.api = api

    def driver(self) -> Driver:
        return driver_of(
            RunPodSettings(
                kind="runpod",
                api_key=SecretStr(runpod_api.KEY),
                gpu_types=("NVIDIA L40S", "NVIDIA A40"),
                image="spillway/worker",
                url=f"{self.api.url}/v2",
            )
        )

    def alive(self) -> set[str]:
        return set(self.api.pods)

    def add_foreign(self) -> str:
        return self.api.add(name_of(labels_of("other-fleet", "m-0123456789abcdef", POOL)))

    def lose_answer(self) -> None:
        self.api.lose_changes = 1

    def refuse(self, error: type[LaunchRefused] | None) -> None:
        self.api.free_gpus = dict.fromkeys(self.api.free_gpus, 0 if error is NoCapacity else 100)
        self.api.balance_usd = 0.0 if error is OverQuota else 50.0
        self.api.knows_image = error is not LaunchRefused

    def go_away(self) -> None:
        self.api.stop()


class SaladRig:
    fleet = FLEET
    labels_machines = False
    finds_orders = False
    refusals = (NoCapacity, OverQuota, LaunchRefused)

    def __init__(self, api: salad_api.SaladApi) -> None:
        self.api = api

    def driver(self) -> Driver:
        return driver_of(
            SaladSettings(
                kind="salad",
                api_key=SecretStr(salad_api.KEY),
                organization="acme-corp",
                project="llm",
                container_group="workers",
                url=self.api.url,
            )
        )

    def alive(self) -> set[str]:
        return {one["id"] for one in self.api.instances.values() if one["state"] != "stopping"}

    def add_foreign(self) -> str:
        return "0e9f0b5c-4d1c-4b55-8e0a-000000000000"  # an instance of another group: it is at other addresses

    def lose_answer(self) -> None:
        self.api.lose_changes = 1

    def refuse(self, error: type[LaunchRefused] | None) -> None:
        self.api.free_gpus = 0 if error is NoCapacity else 100
        self.api.quota = self.api.replicas if error is OverQuota else 100
        self.api.may_scale = error is not LaunchRefused

    def go_away(self) -> None:
        self.api.stop()


class KubernetesRig:
    fleet = FLEET
    labels_machines = True
    finds_orders = True
    refusals = (OverQuota, LaunchRefused)  # a pod without a node is Pending, perhaps until there is one more node

    def __init__(self, api: kubernetes_api.KubernetesApi) -> None:
        self.api = api

    def driver(self) -> Driver:
        return driver_of(KubernetesSettings(kind="kubernetes", namespace="llm", deployment="workers"))

    def alive(self) -> set[str]:
        return {name for name, pod in self.api.pods.items() if "deletionTimestamp" not in pod["metadata"]}

    def add_foreign(self) -> str:
        return self.api.add("database")

    def lose_answer(self) -> None:
        self.api.lose_changes = 1

    def refuse(self, error: type[LaunchRefused] | None) -> None:
        self.api.pod_quota = self.api.replicas if error is OverQuota else 100
        self.api.may_scale = error is not LaunchRefused

    def go_away(self) -> None:
        self.api.stop()


class Ec2Rig:
    fleet = FLEET
    labels_machines = True
    finds_orders = True
    refusals = (NoCapacity, OverQuota, LaunchRefused)

    def __init__(self, box: Ec2Box) -> None:
        self.box = box

    def driver(self) -> Driver:
        return driver_of(Ec2Settings(**self.box.driver("spillway worker")), tier="spot")

    def alive(self) -> set[str]:
        return set(self.box.live())

    def add_foreign(self) -> str:
        return self.box.add_foreign()

    def lose_answer(self) -> None:
        self.box.lose_answers = 1

    def refuse(self, error: type[LaunchRefused] | None) -> None:
        codes = {OverQuota: "MaxSpotInstanceCountExceeded", LaunchRefused: "InvalidAMIID.NotFound"}
        self.box.refusal = None if error is None else codes.get(error)
        self.box.capacity = {} if error is NoCapacity else None

    def go_away(self) -> None:
        self.box.stop()


class ProcessRig:
    labels_machines = True
    finds_orders = True
    refusals = (LaunchRefused,)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fleet = f"{FLEET}-{uuid.uuid4().hex[:8]}"  # other tests have processes on this machine, too
        self._command = WORKER
        self._foreign: list[subprocess.Popen[bytes]] = []

    @property
    def fleet(self) -> str:
        return self._fleet

    def driver(self) -> Driver:
        return registry.create(
            ProcessSettings(kind="process", places=("here",)),
            fleet_id=self._fleet,
            pool=POOL,
            tier="spot",
            worker_command=self._command,
            log_dir=self._folder,
        )

    def alive(self) -> set[str]:
        return {id_of(one) for one in self._processes()}

    def _processes(self) -> list[psutil.Process]:
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self._fleet in one.environ().get(LABELS, "") and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    def add_foreign(self) -> str:
        labels = labels_of(f"{self._fleet}x", "m-0123456789abcdef", POOL)
        self._foreign.append(subprocess.Popen(WORKER, env={**os.environ, LABELS: json.dumps(labels)}))
        process = psutil.Process(self._foreign[-1].pid)
        while LABELS not in process.environ():  # for a moment a new process still has none
            time.sleep(0.001)
        return id_of(process)

    def lose_answer(self) -> None:
        pytest.skip("there is no wire between a driver and its own machine")

    def refuse(self, error: type[LaunchRefused] | None) -> None:
        pytest.skip("a driver's command is its own: what cannot be started never could")

    def go_away(self) -> None:
        pytest.skip("its own machine is never out of reach")

    def end_all(self) -> None:
        for one in self._processes():
            one.kill()
        for process in self._foreign:
            process.kill()
            process.wait()


class SkyPilotRig:
    fleet = FLEET
    labels_machines = True
    finds_orders = True
    refusals = (NoCapacity, OverQuota, LaunchRefused)

    def __init__(self, folder: Path) -> None:
        self._state = folder / "clusters.json"
        self._state.write_text(json.dumps({"clusters": {}, "refuses": "", "dies": 0}))
        self._task = folder / "task.yaml"
        self._task.write_text(yaml.safe_dump({"resources": {"infra": "aws"}, "run": "spillway worker"}))
        self._python = sys.executable

    @property
    def clusters(self) -> dict[str, Any]:
        return dict(json.loads(self._state.read_text())["clusters"])

    def _change(self, **fields: Any) -> None:
        self._state.write_text(json.dumps(json.loads(self._state.read_text()) | fields))

    def driver(self) -> Driver:
        return driver_of(
            SkyPilotSettings(kind="skypilot", task=str(self._task), python=self._python, infra=("aws/us-east-1", "gcp"))
        )

    def alive(self) -> set[str]:
        return set(self.clusters)

    def add_foreign(self) -> str:
        self._change(clusters={**self.clusters, "my-dev-box": {"status": "UP"}})
        return "my-dev-box"

    def lose_answer(self) -> None:
        self._change(dies=1)

    def refuse(self, error: type[LaunchRefused] | None) -> None:
        self._change(refuses=error.__name__ if error else "")

    def go_away(self) -> None:
        self._python = "/nonexistent/python"


@asynccontextmanager
async def _runpod(_folder: Path, _monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunPodRig]:
    with runpod_api.RunPodApi() as api:
        yield RunPodRig(api)


@asynccontextmanager
async def _salad(_folder: Path, _monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SaladRig]:
    with salad_api.SaladApi(slow=1) as api:
        yield SaladRig(api)


@asynccontextmanager
async def _kubernetes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubernetesRig]:
    with kubernetes_api.KubernetesApi(slow=1) as api:
        write_kubeconfig(folder / "kubeconfig", api.url, monkeypatch)
        yield KubernetesRig(api)


@asynccontextmanager
async def _ec2(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ec2Rig]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with Ec2Box(folder / "ec2", {}, boots=False).running() as box:
        yield Ec2Rig(box)


@asynccontextmanager
async def _process(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessRig]:
    rig = ProcessRig(folder)
    try:
        yield rig
    finally:
        rig.end_all()


@asynccontextmanager
async def _skypilot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SkyPilotRig]:
    rig = SkyPilotRig(folder)
    monkeypatch.setenv("FAKE_SKYPILOT_STATE", str(folder / "clusters.json"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("fake_skypilot")))
    yield rig


def write_kubeconfig(path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {"token": kubernetes_api.TOKEN}}],
    }
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))


RIGS: dict[str, Callable[[Path, pytest.MonkeyPatch], AbstractAsyncContextManager[Rig]]] = {
    "process": _process,
    "ec2": _ec2,
    "runpod": _runpod,
    "salad": _salad,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
}
