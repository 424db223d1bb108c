"""deploy/kubernetes: valid manifests, with no more rights than needed, that fit Spillway. No cluster is at hand."""

import copy
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from fleet.settings import KubernetesSettings
from gateway.endpoints.routes import health_router
from pool_worker.settings import ServerEngineSettings
from protocol import subjects
from protocol.nats.topology import QueueBounds, streams
from spillway.config import Config, load_config
from tests.shipped import CLUSTER_CONFIG, NATS_CONFIG
from tests.unit.deploy.description import CONFIG_TARGET, DOCKERFILES, ROOT, compose, instructions, options_of, tool
from tests.unit.deploy.kustomization import KUBERNETES, OVERLAYS, Manifest, containers, documents, pod_of, rendered

STOP_MARGIN_S = 5.0  # between what a process allows itself and its being killed
OLDEST, NEWEST = (
    "1.29",
    "1.37",
)  # of Kubernetes: the older has what is used first, the newer is the newest schema at hand
FOLDERS = [KUBERNETES / "base", *(KUBERNETES / "overlays" / name for name in OVERLAYS)]
WITH_GATEWAYS = [folder for folder in FOLDERS if folder.name != "remote-pool"]
SECRET = {
    "nats-urls": '["nats://spillway:n1@nats:4222"]',
    "database-url": "postgresql://spillway:p@db:5432/spillway",
    "key-pepper": "k" * 64,
}
ALL = {folder: rendered(folder) for folder in FOLDERS}
PODS = [
    pytest.param(manifest, id=f"{folder.name}-{manifest['metadata']['name']}")
    for folder, manifests in ALL.items()
    for manifest in manifests
    if pod_of(manifest) is not None
]


def name_of(path: Path) -> str:
    return path.name


def one(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    [found] = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def secrets_of(container: Manifest) -> dict[str, str]:
    """By the variable's name: which key of the Secret it gets."""
    given = {v["name"]: v["valueFrom"] for v in container.get("env", [])}
    return {name: source["secretKeyRef"]["key"] for name, source in given.items() if "secretKeyRef" in source}


def config_for(folder: Path, container: Manifest, tmp_path: Path) -> Config:
    """The settings that a container reads: the mounted file under its environment."""
    path = tmp_path / "spillway.toml"
    path.write_text(one(ALL[folder], "ConfigMap", "spillway")["data"]["spillway.toml"])
    env = {name: SECRET[key] for name, key in secrets_of(container).items()}
    if folder not in WITH_GATEWAYS:  # the queue is elsewhere
        env["SPILLWAY_NATS__URLS"] = env["SPILLWAY_NATS__URLS"].replace("nats://", "tls://")
    return load_config(path, env=env)


def files() -> list[Path]:
    """Those with manifests of Kubernetes' own kinds."""
    others = {"kustomization.yaml", "scaled-object.yaml"}
    return [p for p in KUBERNETES.rglob("*.yaml") if p.name not in others and p.parent.name != "nats"]


def test_manifests_are_valid() -> None:
    manifests = [manifest for path in files() for manifest in documents(path)]
    manifests += [one for ms in ALL.values() for one in ms if one["kind"] in {"ConfigMap", "Deployment"}]
    for manifest in manifests:
        kubernetes_validate.validate(manifest, NEWEST, strict=True)
        if manifest["kind"] == "Deployment":
            kubernetes_validate.validate(manifest, OLDEST, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**manifests[0], "colour": 1}, NEWEST, strict=True)


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_kustomize_makes_the_same_of_it(folder: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=True)
    theirs = list(yaml.safe_load_all(re.sub(r"\bspillway-[a-z0-9]{10}\b", "spillway", done.stdout)))

    def in_order(manifests: list[Manifest]) -> list[Manifest]:
        return sorted(manifests, key=lambda manifest: (manifest["kind"], manifest["metadata"]["name"]))

    assert in_order(theirs) == in_order(ALL[folder])


@pytest.mark.parametrize("manifest", PODS)
def test_pod_has_no_rights_it_does_not_need(manifest: Manifest) -> None:
    pod = pod_of(manifest)
    assert pod is not None
    assert pod["automountServiceAccountToken"] is (pod.get("serviceAccountName") == "fleet")
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
        if container["image"].startswith("spillway-"):
            assert (context["runAsNonRoot"], context["runAsUser"], context["runAsGroup"]) == (True, 10001, 10001)
            assert context["readOnlyRootFilesystem"] is True


