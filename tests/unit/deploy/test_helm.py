"""deploy/helm/spillway: valid manifests, with no more rights than needed, that fit Spillway. No cluster is at hand."""

import json
import os
import re
import shlex
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from fleet.settings import KubernetesSettings
from gateway.batches.storage.registry import FOLDER
from gateway.endpoints.routes import health_router
from pool_worker.settings import ServerEngineSettings
from protocol import subjects
from spillway.cli import app
from spillway.config import Config, load_config
from tests.shipped import NATS_CONFIG
from tests.unit.deploy.chart import (
    CHART,
    CUSTOM_KINDS,
    EXAMPLES,
    HELM_FOLDER,
    RELEASE,
    Manifest,
    config_text,
    containers,
    documents,
    one,
    pod_of,
    rendered,
    run_helm,
    template,
)
from tests.unit.deploy.description import CONFIG_TARGET, DOCKERFILES, ROOT, compose, options_of
from tests.unit.deploy.test_boards import exposed

pytestmark = pytest.mark.slow

STOP_MARGIN_S = 5.0  # between what a process allows itself and its being killed
OLDEST, NEWEST = (
    "1.29",
    "1.37",
)  # of Kubernetes: the older has what is used first, the newer is the newest schema at hand
WITH_GATEWAYS = [name for name in EXAMPLES if name != "remote-pool"]
ON_VLLM = ["fleet", "keda", "production", "remote-pool", "vllm"]
SECRET = {
    "nats-urls": '["nats://spillway:n1@nats:4222"]',
    "database-url": "postgresql://spillway:p@db:5432/spillway",
    "key-pepper": "k" * 64,
}
PLAIN = {"SPILLWAY_DATA_DIR", "SPILLWAY_GATEWAY__HOST", "SPILLWAY_GATEWAY__PORT"}
OF_FILES = {"SPILLWAY_NATS__CREDENTIALS": "/etc/spillway-credentials", "SPILLWAY_NATS__CA_FILE": "/etc/spillway-ca"}
PODS = [
    pytest.param(manifest, id=f"{example}-{manifest['metadata']['name']}")
    for example in EXAMPLES
    for manifest in rendered(example)
    if pod_of(manifest) is not None
]
GATEWAY, LEDGER, MIGRATE, FLEET = (f"{RELEASE}-{part}" for part in ("gateway", "ledger", "migrate", "fleet"))
VLLM = f"{RELEASE}-worker-vllm"
REMOTE = f"{RELEASE}-worker-coreweave"


def is_ours(container: Manifest) -> bool:
    return "spillway-" in container["image"]


def secrets_of(container: Manifest) -> dict[str, str]:
    """By the variable's name: which key of the Secret "spillway" it gets."""
    given = {v["name"]: v["valueFrom"].get("secretKeyRef", {}) for v in container.get("env", []) if "valueFrom" in v}
    return {name: source["key"] for name, source in given.items() if source.get("name") == "spillway"}


def config_for(manifests: list[Manifest], container: Manifest, tmp_path: Path) -> Config:
    """The settings that a container reads: the mounted file under its environment."""
    path = tmp_path / "spillway.toml"
    path.write_text(config_text(manifests))
    env = {v["name"]: v["value"] for v in container["env"] if v["name"] in PLAIN}
    env |= {name: SECRET[key] for name, key in secrets_of(container).items()}
    if not tomllib.loads(path.read_text()).get("nats", {}).get("allow_plaintext"):
        env["SPILLWAY_NATS__URLS"] = env["SPILLWAY_NATS__URLS"].replace("nats://", "tls://")
    return load_config(path, env=env)


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_finds_no_fault(example: str) -> None:
    values = str(HELM_FOLDER / f"examples/{example}.yaml")
    done = run_helm("lint", "--strict", str(CHART), "--namespace", "spillway", "--values", values)
    assert done.returncode == 0, done.stdout + done.stderr


def test_manifests_are_valid() -> None:
    different = {json.dumps(manifest): manifest for example in EXAMPLES for manifest in rendered(example)}
    for manifest in different.values():
        assert manifest["metadata"]["namespace"] == "spillway"
        if manifest["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(manifest, NEWEST, strict=True)
            if pod_of(manifest) is not None:
                kubernetes_validate.validate(manifest, OLDEST, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**one(rendered("demo"), "Service", GATEWAY), "colour": 1}, NEWEST, strict=True)


@pytest.mark.parametrize("example", EXAMPLES)
def test_names_are_told_apart(example: str) -> None:
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in rendered(example)]
    assert len(names) == len(set(names))


def test_what_a_release_is_called_begins_all_its_names() -> None:
    values = ["--values", str(HELM_FOLDER / "examples/demo.yaml")]
    done = run_helm("template", "llm", str(CHART), "--namespace", "spillway", *values)
    for manifest in filter(None, yaml.load_all(done.stdout, yaml.CSafeLoader)):
        assert manifest["metadata"]["name"].startswith("llm-spillway")


