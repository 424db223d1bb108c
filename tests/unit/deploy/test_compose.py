"""docker-compose.yml: right on first use, with no more rights than needed. No engine is at hand: files are checked."""

import itertools
import re
import shutil
import stat
import subprocess
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
import yaml

from gateway.batches.storage.registry import FOLDER
from gateway.settings import IdempotencySettings, LimitSettings
from pool_worker.settings import LocalEngineSettings, OpenAIChatSettings
from spillway.config import Config, load_config
from tests.unit.deploy.description import (
    COMPOSE_FILE,
    CONFIG_TARGET,
    DOCKERFILES,
    ENVIRONMENT,
    GRAFANA_FILE,
    HOSTED_FILE,
    OBSERVABILITY_FILE,
    OVERLAY_FILE,
    ROOT,
    TLS_FILE,
    VLLM_FILE,
    compose,
    filled_in,
    instructions,
    observability,
    options_of,
    seconds,
    services,
    tool,
)

STOP_MARGIN_S = 5.0  # between what a process allows itself and its being killed
OWN_SERVICES = [name for name, service in services().items() if service["image"].startswith("spillway-")]
SPILLWAY_SERVICES = [name for name in OWN_SERVICES if name != "nats"]


def config_of(service_name: str) -> Config:
    """Return the settings that a service's container reads: the mounted file under its environment."""
    environment = services()[service_name].get("environment", {})
    return load_config(
        ROOT / "deploy/compose/spillway.toml", env={key: str(value) for key, value in environment.items()}
    )


def test_the_examples_in_comments_are_settings_that_exist(tmp_path: Path) -> None:
    text = (ROOT / "deploy/compose/spillway.toml").read_text()
    uncommented = tmp_path / "spillway.toml"
    uncommented.write_text(re.sub(r"^# (\[|\w+ = )", r"\1", text, flags=re.MULTILINE))
    config = load_config(uncommented, env={})
    assert (config.gateway.limits, config.gateway.idempotency) == (LimitSettings(), IdempotencySettings())
    assert config.tenants["team-a"].weight == 3.0
    assert config.pools["spot"].fleet is not None
    pool = config.pools["demo"]
    assert pool.gate is not None
    assert pool.notice == "aws"