def test_images_are_those_that_are_built_here() -> None:
    ours = {c["image"] for ms in ALL.values() for m in ms for c in containers(m) if c["image"].startswith("spillway-")}
    built = {
        tag for path in DOCKERFILES for tag in re.findall(r"^#.* -t (spillway-\S+)", path.read_text(), re.MULTILINE)
    }
    assert ours <= built
    assert ours >= {service["image"] for service in compose()["services"].values() if "worker" in service["image"]}


def test_every_secret_value_has_its_key_in_the_example_and_no_other_file_has_one() -> None:
    assert set(documents(KUBERNETES / "base/secret.example.yaml")[0]["stringData"]) == set(SECRET)
    for manifests in ALL.values():
        assert "Secret" not in {manifest["kind"] for manifest in manifests}
        for container in (c for m in manifests for c in containers(m)):
            assert set(secrets_of(container).values()) <= set(SECRET)
            assert all("value" not in variable for variable in container.get("env", []))


def test_each_pod_gets_only_the_secrets_it_uses() -> None:
    manifests = ALL[KUBERNETES / "overlays/fleet"]
    held = {
        m["metadata"]["name"]: {key for c in containers(m) for key in secrets_of(c).values()}
        for m in manifests
        if pod_of(m) is not None
    }
    assert held == {
        "fleet": {"nats-urls", "database-url"},
        "gateway": set(SECRET),
        "ledger": {"nats-urls", "database-url", "key-pepper"},
        "migrate": {"database-url"},
        "worker-demo": {"nats-urls"},
        "worker-vllm": {"nats-urls"},
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_commands_and_configuration_fit_each_other(folder: Path, tmp_path: Path) -> None:
    for manifest in ALL[folder]:
        pod = pod_of(manifest)
        if pod is None or manifest["spec"].get("replicas") == 0:
            continue
        for container in containers(manifest):
            if not container["image"].startswith("spillway-"):
                continue
            options = options_of(container["args"])
            assert str(options["config"]) == CONFIG_TARGET
            config = config_for(folder, container, tmp_path)
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert {str(Path(CONFIG_TARGET).parent), "/tmp", str(config.data_dir)} <= mounts
            if options.get("pool"):
                worker = config.worker_settings(options["pool"])
                assert pod["terminationGracePeriodSeconds"] >= worker.drain_s + STOP_MARGIN_S
                path = getattr(worker.engine, "path", None) or getattr(worker.engine, "tokenizer", None)
                assert path in {"/opt/spillway/models/spillway-demo", "/models/qwen-7b"}
            if options.get("ready_file"):
                assert container["readinessProbe"]["exec"]["command"] == ["test", "-f", str(options["ready_file"])]


@pytest.mark.parametrize("folder", WITH_GATEWAYS, ids=name_of)
def test_gateways_leave_before_they_are_killed(folder: Path, tmp_path: Path) -> None:
    gateway = one(ALL[folder], "Deployment", "gateway")
    [container] = containers(gateway)
    config = config_for(folder, container, tmp_path)
    pod, timeouts = gateway["spec"]["template"]["spec"], config.gateway.timeouts
    assert timeouts.leave_s is not None
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
    assert gateway["spec"]["replicas"] > one(ALL[folder], "PodDisruptionBudget", "gateway")["spec"]["minAvailable"]


def test_the_gateways_know_the_pools_of_their_overlay() -> None:
    for folder in WITH_GATEWAYS:
        config = tomllib.loads(one(ALL[folder], "ConfigMap", "spillway")["data"]["spillway.toml"])
        running = {
            options_of(c["args"])["pool"]
            for m in ALL[folder]
            if m["kind"] == "Deployment" and m["spec"].get("replicas", 1)
            for c in containers(m)
            if "--pool" in c.get("args", [])
        }
        assert set(config["pools"]) == running


def selected(policy: Manifest, labels: dict[str, str]) -> bool:
    selector = policy["spec"]["podSelector"]
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", []):
        if (labels.get(rule["key"]) in rule["values"]) != (rule["operator"] == "In"):
            return False
    return True


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_workers_reach_the_queue_alone_and_nobody_reaches_them(folder: Path) -> None:
    policies = [manifest for manifest in ALL[folder] if manifest["kind"] == "NetworkPolicy"]
    for manifest in ALL[folder]:
        if "worker" not in manifest["metadata"]["name"] or manifest["kind"] != "Deployment":
            continue
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        mine = [policy["spec"] for policy in policies if selected(policy, labels)]
        assert {"Ingress", "Egress"} <= {kind for policy in mine for kind in policy["policyTypes"]}
        assert [rule for policy in mine for rule in policy.get("ingress", [])] == []
        out = [port["port"] for policy in mine for rule in policy.get("egress", []) for port in rule["ports"]]
        assert sorted(set(out)) == [53, 4222]


def test_only_the_gateways_take_callers_and_all_policies_name_pods_that_exist() -> None:
    manifests = ALL[KUBERNETES / "base"]
    policies = [manifest for manifest in manifests if manifest["kind"] == "NetworkPolicy"]
    pods = {m["metadata"]["name"]: m["spec"]["template"]["metadata"]["labels"] for m in manifests if pod_of(m)}
    open_to = {
        name for name, labels in pods.items() for p in policies if selected(p, labels) and p["spec"].get("ingress")
    }
    assert open_to == {"gateway"}
    service = one(manifests, "Service", "gateway")["spec"]
    assert service["selector"].items() <= pods["gateway"].items()
    [path] = documents(KUBERNETES / "base/ingress.example.yaml")[0]["spec"]["rules"][0]["http"]["paths"]
    assert path["path"] == "/v1"
    assert path["backend"]["service"] == {"name": "gateway", "port": {"name": service["ports"][0]["name"]}}


@pytest.mark.parametrize("name", ["vllm", "remote-pool", "fleet"])
def test_the_worker_is_beside_the_server_that_it_is_configured_for(name: str, tmp_path: Path) -> None:
    folder = KUBERNETES / "overlays" / name
    pod = pod_of(one(ALL[folder], "Deployment", "worker-vllm"))
    assert pod is not None
    [vllm], [worker] = pod["initContainers"], pod["containers"]
    assert vllm["restartPolicy"] == "Always"  # a side-car: ended after the worker
    assert vllm["image"] == "vllm/vllm-openai:v0.32.0"
    arguments = dict(zip(vllm["args"][::2], vllm["args"][1::2], strict=True))
    settings = config_for(folder, worker, tmp_path).worker_settings("vllm")
    engine = settings.engine
    assert isinstance(engine, ServerEngineSettings)
    assert engine.url == f"http://{arguments['--host']}:{arguments['--port']}"
    assert (arguments["--served-model-name"],) == settings.models
    assert arguments["--model"] == engine.tokenizer
    assert int(arguments["--max-num-seqs"]) == engine.max_sequences
    started = vllm["startupProbe"]
    assert started["periodSeconds"] * started["failureThreshold"] >= engine.ready_s


def test_keda_counts_every_lane_and_has_a_ceiling() -> None:
    spec = one(ALL[KUBERNETES / "overlays/keda"], "ScaledObject", "worker-vllm")["spec"]
    assert one(ALL[KUBERNETES / "overlays/keda"], "Deployment", spec["scaleTargetRef"]["name"])
    assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    triggers = {trigger["name"]: trigger for trigger in spec["triggers"]}
    assert tuple(triggers) == subjects.LANES
    assert spec["advanced"]["scalingModifiers"]["formula"].split(" + ") == list(triggers)
    for lane, trigger in triggers.items():
        assert trigger["type"] == "nats-jetstream"
        given = trigger["metadata"]
        assert given["consumer"] == subjects.job_consumer("qwen-7b", lane)
        assert given["stream"] == subjects.INTERACTIVE_STREAM
        assert given["account"] in NATS_CONFIG.read_text()
    assert not any("fallback" in part for part in (spec, spec["advanced"]))


def test_the_controller_scales_the_deployment_of_its_pool_and_nobody_else_does(tmp_path: Path) -> None:
    folder = KUBERNETES / "overlays/fleet"
    manifests = ALL[folder]
    [container] = containers(one(manifests, "Deployment", "fleet"))
    [(name, pool)] = config_for(folder, container, tmp_path).pools.items()
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
    manifests = ALL[KUBERNETES / "overlays/fleet"]
    accounts = {pod["serviceAccountName"] for pod in map(pod_of, manifests) if pod and "serviceAccountName" in pod}
    assert accounts == {"fleet"}
    binding, role = one(manifests, "RoleBinding", "fleet"), one(manifests, "Role", "fleet")
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "fleet"}
    namespace = one(manifests, "ServiceAccount", "fleet")["metadata"]["namespace"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "fleet", "namespace": namespace}]
    assert [rule.get("resourceNames") for rule in role["rules"]] == [["worker-vllm"], ["worker-vllm"], None]
    assert [rule["resources"] for rule in role["rules"]] == [["deployments"], ["deployments/scale"], ["pods"]]
    bound = [name for folder in FOLDERS for name in [folder.name] if any("Role" in m["kind"] for m in ALL[folder])]
    assert bound == ["fleet"]


