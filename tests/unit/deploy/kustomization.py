"""What `kubectl kustomize` makes of a folder of deploy/kubernetes, for the few fields that are used there."""

from pathlib import Path
from typing import Any, Final

import yaml

from tests.unit.deploy.description import ROOT

KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
KNOWN: Final = {"apiVersion", "kind", "namespace", "resources", "replicas", "images", "patches", "configMapGenerator"}
Manifest = dict[str, Any]


def documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.load_all(path.read_text(), yaml.CSafeLoader) if document is not None]


def rendered(folder: Path) -> list[Manifest]:
    """All manifests of a kustomization. The configuration's name gets no hash."""
    said = yaml.load((folder / "kustomization.yaml").read_text(), yaml.CSafeLoader)
    assert set(said) <= KNOWN, f"{folder}: teach this function {set(said) - KNOWN}"
    found: list[Manifest] = []
    for name in said["resources"]:
        found += rendered(folder / name) if (folder / name).is_dir() else documents(folder / name)
    for generator in said.get("configMapGenerator", []):
        others = [one for one in found if (one["kind"], one["metadata"]["name"]) != ("ConfigMap", generator["name"])]
        assert (generator.get("behavior") == "replace") == (len(others) < len(found))
        data = {name: (folder / name).read_text() for name in generator["files"]}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}
        found = [*others, config_map]
    for wanted in said.get("replicas", []):
        [scaled] = [one for one in found if (one["kind"], one["metadata"]["name"]) == ("Deployment", wanted["name"])]
        scaled["spec"]["replicas"] = wanted["count"]
    for patch in said.get("patches", []):
        _patch(found, patch)
    for image in said.get("images", []):
        for container in (one for manifest in found for one in containers(manifest)):
            name, _, tag = container["image"].rpartition(":")
            if name == image["name"]:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
    for manifest in found:
        if manifest["kind"] != "Namespace":
            manifest["metadata"]["namespace"] = said["namespace"]
    return found


def _patch(manifests: list[Manifest], patch: dict[str, Any]) -> None:
    """A JSON patch (RFC 6902) of one manifest."""
    target = (patch["target"]["kind"], patch["target"]["name"])
    [manifest] = [one for one in manifests if (one["kind"], one["metadata"]["name"]) == target]
    for step in yaml.safe_load(patch["patch"]):
        _apply(step, manifest)


def _apply(step: dict[str, Any], manifest: Manifest) -> None:
    """Remove a field, or add to the end of a list."""
    *way, last = step["path"].strip("/").split("/")
    node: Any = manifest
    for part in way:
        node = node[int(part)] if isinstance(node, list) else node[part]
    if step["op"] == "remove":
        del node[last]
    else:
        assert (step["op"], last) == ("add", "-"), f"teach this function {step}"
        node.append(step["value"])


def pod_of(manifest: Manifest) -> Manifest | None:
    """The pod's specification, of whatever makes pods."""
    return manifest["spec"]["template"]["spec"] if manifest["kind"] in {"Deployment", "Job"} else None


def containers(manifest: Manifest) -> list[Manifest]:
    pod = pod_of(manifest)
    return [] if pod is None else [*pod.get("initContainers", []), *pod["containers"]]
