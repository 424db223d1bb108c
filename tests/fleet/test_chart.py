"""The controller of deploy/helm/spillway: its command, with its configuration, scales its Deployment."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import migrations
from fleet.machine import MACHINE_LABEL
from protocol.nats.bus import Bus
from protocol.nats.topology import QueueBounds, apply
from tests.fleet.kubernetes_api import KubernetesApi
from tests.fleet.rigs import write_kubeconfig
from tests.unit.deploy.chart import config_text, containers, rendered
from tests.unit.deploy.description import CONFIG_TARGET, ROOT
from tests.waiting import until


@pytest.fixture
def environment(tmp_path: Path, nats_url: str) -> dict[str, str]:
    """What the pod's Secret says, and where the mock of the API server has the Deployment."""
    database_url = f"sqlite:///{tmp_path / 'spillway.db'}"
    migrations.upgrade(database_url)
    return {
        **os.environ,
        "SPILLWAY_NATS__URLS": f'["{nats_url}"]',
        "SPILLWAY_DATABASE__URL": database_url,
        "SPILLWAY_DATA_DIR": str(tmp_path / "data"),
        "SPILLWAY_POOLS__VLLM__FLEET__DRIVER__NAMESPACE": "llm",
        "SPILLWAY_POOLS__VLLM__FLEET__DRIVER__DEPLOYMENT": "workers",
    }


@contextlib.asynccontextmanager
async def controller(tmp_path: Path, environment: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    manifests = rendered("fleet")
    [container] = [one for manifest in manifests for one in containers(manifest) if one["name"] == "fleet"]
    (tmp_path / "spillway.toml").write_text(config_text(manifests))
    paths = {CONFIG_TARGET: str(tmp_path / "spillway.toml"), "/tmp/ready": str(tmp_path / "ready")}
    arguments = [paths.get(word, word) for word in container["args"]]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "spillway", *arguments, cwd=ROOT, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_controller_starts_the_least_number_of_workers_and_leaves_them(
    tmp_path: Path, nats_url: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await Bus.connect(nats_url, name="test")
    await apply(bus, ["qwen-7b"], QueueBounds())
    await bus.close()
    with KubernetesApi() as cluster:
        write_kubeconfig(tmp_path / "kubeconfig", cluster.url, monkeypatch)
        async with controller(tmp_path, {**environment, "KUBECONFIG": str(tmp_path / "kubeconfig")}) as process:
            await until(lambda: any(MACHINE_LABEL in pod["metadata"]["labels"] for pod in list(cluster.pods.values())))
            assert (tmp_path / "ready").exists()
            process.terminate()
            assert await process.wait() == 0
        assert cluster.replicas == 1
        assert len(cluster.pods) == 1