def test_files_follow_the_compose_specification() -> None:
    command = [
        tool("check-jsonschema"),
        "--builtin-schema",
        "vendor.compose-spec",
        str(COMPOSE_FILE),
        str(OVERLAY_FILE),
        str(OBSERVABILITY_FILE),
        str(GRAFANA_FILE),
        str(VLLM_FILE),
        str(TLS_FILE),
        str(HOSTED_FILE),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_the_load_balancer_is_published_its_api_and_its_pages_apart() -> None:
    published = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert published == {"load-balancer": ["127.0.0.1:8000:8000", "127.0.0.1:8001:8001"]}
    bound = re.findall(r"^    bind (\S+)$", (ROOT / "deploy/haproxy/haproxy.cfg").read_text(), re.MULTILINE)
    assert set(bound) == {":8000", ":8001", "127.0.0.1:8404"}


@pytest.mark.parametrize("name", ["gateway-1", "gateway-2"])
def test_the_gateways_believe_the_load_balancer_whom_it_speaks_for(name: str) -> None:
    """Otherwise all callers have one address: its own, and one who guesses passwords locks everybody out."""
    [network] = compose()["networks"]["edge"]["ipam"]["config"]
    balancer = services()["load-balancer"]["networks"]["edge"]["ipv4_address"]
    assert ip_address(balancer) in ip_network(network["subnet"])
    # Not the network: callers at this machine come from Docker's own address in it, and could say that they are others.
    assert config_of(name).gateway.connections.trusted_proxies == (balancer, "255.255.255.255")
    assert "    option forwardfor\n" in (ROOT / "deploy/haproxy/haproxy.cfg").read_text()


def test_only_the_load_balancer_and_the_gateways_can_be_reached_from_outside_the_backend() -> None:
    on_edge = {name for name, service in services().items() if "edge" in service["networks"]}
    assert on_edge == {"load-balancer", "gateway-1", "gateway-2"}
    assert compose()["networks"]["backend"] == {"internal": True}
    assert {name for name, service in services().items() if "outbound" in service["networks"]} == {"ledger", "fleet"}


def test_an_overlay_that_publishes_also_joins_a_network_that_can() -> None:
    for name, service in yaml.safe_load(OVERLAY_FILE.read_text())["services"].items():
        assert name in services()
        assert not service.get("ports") or "edge" in service["networks"]


HOSTED = filled_in(yaml.safe_load(HOSTED_FILE.read_text()))["services"]
ALL_SERVICES = {**services(), **observability(), **HOSTED}


@pytest.mark.parametrize("name", ALL_SERVICES)
def test_service_has_no_rights_it_does_not_need(name: str) -> None:
    service = ALL_SERVICES[name]
    user, _, group = service["user"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["read_only"] is True
    assert "cap_add" not in service
    assert "privileged" not in service


def test_alerts_need_no_board() -> None:
    """Compose starts nothing if one image of a command cannot be had."""
    assert list(yaml.safe_load(OBSERVABILITY_FILE.read_text())["services"]) == ["prometheus"]
    assert "depends_on" not in observability()["prometheus"]


def test_what_watches_meets_the_gateways_and_nothing_behind_them() -> None:
    for service in observability().values():
        assert service["networks"] == ["edge"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service["volumes"]:
            source, _, rest = volume.partition(":")
            if source.startswith("./deploy"):
                assert (ROOT / source).is_dir()
            assert not source.startswith("./") or rest.endswith(":ro")
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    targets = {target.partition(":")[0] for group in scrape["static_configs"] for target in group["targets"]}
    assert targets == {"gateway-1", "gateway-2"} <= set(services())
    mounts = {volume.split(":")[1] for volume in observability()["prometheus"]["volumes"]}
    assert scrape["authorization"]["credentials_file"] in mounts


@pytest.mark.parametrize("name", ALL_SERVICES)
def test_service_is_bounded_and_watched(name: str) -> None:
    service = ALL_SERVICES[name]
    limits = service["deploy"]["resources"]["limits"]
    assert limits["memory"]
    assert limits["pids"]
    assert service["logging"]["options"]["max-size"]
    if name == "migrate":  # it ends by itself
        assert service["restart"] == "no"
        assert service["healthcheck"] == {"disable": True}
    else:
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"][0] == "CMD"
        # Docker asks for a start period where there is a start interval.
        assert seconds(service["healthcheck"]["start_period"]) > 0


@pytest.mark.parametrize("name", ALL_SERVICES)
def test_image_is_pinned(name: str) -> None:
    _, _, tag = ALL_SERVICES[name]["image"].partition(":")
    assert tag
    assert tag != "latest"


def test_each_image_of_ours_is_built_by_one_service_and_never_pulled() -> None:
    builders: dict[str, list[str]] = {}
    for name in OWN_SERVICES:
        service = services()[name]
        builders.setdefault(service["image"], [])
        assert service["pull_policy"] == "never"
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
            builders[service["image"]].append(name)
    assert all(len(names) == 1 for names in builders.values()), builders


@pytest.mark.parametrize("name", OWN_SERVICES)
def test_user_is_the_one_the_image_was_made_for(name: str) -> None:
    service = services()[name]
    builder = next(other for other in services().values() if other["image"] == service["image"] and "build" in other)
    users = [arguments for name, arguments in instructions(ROOT / builder["build"]["dockerfile"]) if name == "USER"]
    assert users[-1] == service["user"]


def test_mounted_configurations_exist() -> None:
    files = {name: ROOT / config["file"] for name, config in compose()["configs"].items()}
    used = {mount["source"] for service in services().values() for mount in service.get("configs", [])}
    assert used == set(files)
    assert all(path.is_file() for path in files.values())


def test_named_volumes_inherit_an_owner_from_the_image() -> None:
    """A new volume belongs to root unless the image has a folder of that name: then it takes over its owner."""
    for name in OWN_SERVICES:
        service = services()[name]
        for volume in service.get("volumes", []):
            source, _, target = volume.partition(":")
            assert source in compose()["volumes"]
            [built] = {
                one["build"]["dockerfile"]
                for one in services().values()
                if one.get("image") == service["image"] and "build" in one
            }
            owned = rf"(chown 10001:10001|--owner 10001 --group 10001 --mode 0700)( \S+)* {re.escape(target)}(?=\s)"
            assert re.search(owned, (ROOT / built).read_text())


def test_tmpfs_mounts_can_be_written_by_the_service() -> None:
    for service in services().values():
        user, _, group = service["user"].partition(":")
        for mount in service.get("tmpfs", []):
            options = mount.partition(":")[2].split(",")
            assert "mode=1777" in options or {f"uid={user}", f"gid={group}"} <= set(options), mount
            assert any(option.startswith("size=") for option in options), mount


@pytest.mark.parametrize("name", SPILLWAY_SERVICES)
def test_configuration_is_accepted_as_the_container_sees_it(name: str) -> None:
    config = config_of(name)
    assert services()[name]["configs"] == [{"source": "spillway", "target": CONFIG_TARGET}]
    assert str(config.data_dir) == "/var/lib/spillway"
    mounts = [mount.split(":") for key in ("tmpfs", "volumes") for mount in services()[name].get(key, [])]
    assert any("/var/lib/spillway" in mount for mount in mounts)  # the root file system is read-only


@pytest.mark.parametrize("name", ["gateway-1", "gateway-2"])
def test_gateways_share_queue_database_and_pepper(name: str) -> None:
    config = config_of(name)
    assert config.nats.urls == (f"nats://spillway:{ENVIRONMENT['NATS_PASSWORD']}@nats:4222",)
    assert config.database_url == f"postgresql://spillway:{ENVIRONMENT['POSTGRES_PASSWORD']}@postgres:5432/spillway"
    assert config.auth.pepper is not None
    assert config.auth.pepper.get_secret_value() == ENVIRONMENT["KEY_PEPPER"]
    assert (config.gateway.host, config.gateway.port) == ("0.0.0.0", 8000)


def test_gateways_share_the_files_of_batches() -> None:
    """A file that is uploaded at one is read by the other that feeds the batch, also after a restart."""
    for name in ("gateway-1", "gateway-2"):
        config = config_of(name)
        assert config.batches.s3 is None
        assert f"files:{config.data_dir / FOLDER}" in services()[name]["volumes"]


def test_each_service_gets_only_the_secrets_it_uses() -> None:
    held = {
        name: {secret for secret, value in ENVIRONMENT.items() if value in str(service.get("environment", {}))}
        for name, service in services().items()
    }
    gateway = {"NATS_PASSWORD", "POSTGRES_PASSWORD", "KEY_PEPPER"}
    assert held == {
        "load-balancer": set(),
        "gateway-1": gateway,
        "gateway-2": gateway,
        "ledger": {"NATS_PASSWORD", "POSTGRES_PASSWORD", "KEY_PEPPER"},
        "fleet": {"NATS_PASSWORD", "POSTGRES_PASSWORD"},
        "worker": {"NATS_PASSWORD"},
        "migrate": {"POSTGRES_PASSWORD"},
        "nats": {"NATS_PASSWORD"},
        "postgres": {"POSTGRES_PASSWORD"},
    }


def test_the_fleet_controller_is_asked_for_and_alone_gets_the_keys_of_clouds() -> None:
    assert [name for name, service in services().items() if "profiles" in service] == ["fleet"]
    passed_on = {
        name: {variable for variable, value in service.get("environment", {}).items() if value is None}
        for name, service in services().items()
    }
    keys = passed_on.pop("fleet")
    assert not any(passed_on.values())
    example = (ROOT / "deploy/compose/env.example").read_text()
    assert keys == set(re.findall(r"^# (\w+)=…$", example, re.MULTILINE))
    drivers = "".join(path.read_text() for path in (ROOT / "fleet/drivers").glob("*.py"))
    assert {key for key in keys if f'"{key}"' not in drivers} == {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
    }  # boto3's


def test_machines_of_a_fleet_are_told_the_published_address_of_the_queue() -> None:
    fleet = filled_in(yaml.safe_load(OVERLAY_FILE.read_text()))["services"]["fleet"]
    [inside] = config_of("fleet").nats.urls
    config = load_config(ROOT / "deploy/compose/spillway.toml", env=fleet["environment"])
    assert config.nats.urls == (inside, inside.replace("@nats:", "@127.0.0.1:"))


def test_the_hosted_pool_that_is_shipped_can_be_appended(tmp_path: Path) -> None:
    text = (ROOT / "deploy/compose/spillway.toml").read_text() + (ROOT / "deploy/compose/hosted-api.toml").read_text()
    (tmp_path / "spillway.toml").write_text(text)
    worker = HOSTED["worker-hosted"]
    config = load_config(tmp_path / "spillway.toml", env=worker["environment"])
    given = options_of(worker["command"])
    settings = config.worker_settings(given["pool"])
    assert set(settings.models) < set(config.models)
    assert isinstance(settings.engine, OpenAIChatSettings)
    assert settings.engine.api_key is not None
    assert config.tenants["first"].allow_hosted == (settings.provider,)
    assert config.pools[given["pool"]].prices.keys() == set(settings.models)
    assert seconds(worker["stop_grace_period"]) >= settings.drain_s + STOP_MARGIN_S
    assert worker["image"] == services()["gateway-1"]["image"]
    assert worker["user"] == services()["gateway-1"]["user"]
    assert worker["networks"] == ["backend", "outbound"]


def test_the_worker_elsewhere_serves_a_model_that_gateways_have() -> None:
    urls = {"SPILLWAY_NATS__URLS": '["nats://spillway:x@10.8.0.1:4222"]'}
    config = load_config(ROOT / "deploy/compose/remote-worker.toml", env=urls)
    ours = config_of("gateway-1")
    assert set(config.worker_settings("remote").models) == set(config.models) <= set(ours.models)
    assert "remote" not in ours.pools
    assert config.data_dir == ours.data_dir


def test_tls_is_where_the_load_balancer_looks_for_its_certificate() -> None:
    balancer = filled_in(yaml.safe_load(TLS_FILE.read_text()))["services"]["load-balancer"]
    [mounted] = balancer["configs"]
    assert mounted["target"] == balancer["environment"]["TLS_CERTIFICATE"]
    text = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    bound = re.findall(r"^    bind :(\d+) ssl crt \"\$\{TLS_CERTIFICATE\}\"", text, re.MULTILINE)
    assert [port.rpartition(":")[2] for port in balancer["ports"]] == bound
    assert balancer["ports"][1].startswith("127.0.0.1:")


def test_threads_of_the_engine_follow_the_cores_of_the_worker() -> None:
    cores = float(services()["worker"]["deploy"]["resources"]["limits"]["cpus"])
    engine = config_of("worker").pools["demo"].engine
    assert isinstance(engine, LocalEngineSettings)
    assert engine.threads == cores


def test_nobody_is_killed_while_still_allowed_to_finish() -> None:
    config = config_of("gateway-1")
    grace_s = {name: seconds(service.get("stop_grace_period", "10s")) for name, service in services().items()}
    assert config.gateway.timeouts.leave_s is not None
    gateway_s = config.gateway.timeouts.leave_s + config.gateway.timeouts.shutdown_s
    assert grace_s["gateway-1"] >= gateway_s + STOP_MARGIN_S
    assert grace_s["gateway-2"] >= gateway_s + STOP_MARGIN_S
    assert grace_s["worker"] >= config.pools["demo"].drain_s + STOP_MARGIN_S
    haproxy = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    hard_stop = re.search(r"hard-stop-after (\d+s)", haproxy)
    assert hard_stop is not None
    assert grace_s["load-balancer"] >= seconds(hard_stop[1]) + STOP_MARGIN_S


def stops_before(first: str, then: str) -> bool:
    """Compose stops a service before what it depends on."""
    needs = services()[first].get("depends_on", {})
    return then in needs or any(stops_before(name, then) for name in needs)


def test_a_stop_goes_from_the_outside_in() -> None:
    """Callers, then gateways, then the workers that answer them, then the ledger that writes it down."""
    order = ["load-balancer", "gateway-1", "worker", "ledger", "nats"]
    assert all(stops_before(first, then) for first, then in itertools.pairwise(order))
    assert stops_before("ledger", "postgres")
    assert not stops_before("ledger", "worker")


def test_what_is_waited_for_as_healthy_has_a_check() -> None:
    for service in services().values():
        for name, dependency in service.get("depends_on", {}).items():
            if dependency["condition"] == "service_healthy":
                assert "test" in services()[name]["healthcheck"]


def test_the_rolling_restart_takes_every_service_that_reads_the_configuration_one_after_the_other() -> None:
    script = (ROOT / "deploy/compose/roll.sh").read_text()
    reading = {
        name
        for name, service in services().items()
        if "spillway" in str(service.get("configs")) and "profiles" not in service and name != "migrate"
    }
    looped = re.search(r"^for kind in (.+); do$", script, re.MULTILINE)
    assert looped is not None
    kinds = tuple(looped[1].split())
    assert kinds == ("ledger", "worker", "gateway")
    assert all(name.startswith(kinds) for name in reading | HOSTED.keys())
    assert "--no-deps" not in re.sub(r"^ *#.*$", "", script, flags=re.MULTILINE)


def test_build_arguments_are_ones_that_the_dockerfile_has() -> None:
    """Docker ignores others: the controller's image was built without its drivers."""
    built = [service["build"] for service in ALL_SERVICES.values() if "build" in service]
    for build in built:
        declared = {text.partition("=")[0] for name, text in instructions(ROOT / build["dockerfile"]) if name == "ARG"}
        assert set(build.get("args", {})) <= declared, build
    assert any("args" in build for build in built)


@pytest.mark.parametrize("name", SPILLWAY_SERVICES)
def test_commands_are_ones_that_spillway_knows(name: str) -> None:
    assert str(options_of(services()[name]["command"])["config"]) == CONFIG_TARGET


@pytest.mark.parametrize(
    "path", [path for path in DOCKERFILES if path.name != "nats.Dockerfile"], ids=lambda path: path.name
)
def test_default_commands_of_the_images_are_ones_that_spillway_knows(path: Path) -> None:
    given = dict(instructions(path))
    assert given["ENTRYPOINT"] == '["spillway"]'
    assert str(options_of(yaml.safe_load(given["CMD"]))["config"]) == CONFIG_TARGET


def test_secrets_are_made_once_and_readable_by_their_owner_only(tmp_path: Path) -> None:
    script, target = ROOT / "deploy/compose/init-env.sh", tmp_path / ".env"
    first = subprocess.run([str(script), str(target)], capture_output=True, text=True, check=True)
    assert str(target) in first.stdout
    values = dict(line.split("=", 1) for line in target.read_text().splitlines() if line and not line.startswith("#"))
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert all(re.fullmatch("[0-9a-f]{64}", values[name]) for name in ENVIRONMENT)
    assert len({values[name] for name in ENVIRONMENT}) == len(ENVIRONMENT)
    wanted = set(re.findall(r"\$\{(\w+)", COMPOSE_FILE.read_text()))
    wanted |= set(re.findall(r"\$\{(\w+):\?", GRAFANA_FILE.read_text())) | {"COMPOSE_FILE"}
    optional = set(re.findall(r"^# ([A-Z_]+)=", target.read_text(), re.MULTILINE))
    assert wanted - optional == set(values)

    before = target.read_text()
    again = subprocess.run([str(script), str(target)], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert target.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == [".env"]


def test_secrets_stay_out_of_git_and_of_the_images() -> None:
    git = shutil.which("git")
    assert git is not None
    for secret in (".env", "metrics-key", "tls/certificate.pem"):
        assert subprocess.run([git, "check-ignore", "-q", secret], cwd=ROOT, check=False).returncode == 0
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