def test_the_controller_reaches_queue_database_and_api_server_and_nobody_reaches_it() -> None:
    manifests = ALL[KUBERNETES / "overlays/fleet"]
    labels = one(manifests, "Deployment", "fleet")["spec"]["template"]["metadata"]["labels"]
    mine = [m["spec"] for m in manifests if m["kind"] == "NetworkPolicy" and selected(m, labels)]
    assert {"Ingress", "Egress"} <= {kind for policy in mine for kind in policy["policyTypes"]}
    assert [rule for policy in mine for rule in policy.get("ingress", [])] == []
    out = {port["port"] for policy in mine for rule in policy.get("egress", []) for port in rule["ports"]}
    assert out == {53, 443, 4222, 5432, 6443}


# The chart's own settings, as far as ours meet them (helm/charts/nats/files/config of chart 2.14.2).
def chart_config(values: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(values["config"])
    cluster, jetstream = config["cluster"], config["jetstream"]
    assert set(config) == {"cluster", "jetstream", "monitor", "merge"}
    return {
        "server_name": "<< $SERVER_NAME >>",
        "lame_duck_grace_period": "10s",
        "lame_duck_duration": "30s",
        "port": 4222,
        "cluster": {"name": "nats", "port": 6222, "no_advertise": True, **cluster["merge"]},
        "http_port": 8222,
        "jetstream": {
            "max_memory_store": f"<< {jetstream['memoryStore']['maxSize']} >>",
            "store_dir": "/data",
            "max_file_store": f"<< {jetstream['fileStore']['maxSize']} >>",
            **jetstream["merge"],
        },
        **config["merge"],
    }


def test_nats_server_accepts_what_the_chart_makes_of_the_values(tmp_path: Path) -> None:
    values = documents(KUBERNETES / "nats/values.yaml")[0]
    text = yaml.safe_dump(chart_config(values), default_flow_style=True, width=100_000, default_style='"')
    text = re.sub(r'"<<\s+(.*?)\s+>>"', r"\1", re.sub(r'!!\w+ "(\w+)"', r"\1", text))
    (tmp_path / "nats.conf").write_text(text.replace('"/data"', f'"{tmp_path}"').strip().strip("{}"))
    environment = {
        "SERVER_NAME": "nats-0",
        "NATS_PASSWORD": "n" + "1" * 64,
        "NATS_CLUSTER_PASSWORD": "c" + "2" * 64,
        "NATS_ROUTES": "[nats://cluster:c2@nats-0.nats-headless:6222, nats://cluster:c2@nats-1.nats-headless:6222]",
    }
    assert set(environment) == {"SERVER_NAME", *(set(values["container"]["env"]) - {"GOMEMLIMIT"})}
    done = subprocess.run(
        [tool("nats-server"), "-t", "-c", str(tmp_path / "nats.conf")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_queue_is_set_up_as_on_one_machine() -> None:
    values = documents(KUBERNETES / "nats/values.yaml")[0]
    single, config = NATS_CONFIG.read_text(), values["config"]
    assert f"max_memory_store: {config['jetstream']['memoryStore']['maxSize']}\n" in single
    assert f"max_file_store: {config['jetstream']['fileStore']['maxSize']}\n" in single
    assert config["jetstream"]["merge"] == {"sync_interval": "always"}
    assert "  sync_interval: always\n" in single
    assert config["merge"]["max_payload"] == "<< 8MB >>"
    assert "max_payload: 8MB\n" in single
    for subject in ("$SYS.ACCOUNT.*.DISCONNECT", "$SYS.ACCOUNT.SPILLWAY.DISCONNECT"):
        assert subject in str(config["merge"]["accounts"])
        assert subject in single
    assert "authorization { user: cluster, password: $NATS_CLUSTER_PASSWORD }" in CLUSTER_CONFIG.read_text()
    base = [arguments for name, arguments in instructions(ROOT / "deploy/images/nats.Dockerfile") if name == "FROM"]
    assert base == [f"nats:{values['container']['image']['tag']}"]
    stores = {
        kind: sum(s.get("max_bytes") or 0 for s in streams(QueueBounds()) if s["storage"] == kind)
        for kind in ("memory", "file")
    }
    assert stores["memory"] < 2_000_000_000
    assert stores["file"] < 8_000_000_000