@pytest.mark.parametrize("manifest", PODS)
def test_pod_has_no_rights_it_does_not_need(manifest: Manifest) -> None:
    pod = pod_of(manifest)
    assert pod is not None
    assert pod["automountServiceAccountToken"] is (pod.get("serviceAccountName") == FLEET)
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for container in containers(manifest):
        context = {**pod["securityContext"], **container["securityContext"]}
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert ":" in container["image"]
        assert not container["image"].endswith(":latest")
        if is_ours(container):
            assert (context["runAsNonRoot"], context["runAsUser"], context["runAsGroup"]) == (True, 10001, 10001)
            assert context["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("manifest", PODS)
def test_volumes_and_mounts_are_the_same(manifest: Manifest) -> None:
    pod = pod_of(manifest)
    assert pod is not None
    claimed = [claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", [])]
    mounted = {mount["name"] for container in containers(manifest) for mount in container["volumeMounts"]}
    assert mounted == {*claimed, *(volume["name"] for volume in pod["volumes"])}
    assert all(volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if "emptyDir" in volume)
    for container in containers(manifest):  # a server-side apply, as Helm 4 does it, refuses a name that comes twice
        names = [variable["name"] for variable in container.get("env", [])]
        assert len(names) == len(set(names))


def test_images_are_those_that_are_built_here() -> None:
    ours = {c["image"] for example in EXAMPLES for m in rendered(example) for c in containers(m) if is_ours(c)}
    built = {
        tag for path in DOCKERFILES for tag in re.findall(r"^#.* -t (spillway-\S+)", path.read_text(), re.MULTILINE)
    }
    assert {image.removeprefix("registry.example.com/") for image in ours} <= built
    assert ours >= {service["image"] for service in compose()["services"].values() if "worker" in service["image"]}
    assert "spillway-worker:0.2.0-cuda" in ours


def test_one_value_changes_registry_tag_and_policy_of_all_images() -> None:
    given = ("image.registry=r.example.com/llm/", "image.tag=0.3.0", "image.pullPolicy=Always", "image.pullSecrets={p}")
    manifests = rendered("fleet", *(word for value in given for word in ("--set", value)))
    pods = [pod for pod in map(pod_of, manifests) if pod]
    assert all(pod["imagePullSecrets"] == [{"name": "p"}] for pod in pods)
    every = [container for manifest in manifests for container in containers(manifest)]
    assert {container["imagePullPolicy"] for container in every} == {"Always"}
    ours = {container["image"] for container in every if is_ours(container)}
    assert ours == {f"r.example.com/llm/spillway-{name}:0.3.0" for name in ("fleet", "gateway", "sidecar")}


@pytest.mark.parametrize("example", EXAMPLES)
def test_no_manifest_has_a_secret_s_value(example: str) -> None:
    assert "Secret" not in {manifest["kind"] for manifest in rendered(example)}
    for container in (c for manifest in rendered(example) for c in containers(manifest)):
        assert set(secrets_of(container).values()) <= set(SECRET)
        said = {variable["name"] for variable in container.get("env", []) if "value" in variable}
        assert said <= PLAIN | OF_FILES.keys()


def test_each_pod_gets_only_the_secrets_it_uses() -> None:
    held = {
        m["metadata"]["name"]: {key for c in containers(m) for key in secrets_of(c).values()}
        for m in [*rendered("fleet"), *rendered("demo")]
        if pod_of(m) is not None
    }
    assert held == {
        FLEET: {"nats-urls", "database-url"},
        GATEWAY: set(SECRET),
        LEDGER: {"nats-urls", "database-url", "key-pepper"},
        MIGRATE: {"database-url"},
        f"{RELEASE}-worker-demo": {"nats-urls"},
        VLLM: {"nats-urls"},
    }


def test_each_pod_gets_its_own_credentials_of_the_queue_and_who_vouches_for_it() -> None:
    manifests = rendered("production", "--set", "fleet.enabled=true")
    found = {}
    for manifest in manifests:
        pod = pod_of(manifest)
        if pod is None or manifest["metadata"]["name"] == MIGRATE:
            continue
        volumes = {volume["name"]: volume.get("secret") for volume in pod["volumes"]}
        [item] = volumes["credentials"]["items"]
        assert item["key"] == item["path"]
        found[manifest["metadata"]["name"]] = item["path"]
        assert volumes["ca"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
        [worker] = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in worker["volumeMounts"]}
        values = {variable["name"]: variable.get("value") for variable in worker["env"]}
        assert values["SPILLWAY_NATS__CREDENTIALS"] == mounts["credentials"] == OF_FILES["SPILLWAY_NATS__CREDENTIALS"]
        assert values["SPILLWAY_NATS__CA_FILE"] == f"{mounts['ca']}/ca.crt"
    # As NatsSection.credentials_of looks for them in a folder.
    assert found == {GATEWAY: "gateway.creds", LEDGER: "ledger.creds", FLEET: "fleet.creds", VLLM: "pool-vllm.creds"}


def test_a_controller_of_machines_elsewhere_has_their_address_of_the_queue_and_their_keys(tmp_path: Path) -> None:
    text = config_text(rendered("production"))
    path = tmp_path / "spillway.toml"
    path.write_text(f'{text}\n[fleet]\nworker_keys = "/etc/spillway-credentials/worker-keys.json"\n')
    settings = ("fleet.enabled=true", "secret.keys.fleetNatsUrls=fleet-nats-urls")
    options = [word for setting in settings for word in ("--set", setting)]
    manifests = rendered("production", *options, "--set-file", f"config={path}")
    fleet = one(manifests, "Deployment", FLEET)
    assert secrets_of(containers(fleet)[0])["SPILLWAY_NATS__URLS"] == "fleet-nats-urls"
    assert secrets_of(containers(one(manifests, "StatefulSet", GATEWAY))[0])["SPILLWAY_NATS__URLS"] == "nats-urls"
    pod = pod_of(fleet)
    assert pod is not None
    [secret] = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "credentials"]
    assert [item["path"] for item in secret["items"]] == ["fleet.creds", "worker-keys.json"]
    external = one(manifests, "ExternalSecret", "spillway")["spec"]["data"]
    assert {entry["secretKey"] for entry in external} == {*SECRET, "fleet-nats-urls"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_commands_and_configuration_fit_each_other(example: str, tmp_path: Path) -> None:
    manifests = rendered(example)
    for manifest in manifests:
        pod = pod_of(manifest)
        for container in containers(manifest):
            if pod is None or not is_ours(container):
                continue
            options = options_of(container["args"])
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            if manifest["metadata"]["name"] == MIGRATE:
                assert (options["config"], str(options["data"])) == (None, "/var/lib/spillway")
                assert mounts == {"/tmp", "/var/lib/spillway"}
                continue
            assert str(options["config"]) == CONFIG_TARGET
            config = config_for(manifests, container, tmp_path)
            assert {str(Path(CONFIG_TARGET).parent), "/tmp", str(config.data_dir)} <= mounts
            if options.get("pool"):
                worker = config.worker_settings(options["pool"])
                assert pod["terminationGracePeriodSeconds"] >= worker.drain_s + STOP_MARGIN_S
                path = getattr(worker.engine, "path", None) or getattr(worker.engine, "tokenizer", None)
                assert path in {"/opt/spillway/models/spillway-demo", "/models/qwen-7b"}
                assert ("/models" in mounts) == str(path).startswith("/models")
            if options.get("ready_file"):
                assert container["readinessProbe"]["exec"]["command"] == ["test", "-f", str(options["ready_file"])]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_configuration_arrives_as_it_was_written(example: str) -> None:
    """With its comments, and integers that stay integers."""
    written = yaml.safe_load((HELM_FOLDER / f"examples/{example}.yaml").read_text())["config"]
    assert config_text(rendered(example)).strip() == written.strip()


def test_another_configuration_is_a_roll_out(tmp_path: Path) -> None:
    path = tmp_path / "spillway.toml"
    path.write_text(config_text(rendered("fleet")).replace("max_sequences = 64", "max_sequences = 65"))
    before, after = rendered("fleet"), rendered("fleet", "--set-file", f"config={path}")
    for old, new in zip(before, after, strict=True):
        if pod_of(old) is not None:
            same = old["spec"]["template"] == new["spec"]["template"]
            assert same == (old["metadata"]["name"] == MIGRATE)


@pytest.mark.parametrize("example", WITH_GATEWAYS)
def test_gateways_leave_before_they_are_killed(example: str, tmp_path: Path) -> None:
    manifests = rendered(example)
    gateway = one(manifests, "StatefulSet", GATEWAY)
    [container] = containers(gateway)
    config = config_for(manifests, container, tmp_path)
    pod, timeouts = gateway["spec"]["template"]["spec"], config.gateway.timeouts
    assert timeouts.leave_s is not None
    assert pod["terminationGracePeriodSeconds"] == 80
    assert pod["terminationGracePeriodSeconds"] >= timeouts.leave_s + timeouts.shutdown_s + STOP_MARGIN_S
    ready = container["readinessProbe"]
    assert timeouts.leave_s > ready["periodSeconds"] * ready["failureThreshold"] + ready["timeoutSeconds"]
    assert container["ports"] == [{"name": "http", "containerPort": config.gateway.port}]
    assert config.gateway.host == "0.0.0.0"
    assert config.nats.queue.replicas == 3
    paths = {route.path for route in health_router(None).routes}  # type: ignore[arg-type, attr-defined]
    probed = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probed == {"startupProbe": "/startupz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}
    assert set(probed.values()) <= paths
    [spread] = pod["topologySpreadConstraints"]
    labels = gateway["spec"]["template"]["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    least = gateway["spec"].get("replicas") or one(manifests, "HorizontalPodAutoscaler", GATEWAY)["spec"]["minReplicas"]
    assert least > one(manifests, "PodDisruptionBudget", GATEWAY)["spec"]["maxUnavailable"]


def test_longer_times_of_the_configuration_are_longer_grace_periods(tmp_path: Path) -> None:
    text = config_text(rendered("vllm")).replace("shutdown_s = 60.0", "shutdown_s = 600.0")
    path = tmp_path / "spillway.toml"
    path.write_text(text.replace("drain_s = 25.0", "drain_s = 100"))
    manifests = rendered("vllm", "--set-file", f"config={path}")
    grace = {
        m["metadata"]["name"]: pod["terminationGracePeriodSeconds"]
        for m in manifests
        if (pod := pod_of(m)) and "terminationGracePeriodSeconds" in pod
    }
    assert grace == {GATEWAY: 620, LEDGER: 30, VLLM: 135}


def test_the_spool_outlives_its_pod_and_files_of_batches_are_shared(tmp_path: Path) -> None:
    gateway = one(rendered("production", "--set", "gateway.filesClaim=shared"), "StatefulSet", GATEWAY)
    [claim] = gateway["spec"]["volumeClaimTemplates"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "2Gi"}},
    }
    [container] = containers(gateway)
    config = config_for(rendered("production"), container, tmp_path)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts[claim["metadata"]["name"]] == str(config.data_dir)
    assert mounts["files"] == str(config.data_dir / FOLDER)
    pod = pod_of(gateway)
    assert pod is not None
    assert {"name": "files", "persistentVolumeClaim": {"claimName": "shared"}} in pod["volumes"]
    assert gateway["spec"]["serviceName"] in {m["metadata"]["name"] for m in rendered("demo") if m["kind"] == "Service"}


def test_an_autoscaler_takes_the_number_of_gateways_over() -> None:
    manifests = rendered("production")
    autoscaler = one(manifests, "HorizontalPodAutoscaler", GATEWAY)["spec"]
    assert autoscaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": GATEWAY}
    assert (autoscaler["minReplicas"], autoscaler["maxReplicas"]) == (3, 8)
    assert "replicas" not in one(manifests, "StatefulSet", GATEWAY)["spec"]
    assert one(rendered("demo"), "StatefulSet", GATEWAY)["spec"]["replicas"] == 2
    assert "HorizontalPodAutoscaler" not in {manifest["kind"] for manifest in rendered("demo")}


@pytest.mark.parametrize("example", WITH_GATEWAYS)
def test_the_gateways_know_the_pools_of_their_cluster(example: str) -> None:
    config = tomllib.loads(config_text(rendered(example)))
    running = {options_of(c["args"]).get("pool") for m in rendered(example) for c in containers(m) if is_ours(c)}
    assert running - {None} == set(config["pools"]) - {"coreweave"}  # which is elsewhere


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_node_takes_one_gateway_and_one_worker_of_a_pool_at_a_time(example: str) -> None:
    manifests = rendered(example)
    budgets = [m["spec"] for m in manifests if m["kind"] == "PodDisruptionBudget"]
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        if manifest["kind"] in {"Deployment", "StatefulSet"} and name not in {LEDGER, FLEET}:
            assert manifest["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"] in {"gateway", "worker"}
            [budget] = [b for b in budgets if b["selector"] == manifest["spec"]["selector"]]
            assert budget["maxUnavailable"] == 1


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_selector_finds_its_own_pods_and_no_others(example: str) -> None:
    makers = [m for m in rendered(example) if m["kind"] in {"Deployment", "StatefulSet"}]
    for manifest in makers:
        labels = manifest["spec"]["selector"]["matchLabels"].items()
        found = [other for other in makers if labels <= other["spec"]["template"]["metadata"]["labels"].items()]
        assert found == [manifest]


def test_the_migration_runs_before_the_rest_and_needs_the_secret_alone() -> None:
    job = one(rendered("production"), "Job", MIGRATE)
    hooks = job["metadata"]["annotations"]
    assert hooks["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert hooks["helm.sh/hook-delete-policy"] == "before-hook-creation"
    pod = pod_of(job)
    assert pod is not None
    assert [volume for volume in pod["volumes"] if "emptyDir" not in volume] == []
    external = one(rendered("production"), "ExternalSecret", "spillway")
    annotations = external["metadata"]["annotations"]
    assert annotations["helm.sh/hook"] == hooks["helm.sh/hook"]
    assert int(annotations["helm.sh/hook-weight"]) < int(hooks.get("helm.sh/hook-weight", 0))
    every = [m for example in EXAMPLES for m in rendered(example)]
    assert {m["kind"] for m in every if "helm.sh/hook" in str(m)} == {"Job", "ExternalSecret"}


def test_the_migration_s_command_needs_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [container] = containers(one(rendered("production"), "Job", MIGRATE))
    arguments = [str(tmp_path / "data") if word == "/var/lib/spillway" else word for word in container["args"]]
    monkeypatch.chdir(tmp_path)
    assert set(secrets_of(container)) == {"SPILLWAY_DATABASE__URL"}
    done = CliRunner().invoke(app, arguments, env={"SPILLWAY_DATABASE__URL": f"sqlite:///{tmp_path}/spillway.db"})
    assert (done.exit_code, "database schema: none -> " in done.stderr) == (0, True), done.output


def test_a_claim_for_copies_of_the_queue_makes_a_job_of_them(tmp_path: Path) -> None:
    assert "CronJob" not in {manifest["kind"] for manifest in rendered("production")}
    options = ("--set", "backup.claim=copies", "--set", "backup.keepHours=24")
    manifests = rendered("production", *options)
    job = one(manifests, "CronJob", f"{RELEASE}-backup")
    before_gateways = rendered("production", *options, "--set", "home=false")
    assert one(before_gateways, "CronJob", f"{RELEASE}-backup") == job
    assert not {"Job", "StatefulSet"} & {manifest["kind"] for manifest in before_gateways}
    for release in (OLDEST, NEWEST):
        kubernetes_validate.validate(job, release, strict=True)
    test_pod_has_no_rights_it_does_not_need(job)
    test_volumes_and_mounts_are_the_same(job)
    pod = pod_of(job)
    assert pod is not None
    [credentials] = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "credentials"]
    assert [item["path"] for item in credentials["items"]] == ["admin.creds"]
    [container] = pod["containers"]
    assert set(secrets_of(container)) == {"SPILLWAY_NATS__URLS"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    shell, options_of_it, script = container["command"]
    (tmp_path / "spillway").write_text('#!/bin/sh\necho "$@" && mkdir "$3"\n')
    (tmp_path / "spillway").chmod(0o755)
    copies = tmp_path / "copies"
    for name, age_s in (("old", 25 * 3600), ("new", 23 * 3600)):
        (copies / name).mkdir(parents=True)
        os.utime(copies / name, (time.time() - age_s,) * 2)
    done = subprocess.run(
        [shell, options_of_it, script.replace(mounts["backups"], str(copies))],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    made = done.stdout.removeprefix("queue backup ").strip()
    assert {str(path) for path in copies.iterdir()} == {str(copies / "new"), made}


def test_a_packaged_chart_is_the_same(tmp_path: Path) -> None:
    """Rules and boards are links that lead out of the chart."""
    assert run_helm("package", str(CHART), "--destination", str(tmp_path)).returncode == 0
    [package] = tmp_path.glob("*.tgz")
    values = ["--values", str(HELM_FOLDER / "examples/production.yaml")]
    done = run_helm("template", RELEASE, str(package), "--namespace", "spillway", *values)
    assert done.stdout == template("production").stdout


def test_a_store_of_secrets_fills_the_secret_that_the_pods_read() -> None:
    spec = one(rendered("production"), "ExternalSecret", "spillway")["spec"]
    assert spec["secretStoreRef"] == {"kind": "ClusterSecretStore", "name": "vault"}
    assert spec["target"] == {"name": "spillway", "creationPolicy": "Orphan"}  # it must outlive the hook
    assert {entry["secretKey"] for entry in spec["data"]} == set(SECRET)
    assert all(e["remoteRef"] == {"key": "spillway/production", "property": e["secretKey"]} for e in spec["data"])
    options = ("secret.external.enabled=true", "secret.external.store.name=vault")
    remote = rendered("remote-pool", *(word for option in options for word in ("--set", option)))
    assert [e["secretKey"] for e in one(remote, "ExternalSecret", "spillway")["spec"]["data"]] == ["nats-urls"]


def test_both_clouds_have_the_same_pool() -> None:
    home, remote = (tomllib.loads(config_text(rendered(example))) for example in ("vllm", "remote-pool"))
    assert remote["pools"] == {"coreweave": home["pools"]["coreweave"]}
    assert remote["models"] == home["models"]


def test_a_cluster_with_gpus_only_has_no_home() -> None:
    kinds = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in rendered("remote-pool")}
    assert kinds == {
        ("ConfigMap", RELEASE),
        ("Deployment", REMOTE),
        ("PodDisruptionBudget", REMOTE),
        ("NetworkPolicy", f"{RELEASE}-names-only"),
        ("NetworkPolicy", f"{RELEASE}-to-queue"),
    }


# --- who reaches whom


def selected(policy: Manifest, labels: dict[str, str]) -> bool:
    selector = policy["spec"]["podSelector"]
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        if (labels.get(rule["key"]) in rule["values"]) != (rule["operator"] == "In"):
            return False
    return True


def policies_of(manifests: list[Manifest], name: str) -> list[Manifest]:
    """The policies of the pods that are called so."""
    [labels] = [
        m["spec"]["template"]["metadata"]["labels"] for m in manifests if pod_of(m) and m["metadata"]["name"] == name
    ]
    return [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy" and selected(m, labels)]


def way_out(manifests: list[Manifest], name: str) -> dict[int, list[Any]]:
    """By port: the peers that these pods may reach; an empty list: any."""
    rules = [rule for policy in policies_of(manifests, name) for rule in policy.get("egress", [])]
    return {port["port"]: rule.get("to", []) for rule in rules for port in rule["ports"]}


def in_namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def in_network(cidr: str) -> Manifest:
    return {"ipBlock": {"cidr": cidr}}


@pytest.mark.parametrize("example", [name for name in EXAMPLES if name != "production"])
def test_workers_reach_the_queue_alone_and_nobody_reaches_them(example: str) -> None:
    manifests = rendered(example)
    workers = [m["metadata"]["name"] for m in manifests if "-worker-" in m["metadata"]["name"] and pod_of(m)]
    assert workers
    for name in workers:
        mine = policies_of(manifests, name)
        assert {"Ingress", "Egress"} <= {kind for policy in mine for kind in policy["policyTypes"]}
        assert [rule for policy in mine for rule in policy.get("ingress", [])] == []
        assert sorted(way_out(manifests, name)) == [53, 4222]


def test_a_pool_may_be_let_out_further() -> None:
    manifests = rendered("production")
    assert way_out(manifests, VLLM)[4318] == [in_namespace("monitoring")]
    assert 4318 not in way_out(manifests, LEDGER)


@pytest.mark.parametrize("example", EXAMPLES)
def test_only_the_gateways_take_callers_and_all_policies_name_pods_that_exist(example: str) -> None:
    manifests = rendered(example)
    policies = [manifest for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    pods = {m["metadata"]["name"]: m["spec"]["template"]["metadata"]["labels"] for m in manifests if pod_of(m)}
    open_to = {
        name for name, labels in pods.items() for p in policies if selected(p, labels) and p["spec"].get("ingress")
    }
    assert open_to == ({GATEWAY} if example in WITH_GATEWAYS else set())
    queue = {"app.kubernetes.io/name": "nats"}
    for policy in policies:
        assert any(selected(policy, labels) for labels in [*pods.values(), queue])
    assert any(selected(policy, queue) for policy in policies) == (example in WITH_GATEWAYS)
    if example in WITH_GATEWAYS:
        service = one(manifests, "Service", GATEWAY)["spec"]
        assert service["selector"].items() <= pods[GATEWAY].items()


def test_callers_are_the_namespaces_and_addresses_that_are_named() -> None:
    def sources(*options: str) -> list[Any]:
        manifests = rendered(*options)
        rules = [r for policy in policies_of(manifests, GATEWAY) for r in policy.get("ingress", [])]
        assert [rule["ports"] for rule in rules] == [[{"port": 8000}]]
        return list(rules[0]["from"])

    assert sources("demo") == [{"namespaceSelector": {}}]
    assert sources("production") == [in_namespace("haproxy-ingress"), in_namespace("monitoring")]
    balancer = sources("production", "--set", "networkPolicies.callers.cidrs={10.1.0.0/16}")
    assert in_network("10.1.0.0/16") in balancer


def test_gateways_reach_what_is_named_and_nothing_else() -> None:
    manifests = rendered("production")
    out = way_out(manifests, GATEWAY)
    assert sorted(out) == [53, 443, 4222, 4318, 5432]
    assert out[5432] == [in_network("10.20.0.0/24")]
    assert out[53] == [in_namespace("kube-system"), in_network("169.254.20.10/32")]
    assert out[4222] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "nats"}}}]
    assert sorted(way_out(rendered("demo"), GATEWAY)) == [53, 4222, 5432]
    assert sorted(way_out(manifests, MIGRATE)) == [53, 5432]
    webhooks = way_out(manifests, LEDGER)[443]
    assert "10.0.0.0/8" in webhooks[0]["ipBlock"]["except"]
    names = way_out(rendered("demo", "--set", "networkPolicies.dns.namespaces=null"), GATEWAY)[53]
    assert names == []  # any


def test_the_queue_is_open_to_us_to_those_outside_who_are_named_and_to_what_watches() -> None:
    def open_to(example: str, *options: str) -> dict[int, list[Any]]:
        [policy] = [m["spec"] for m in rendered(example, *options) if m["metadata"]["name"] == f"{RELEASE}-queue"]
        return {port["port"]: rule["from"] for rule in policy["ingress"] for port in rule["ports"]}

    [clients] = open_to("demo")[4222]
    pods = [m["spec"]["template"]["metadata"]["labels"] for m in rendered("fleet") if pod_of(m)]
    assert all(clients["podSelector"]["matchLabels"].items() <= labels.items() for labels in pods)
    assert sorted(open_to("demo")) == [4222, 6222]
    assert open_to("vllm")[4222][1:] == [in_network("198.51.100.0/24")]
    leaf = open_to("demo", "--set", "networkPolicies.queue.leafCidrs={198.51.100.0/24}")
    assert leaf[7422] == [in_network("198.51.100.0/24")]
    assert open_to("keda")[8222] == [in_namespace("keda")]
    assert open_to("production")[8222] == [in_namespace("monitoring")]
    assert way_out(rendered("remote-pool"), REMOTE)[4222] == [in_network("203.0.113.10/32")]
    assert way_out(rendered("remote-pool", "--set", "networkPolicies.queue.cidrs=null"), REMOTE)[4222] == []  # any
    balancer = rendered("demo", "--set", "networkPolicies.queue.cidrs={203.0.113.10/32}")
    assert way_out(balancer, GATEWAY)[4222][1:] == [in_network("203.0.113.10/32")]


def test_policies_can_be_left_to_others() -> None:
    manifests = rendered("production", "--set", "networkPolicies.enabled=false")
    assert "NetworkPolicy" not in {manifest["kind"] for manifest in manifests}


def test_the_ingress_publishes_the_api_and_nothing_else() -> None:
    ingress = one(rendered("production"), "Ingress", GATEWAY)
    [rule] = ingress["spec"]["rules"]
    [path] = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/v1", "Prefix")
    service = one(rendered("production"), "Service", GATEWAY)
    backend = {"name": GATEWAY, "port": {"name": service["spec"]["ports"][0]["name"]}}
    assert path["backend"]["service"] == backend
    assert ingress["spec"]["tls"] == [{"hosts": ["llm.example.com"], "secretName": "llm-example-com"}]
    assert ingress["spec"]["ingressClassName"] == "haproxy"
    annotations = ingress["metadata"]["annotations"]
    assert annotations["cert-manager.io/cluster-issuer"] == "letsencrypt"  # beside what streams need
    total_s = tomllib.loads(config_text(rendered("production")))["gateway"]["timeouts"].get("total_s", 3600)
    for name, value in annotations.items():
        if "timeout" in name or "idle" in value:
            assert int(re.findall(r"\d+", value)[-1]) > total_s
    assert not {"Ingress"} & {m["kind"] for m in rendered("demo")}


# --- pools


@pytest.mark.parametrize("example", ON_VLLM)
def test_the_worker_is_beside_the_server_that_it_is_configured_for(example: str, tmp_path: Path) -> None:
    manifests = rendered(example)
    name = "coreweave" if example == "remote-pool" else "vllm"
    pod = pod_of(one(manifests, "Deployment", f"{RELEASE}-worker-{name}"))
    assert pod is not None
    [vllm], [worker] = pod["initContainers"], pod["containers"]
    assert vllm["restartPolicy"] == "Always"  # a side-car: ended after the worker
    assert vllm["image"] == "vllm/vllm-openai:v0.32.0"
    arguments = dict(zip(vllm["args"][::2], vllm["args"][1::2], strict=True))
    settings = config_for(manifests, worker, tmp_path).worker_settings(name)
    engine = settings.engine
    assert isinstance(engine, ServerEngineSettings)
    assert engine.url == f"http://{arguments['--host']}:{arguments['--port']}"
    assert (arguments["--served-model-name"],) == settings.models
    assert arguments["--model"] == engine.tokenizer
    assert int(arguments["--max-num-seqs"]) == engine.max_sequences
    assert arguments["--gpu-memory-utilization"] == "0.92"
    started = vllm["startupProbe"]
    assert started["periodSeconds"] * started["failureThreshold"] >= engine.ready_s
    for probe in ("startupProbe", "livenessProbe"):
        assert f"urlopen('{engine.url}/health', " in vllm[probe]["exec"]["command"][-1]
    assert vllm["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in worker["resources"]["limits"]


def test_all_that_a_pool_says_arrives(tmp_path: Path) -> None:
    more = {
        "replicas": 5,
        "gpus": 4,
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
        "image": "registry.example.com/mine:1",
        "vllm": {"image": "vllm/vllm-openai:v0.33.0", "args": ["--max-model-len", 8192], "shmSize": "8Gi"},
    }
    (tmp_path / "more.yaml").write_text(yaml.safe_dump({"pools": {"vllm": more}}))
    manifests = rendered("production", "--values", str(tmp_path / "more.yaml"))
    workers = one(manifests, "Deployment", VLLM)
    pod = pod_of(workers)
    assert pod is not None
    [vllm], [worker] = pod["initContainers"], pod["containers"]
    assert workers["spec"]["replicas"] == 5
    assert vllm["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert vllm["args"][-4:] == ["--tensor-parallel-size", "4", "--max-model-len", "8192"]
    assert (vllm["image"], worker["image"]) == ("vllm/vllm-openai:v0.33.0", "registry.example.com/mine:1")
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert {toleration["key"] for toleration in pod["tolerations"]} == {"nvidia.com/gpu", "spot"}
    assert pod["affinity"] == {"nodeAffinity": {}}
    assert (pod["runtimeClassName"], pod["priorityClassName"]) == ("nvidia", "inference")
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in worker["env"]
    [shm] = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["sizeLimit"] == "8Gi"
    kubernetes_validate.validate(workers, NEWEST, strict=True)


@pytest.mark.parametrize(
    ("tokenizer", "model", "loaded"),
    [
        ("/models/qwen-7b/tokenizer.json", "", "/models/qwen-7b"),
        ("/models/qwen-7b", "s3://bucket/qwen-7b", "s3://bucket/qwen-7b"),
    ],
)
def test_vllm_loads_the_tokenizer_s_folder_or_what_is_named(
    tokenizer: str, model: str, loaded: str, tmp_path: Path
) -> None:
    (tmp_path / "spillway.toml").write_text(config_text(rendered("keda")).replace("/models/qwen-7b", tokenizer))
    options = ("--set-file", f"config={tmp_path / 'spillway.toml'}", "--set", f"pools.vllm.vllm.model={model}")
    [vllm, _] = containers(one(rendered("keda", *options), "Deployment", VLLM))
    assert vllm["args"][:2] == ["--model", loaded]


def test_our_engine_gets_its_gpu_and_cpus_what_they_compile_for() -> None:
    workers = one(rendered("gpu"), "Deployment", f"{RELEASE}-worker-gpu")
    [worker] = containers(workers)
    assert worker["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": "1"}
    assert workers["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    demo = one(rendered("demo"), "Deployment", f"{RELEASE}-worker-demo")
    [worker] = containers(demo)
    config = tomllib.loads(config_text(rendered("demo")))
    assert float(worker["resources"]["limits"]["cpu"]) == config["pools"]["demo"]["engine"]["threads"]
    assert "strategy" not in demo["spec"]
    assert "tolerations" not in demo["spec"]["template"]["spec"]


def test_keda_counts_every_lane_and_has_a_ceiling() -> None:
    spec = one(rendered("keda"), "ScaledObject", VLLM)["spec"]
    workers = one(rendered("keda"), "Deployment", spec["scaleTargetRef"]["name"])
    assert "replicas" not in workers["spec"]
    assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    triggers = {trigger["name"]: trigger for trigger in spec["triggers"]}
    assert tuple(triggers) == tuple(f"{lane}_0" for lane in subjects.LANES)
    assert spec["advanced"]["scalingModifiers"]["formula"].split(" + ") == list(triggers)
    for lane, trigger in zip(subjects.LANES, triggers.values(), strict=True):
        assert trigger["type"] == "nats-jetstream"
        given = trigger["metadata"]
        assert given["consumer"] == subjects.job_consumer("qwen-7b", lane)
        assert given["stream"] == subjects.INTERACTIVE_STREAM
        assert given["account"] in NATS_CONFIG.read_text()
    assert not any("fallback" in part for part in (spec, spec["advanced"]))


def test_keda_counts_every_model_of_a_pool_in_the_queue_that_it_serves(tmp_path: Path) -> None:
    models = ["org/qwen.v1", "größe"]
    text = config_text(rendered("keda")).replace("[models.qwen-7b]", "[models.'org/qwen.v1']\n[models.'größe']")
    text = text.replace('models = ["qwen-7b"]', f"models = {json.dumps(models, ensure_ascii=False)}\ntrusted = true")
    (tmp_path / "spillway.toml").write_text(text)
    manifests = rendered("keda", "--set-file", f"config={tmp_path / 'spillway.toml'}")
    triggers = one(manifests, "ScaledObject", VLLM)["spec"]["triggers"]
    assert [trigger["metadata"]["consumer"] for trigger in triggers] == [
        subjects.job_consumer(subjects.queue_of(model, trusted=True), lane)
        for model in models
        for lane in subjects.LANES
    ]
    assert len({trigger["name"] for trigger in triggers}) == len(triggers)


# --- the controller


def test_the_controller_scales_the_deployment_of_its_pool_and_nobody_else_does(tmp_path: Path) -> None:
    manifests = rendered("fleet")
    [container] = containers(one(manifests, "Deployment", FLEET))
    [(name, pool)] = config_for(manifests, container, tmp_path).pools.items()
    assert pool.fleet is not None
    driver = pool.fleet.driver
    assert isinstance(driver, KubernetesSettings)
    assert driver.context is None  # the pod's own service account
    workers = one(manifests, "Deployment", driver.deployment)
    assert workers["metadata"]["namespace"] == driver.namespace
    assert "replicas" not in workers["spec"]
    assert set(workers["spec"]["selector"]) == {"matchLabels"}
    assert not {"ScaledObject", "HorizontalPodAutoscaler"} & {manifest["kind"] for manifest in manifests}
    [vllm, worker] = containers(workers)
    assert options_of(worker["args"])["pool"] == name
    assert {
        "name": "SPILLWAY_MACHINE",
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
    } in worker["env"]
    started = vllm["startupProbe"]
    assert pool.fleet.start_limit_s > started["periodSeconds"] * started["failureThreshold"]
    assert 1 <= pool.fleet.min_workers < pool.fleet.max_workers


def test_only_the_controller_has_rights_at_the_api_server_and_they_are_for_one_deployment() -> None:
    manifests = rendered("fleet")
    accounts = {pod["serviceAccountName"] for pod in map(pod_of, manifests) if pod and "serviceAccountName" in pod}
    assert accounts == {FLEET}
    binding, role = one(manifests, "RoleBinding", FLEET), one(manifests, "Role", FLEET)
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": FLEET}
    namespace = one(manifests, "ServiceAccount", FLEET)["metadata"]["namespace"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": FLEET, "namespace": namespace}]
    assert [rule.get("resourceNames") for rule in role["rules"]] == [[VLLM], [VLLM], None]
    assert [rule["resources"] for rule in role["rules"]] == [["deployments"], ["deployments/scale"], ["pods"]]
    assert [name for name in EXAMPLES if any("Role" in m["kind"] for m in rendered(name))] == ["fleet"]
    elsewhere = rendered("vllm", "--set", "fleet.enabled=true")  # of machines at clouds alone
    assert not any("Role" in manifest["kind"] for manifest in elsewhere)
    pod = pod_of(one(elsewhere, "Deployment", FLEET))
    assert pod is not None
    assert pod["automountServiceAccountToken"] is False


def test_the_controller_reaches_queue_database_and_api_server_and_nobody_reaches_it() -> None:
    manifests = rendered("fleet", "--set", "networkPolicies.apiServer.cidrs={10.0.0.1/32}")
    mine = policies_of(manifests, FLEET)
    assert {"Ingress", "Egress"} <= {kind for policy in mine for kind in policy["policyTypes"]}
    assert [rule for policy in mine for rule in policy.get("ingress", [])] == []
    out = way_out(manifests, FLEET)
    assert sorted(out) == [53, 443, 4222, 5432, 6443]
    assert out[6443] == out[443] == [in_network("10.0.0.1/32")]


# --- monitoring


async def test_prometheus_scrapes_the_gateways_as_its_rules_expect() -> None:
    spec = one(rendered("production"), "ServiceMonitor", GATEWAY)["spec"]
    service = one(rendered("production"), "Service", GATEWAY)
    assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    [endpoint] = spec["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"] == {
        "type": "Bearer",
        "credentials": {"name": "spillway-metrics", "key": "key"},
    }
    [scrape] = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    labels = set().union(*(await exposed()).values())
    assert labels & {"container", "endpoint", "namespace", "pod", "service"}  # of the operator's targets
    assert endpoint["honorLabels"] is True
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": scrape["job_name"]}]


def test_rules_and_boards_are_those_that_are_shipped() -> None:
    manifests = rendered("production")
    rule = one(manifests, "PrometheusRule", RELEASE)
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    files = sorted((ROOT / "deploy/prometheus/rules").glob("*.yml"))
    shipped = [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    assert rule["spec"]["groups"] == shipped
    assert len(shipped) > 1
    boards = {
        name: json.loads(text)
        for m in manifests
        if m["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in m["data"].items()
    }
    files = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
    assert boards == {f"spillway-{path.name}": json.loads(path.read_text()) for path in files}
    assert not CUSTOM_KINDS & {m["kind"] for m in rendered("demo")}


def test_custom_resources_are_of_the_versions_that_their_operators_serve() -> None:
    every = [m for example in EXAMPLES for m in rendered(example) if m["kind"] in CUSTOM_KINDS]
    assert {manifest["kind"]: manifest["apiVersion"] for manifest in every} == {
        "ExternalSecret": "external-secrets.io/v1",
        "PrometheusRule": "monitoring.coreos.com/v1",
        "ScaledObject": "keda.sh/v1alpha1",
        "ServiceMonitor": "monitoring.coreos.com/v1",
    }


# --- values


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("gatewy.replicas=2", "gatewy"),
        ("gateway.replicas=two", "/gateway/replicas"),
        ("gateway.replicas=0", "/gateway/replicas"),
        ("gateway.spool.size=big", "/gateway/spool/size"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("pools.vllm.kind=sglang", "/pools/vllm/kind"),
        ("pools.vllm.gpu=1", "'gpu'"),
        ("pools.vllm.keda.max=9", "'max'"),
        ("pools.Big.kind=vllm", "'Big'"),
        ("pools.demo.replicas=1", "'kind'"),
        ("networkPolicies.database.cidrs={10.0.0.1}", "/networkPolicies/database/cidrs/0"),
        ("networkPolicies.database.port=0", "/networkPolicies/database/port"),
        ("ingress.enabled=true", "/ingress/host"),
        ("secret.external.enabled=true", "/secret/external/store/name"),
        ("monitoring.rules.enabled=maybe", "/monitoring/rules/enabled"),
        ("config=", "/config"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(setting: str, key: str) -> None:
    done = template("vllm", "--set", setting)
    assert done.returncode != 0
    assert key in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[models.qwen-7b]", "[models.qwen-7b", "config: toml: line"),
        ("[pools.vllm", "[pools.other", "pools.vllm: config has no section [pools.vllm]"),
        ('kind = "vllm"', 'kind = "sglang"', "pools.vllm.engine.kind must be vllm"),
        ("http://127.0.0.1:8000", "http://vllm:8000", "pools.vllm.engine.url must be http://127.0.0.1:PORT"),
        ("leave_s = 10.0", "leave_s = 5.0", "gateway.timeouts.leave_s must be above 9"),
        ("spillway-worker-vllm", "worker-vllm", "deployment must be spillway-worker-vllm"),
        ('namespace = "spillway"', 'namespace = "llm"', "pools.vllm.fleet.driver.namespace must be spillway"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_its_key(
    old: str, new: str, reason: str, tmp_path: Path
) -> None:
    text = config_text(rendered("fleet"))
    assert old in text
    (tmp_path / "spillway.toml").write_text(text.replace(old, new))
    done = template("fleet", "--set-file", f"config={tmp_path / 'spillway.toml'}")
    assert done.returncode != 0
    assert reason in done.stderr


def test_two_cannot_scale_one_pool() -> None:
    done = template("fleet", "--set", "pools.vllm.keda.maxReplicas=4")
    assert done.returncode != 0
    assert "pools.vllm.keda: not allowed, because pools.vllm.fleet" in done.stderr


def test_every_value_is_in_the_schema_and_has_its_comment() -> None:
    text = (CHART / "values.yaml").read_text()
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: dict[str, Any], described: dict[str, Any], path: str) -> None:
        assert set(described["properties"]) - {"global"} == set(values), path
        assert described["additionalProperties"] is False
        for key, value in values.items():
            if isinstance(value, dict) and "properties" in described["properties"][key]:
                compare(value, described["properties"][key], f"{path}.{key}")

    compare(yaml.safe_load(text), schema, "")
    pool = schema["$defs"]["pool"]["properties"]
    for part in ("vllm", "keda"):
        block = text.partition(f"#   {part}: ")[2].partition("\n#   k")[0].partition("\npools:")[0]
        assert set(re.findall(r"^#     (\w+): ", block, re.MULTILINE)) == set(pool[part]["properties"])
    of_pool = set(re.findall(r"^#   (\w+): ", text, re.MULTILINE)) | set(
        re.findall(r"^#   (vllm|keda):", text, re.MULTILINE)
    )
    assert of_pool == set(pool)
    lines = text.splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r" *[\w./-]+:", line)]
    assert len(keys) > 90
    bare = [lines[n] for n in keys if "# " not in lines[n] and "# " not in lines[n - 1] and not lines[n].endswith(":")]
    assert bare == []


def test_the_notes_say_commands_that_exist() -> None:
    for example in EXAMPLES:
        values = ["--values", str(HELM_FOLDER / f"examples/{example}.yaml")]
        done = run_helm("install", RELEASE, str(CHART), "--namespace", "spillway", "--dry-run=client", *values)
        notes = done.stdout.partition("\nNOTES:\n")[2]
        manifests = {f"{m['kind'].lower()}/{m['metadata']['name']}" for m in rendered(example)}
        commands = [shlex.split(line) for line in notes.splitlines() if line.startswith("  kubectl ")]
        assert commands
        for words in commands:
            [target] = [word for word in words if re.match(r"(deployment|service|statefulset)/", word)]
            assert target in manifests
            if "--" in words:
                assert words[words.index("--") + 1] == "spillway"
                options_of(words[words.index("--") + 2 :])
        models = tomllib.loads(config_text(rendered(example)))["models"]
        assert re.findall(r'"model": "(.*?)"', notes) == ([min(models)] if example in WITH_GATEWAYS else [])


def test_versions_are_the_project_s() -> None:
    [chart] = documents(CHART / "Chart.yaml")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert chart["kubeVersion"] == f">= {OLDEST}.0-0"
