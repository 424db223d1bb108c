"""docs/deploy/ and what it leads to: configurations are read, commands parsed, and run where that needs no cloud."""

import base64
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from pool_worker.notices import SIGNAL_NOTICE_S, SOURCES
from pool_worker.settings import ServerEngineSettings, WorkerSettings
from spillway.cli import app
from spillway.cli.worker import _of_pool, _resolve
from spillway.config import Config, config_without_file
from tests.unit.deploy.chart import (
    CHART,
    HELM_FOLDER,
    Manifest,
    config_text,
    containers,
    documents,
    one,
    pod_of,
    rendered,
)
from tests.unit.deploy.description import DOCKERFILES, ROOT, options_of, tool

DOCS = ROOT / "docs/deploy"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "deploy/skypilot/README.md", ROOT / "deploy/salad/README.md"]
PROVIDERS = ["aws", "gcp", "azure", "runpod", "fluidstack", "paperspace", "coreweave", "salad"]
TASKS = sorted((ROOT / "deploy/skypilot").glob("*.yaml"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
URLS = '["tls://spillway:PASSWORD@queue.example.com:4222"]'
NEWEST = "1.37"  # of Kubernetes
# Programs of others, whose commands are not run: they need a cloud, a cluster, Docker or a network.
FOREIGN = {
    "aws",
    "az",
    "cat",
    "chmod",
    "createdb",
    "curl",
    "docker",
    "dropdb",
    "find",
    "gcloud",
    "git",
    "helm",
    "hf",
    "jq",
    "kubectl",
    "mkdir",
    "pg_basebackup",
    "pg_dump",
    "pg_restore",
    "sed",
    "sky",
    "ssh",
    "terraform",
}


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def commands(page: Path) -> Iterator[list[str]]:
    """The command lines of a page, as words, without variables in front."""
    for block in blocks(page, "sh"):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            words = shlex.split(re.sub(r"^\w+=\$\((.+)\)", r"\1", line), comments=True)
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words and words[0] != "export":
                yield words


def spoken(page: Path) -> Iterator[list[str]]:
    """The commands in a page's sentences, as words: those with a name only are no more than a mention."""
    for text in re.findall(r"`(spillway [^`…]+)`", page.read_text()):
        if len(words := shlex.split(text)) > 2:
            yield words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_variable_is_set_before_it_is_used(page: Path) -> None:
    """By a command above it, or in a sentence that names it."""
    text = page.read_text()
    known = {"PWD", *re.findall(r"`\$(\w+)`", text)}
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            used = set(re.findall(r"\$\{?([A-Za-z_]\w*)", re.sub(r"'[^']*'", "", line)))
            known |= set(re.findall(r"(?:^|[\s;(])(\w+)=", line)) | set(re.findall(r"\bfor (\w+) in", line))
            assert used <= known, line


def configuration(provider: str) -> dict[str, Any]:
    return tomllib.loads(blocks(DOCS / f"{provider}.md", "toml")[0])


def config_of(said: dict[str, Any]) -> Config:
    return config_without_file({**said, "nats": {"urls": json.loads(URLS)}}, env={})


def worker_of(provider: str) -> WorkerSettings:
    config = config_of(configuration(provider))
    [pool] = config.pools
    return config.worker_settings(pool)


def test_no_block_is_left_unread() -> None:
    for page in PAGES:
        names = {name for name, _ in BLOCK.findall(page.read_text())}
        assert names <= {"", "toml", "sh", "json", "yaml", "dockerfile", "terraform"}, page


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_page_has_the_whole_configuration(provider: str) -> None:
    said = configuration(provider)
    assert set(said["models"]) == {"qwen-7b"}
    settings = worker_of(provider)
    assert settings.provider == provider
    assert settings.usd_per_hour > 0
    told = SOURCES.keys() | SIGNAL_NOTICE_S.keys()
    assert settings.notice == (provider if provider in told else "none")
    assert isinstance(settings.engine, ServerEngineSettings)
    assert settings.engine.revision == "qwen2.5-7b-instruct"
    assert re.search(rf"\]\({provider}\.md\).*\| `{settings.notice}` \|", index())
    assert f"Not tested at {name_of(provider)}" in (DOCS / f"{provider}.md").read_text()


def index() -> str:
    return (DOCS / "README.md").read_text()


def name_of(provider: str) -> str:
    title = re.match(r"# Attach a GPU on (.+) in five minutes\n", (DOCS / f"{provider}.md").read_text())
    assert title is not None
    return title[1]


def test_every_other_configuration_can_be_used() -> None:
    for page in PAGES:
        if page.stem not in PROVIDERS:
            for block in blocks(page, "toml"):
                said = tomllib.loads(block)
                for pool in said.get("pools", {}).values():
                    pool.setdefault("models", ["m"])
                assert config_of({"models": {"m": {}}, **said}).model_fields_set >= said.keys()


def test_spot_machines_drain_within_their_notice() -> None:
    notice_s = {"aws": 120.0, "gcp": 30.0, "azure": 30.0, "runpod": 5.0}
    for provider, limit_s in notice_s.items():
        settings = worker_of(provider)
        assert isinstance(settings.engine, ServerEngineSettings)
        stop_s = settings.engine.exec_stop_s if provider == "runpod" else 0.0
        assert settings.drain_s + stop_s <= limit_s
        assert settings.tier == "spot"


def inside(words: list[str]) -> list[str]:
    """The command that runs in a container, or the words as they are."""
    if words[:3] == ["docker", "compose", "exec"]:
        return [word for word in words[3:] if word != "-T"][1:]
    if words[:2] == ["kubectl", "exec"]:
        return words[words.index("--") + 1 :]
    return words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_ones_that_exist(page: Path) -> None:
    for words in [*commands(page), *spoken(page)]:
        program, *rest = inside(words)
        if program == "spillway":
            options_of(rest)
        elif program == "make":
            assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        else:
            assert program.startswith((".venv/", "deploy/")) or program in FOREIGN, words
        ours = [word for word in words if re.match(r"(deploy|requirements|scripts)/", word)]
        assert [word for word in ours if not (ROOT / word).exists()] == []


@pytest.mark.parametrize("provider", [name for name in PROVIDERS if name != "salad"])
def test_a_configuration_passes_its_check(provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ["spillway", "config", "check", "spillway.toml"] in list(commands(DOCS / "README.md"))
    monkeypatch.chdir(tmp_path)
    Path("spillway.toml").write_text(blocks(DOCS / f"{provider}.md", "toml")[0])
    done = CliRunner().invoke(app, ["config", "check", "spillway.toml"], env={"SPILLWAY_NATS__URLS": URLS})
    assert (done.exit_code, done.stdout) == (0, "ok: 1 model(s), 1 pool(s)\n"), done.output


def user_data(page: Path, folder: Path, urls: str = URLS) -> tuple[str, list[str]]:
    """What the page's own command prints, and the command that it was."""
    [command] = [words for words in commands(page) if words[0] == "deploy/vm/make-user-data.sh"]
    (folder / "spillway.toml").write_text(blocks(page, "toml")[0])
    arguments = [str(ROOT / command[0]), *(word for word in command[1:] if not word.startswith(">"))]
    environment = {"PATH": "/usr/bin:/bin", "SPILLWAY_NATS__URLS": urls}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout, command


@pytest.mark.parametrize("provider", ["aws", "gcp", "azure", "fluidstack", "paperspace"])
def test_user_data_makes_the_worker_of_the_page(provider: str, tmp_path: Path) -> None:
    page = DOCS / f"{provider}.md"
    script, command = user_data(page, tmp_path)
    assert len(base64.b64encode(script.encode())) < 16_384  # EC2's limit is on what it holds itself, which is less
    (tmp_path / "user-data.sh").write_text(script)
    subprocess.run([tool("shellcheck"), str(tmp_path / "user-data.sh")], check=True)
    files = dict(re.findall(r"base64 -d >(\S+) <<'END'\n(.*?)^END$", script, re.MULTILINE | re.DOTALL))
    said = {name: base64.b64decode(text).decode() for name, text in files.items()}
    assert said["/etc/spillway/spillway.toml"] == blocks(page, "toml")[0]
    assert said["/etc/spillway/environment"] == f"SPILLWAY_NATS__URLS={URLS}\n"
    run = re.sub(r"\\\n\s*", "", script).splitlines()[-1]
    words = shlex.split(run)
    image = words.index("registry.example.com/spillway-vllm:0.2.0")
    options = options_of(words[image + 1 :])
    assert options["pool"] == command[1] == provider
    assert str(options["config"]) == "/etc/spillway/spillway.toml"
    assert float(words[words.index("--stop-timeout") + 1]) > worker_of(provider).drain_s
    engine = worker_of(provider).engine
    assert isinstance(engine, ServerEngineSettings)
    assert f"{engine.tokenizer}:{engine.tokenizer}:ro" in words


def test_user_data_takes_no_word_for_a_command(tmp_path: Path) -> None:
    (tmp_path / "spillway.toml").write_text("")
    for pool in ("p; reboot", "$(reboot)", "p\nreboot"):
        done = subprocess.run(
            [ROOT / "deploy/vm/make-user-data.sh", pool, "spillway.toml", "image"],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "SPILLWAY_NATS__URLS": URLS},
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, b"")


def test_the_script_of_the_machine_runs(tmp_path: Path) -> None:
    """Run with a fake Docker that records its calls, in temporary folders."""
    script, _ = user_data(DOCS / "aws.md", tmp_path)
    programs, log = tmp_path / "bin", tmp_path / "log"
    programs.mkdir()
    for name in ("docker", "chown"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{log}\n')
        (programs / name).chmod(0o755)
    script = script.replace("/etc/spillway", f"{tmp_path}/etc").replace("/models/", f"{tmp_path}/models/")
    subprocess.run(["sh"], input=script, env={"PATH": f"{programs}:/usr/bin:/bin"}, text=True, check=True)
    assert (tmp_path / "etc/environment").read_text() == f"SPILLWAY_NATS__URLS={URLS}\n"
    assert (tmp_path / "etc/environment").stat().st_mode & 0o077 == 0
    assert (tmp_path / "etc/spillway.toml").stat().st_mode & 0o777 == 0o644
    called = [line.split()[:2] for line in log.read_text().splitlines()]
    assert [one for one in called if one[0] == "docker"] == [["docker", "run"], ["docker", "rm"], ["docker", "run"]]


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_a_skypilot_task_starts_the_pool_of_its_page(path: Path) -> None:
    task = yaml.safe_load(path.read_text())
    assert set(task) == {"name", "resources", "envs", "secrets", "file_mounts", "setup", "run"}
    assert set(task["resources"]) <= {"infra", "accelerators", "use_spot", "disk_size"}
    assert task["resources"]["infra"] == ("k8s/coreweave" if path.stem == "coreweave" else path.stem)
    assert task["resources"].get("use_spot", False) == (path.stem in {"aws", "gcp", "azure", "runpod"})
    assert task["secrets"] == {"SPILLWAY_NATS__URLS": None}
    assert task["envs"]["POOL"] == path.stem
    for source in task["file_mounts"].values():
        assert source in {"spillway.toml", "dist/spillway_gateway-0.2.0-py3-none-any.whl"} or (ROOT / source).is_file()
    assert (task["setup"], task["run"]) == ("bash ~/worker.sh setup", "bash ~/worker.sh run")
    assert task["envs"]["MODEL_FOLDER"] == "/models/qwen-7b"
    if path.stem in {"aws", "gcp", "azure", "fluidstack", "paperspace"}:
        engine = worker_of(path.stem).engine
        assert isinstance(engine, ServerEngineSettings)
        assert engine.tokenizer == task["envs"]["MODEL_FOLDER"]
        assert engine.exec is not None
        assert engine.exec.startswith(f"vllm serve {engine.tokenizer} ")


def test_the_servers_of_all_ways_are_one_version() -> None:
    places = [ROOT / "deploy/compose/vllm.yml", *CHART.rglob("*.yaml"), ROOT / "deploy/skypilot/worker.sh"]
    found = {
        v for p in [*places, *DOCKERFILES] for v in re.findall(r"(?:vllm==|vllm-openai:\S*v)([\d.]+)", p.read_text())
    }
    assert len(found) == 1


def salad_group() -> dict[str, Any]:
    return dict(json.loads((ROOT / "deploy/salad/container-group.json").read_text()))


def test_the_container_group_is_the_pool_of_its_page() -> None:
    container = salad_group()["container"]
    name, *arguments = container["command"]
    assert name == "spillway"
    given = options_of(arguments)
    engine = {"url": None, "kind": given["engine_kind"], "exec": given["exec_"], "tokenizer": given["tokenizer"]}
    overrides = _of_pool(engine, given["model"], given["set_"])
    settings = _resolve(None, None, given["pool"], overrides, given["model"], ["tls://q:4222"]).worker_settings("salad")
    expected = worker_of("salad")
    same = {"provider", "region", "tier", "usd_per_hour", "models", "notice", "watch"}
    assert settings.model_dump(include=same) == expected.model_dump(include=same)
    assert isinstance(settings.engine, ServerEngineSettings)
    assert isinstance(expected.engine, ServerEngineSettings)
    assert settings.engine.revision == expected.engine.revision
    assert settings.engine.max_sequences == expected.engine.max_sequences
    assert settings.engine.exec is not None
    assert settings.watch is not None
    assert settings.watch.reallocate


def test_the_container_group_opens_no_port_and_waits_for_the_model() -> None:
    """What SaladCloud's description of its API says: names, limits, what is required."""
    group = salad_group()
    assert {"autostart_policy", "container", "name", "replicas", "restart_policy"} <= set(group)
    assert "networking" not in group
    container = group["container"]
    assert container["priority"] in {"high", "medium", "low", "batch"}
    assert container["resources"]["memory"] >= 1024
    assert all(
        re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", name)
        for name in container["resources"]["gpu_classes"]
    )
    assert all(len(word) <= 1000 for word in container["command"])
    probe = group["startup_probe"]
    assert probe["exec"]["command"] == ["test", "-f", container["command"][-1]]
    assert probe["failure_threshold"] <= 20
    assert probe["period_seconds"] <= 120
    engine = worker_of("salad").engine
    assert isinstance(engine, ServerEngineSettings)
    assert probe["initial_delay_seconds"] + probe["failure_threshold"] * probe["period_seconds"] >= engine.ready_s


def test_the_queues_address_is_filled_into_the_container_group() -> None:
    [line] = [
        line for block in blocks(DOCS / "salad.md", "sh") for line in block.splitlines() if line.startswith("sed ")
    ]
    url = "tls://spillway:PASSWORD@queue.example.com:4222"
    done = subprocess.run(
        ["sh", "-c", line.partition(">")[0]],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "SPILLWAY_NATS_URL": url},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["container"]["environment_variables"] == {"SPILLWAY_NATS_URL": url}


def test_the_pod_of_runpod_starts_the_pool_of_its_page() -> None:
    [block] = blocks(DOCS / "runpod.md", "json")
    pod = json.loads(block)
    options = options_of(pod["dockerStartCmd"])
    assert options["pool"] == "runpod"
    assert str(options["config"]) == f"{pod['volumeMountPath']}/spillway.toml"
    engine = worker_of("runpod").engine
    assert isinstance(engine, ServerEngineSettings)
    assert engine.tokenizer == f"{pod['volumeMountPath']}/qwen-7b"
    assert pod["ports"] == []
    assert pod["interruptible"] is True
    assert pod["gpuCount"] == 1


def test_the_page_of_coreweave_has_the_configuration_of_the_example() -> None:
    said = tomllib.loads(blocks(DOCS / "coreweave.md", "toml")[0])
    assert said == tomllib.loads(config_text(rendered("remote-pool")))


def test_a_cluster_gets_the_images_that_were_pushed_before() -> None:
    pushed: set[str] = set()
    installed = 0
    for words in commands(DOCS / "kubernetes.md"):
        if words[:2] == ["docker", "push"]:
            pushed.add(words[2])
        if words[:3] == ["helm", "upgrade", "spillway"]:
            example = Path(words[words.index("--values") + 1]).stem
            options = words[words.index("--set") :] if "--set" in words else []
            images = {container["image"] for m in rendered(example, *options) for container in containers(m)}
            assert {image for image in images if "spillway-" in image} <= pushed, words
            installed += 1
    assert installed == 3


def test_values_of_ones_own_can_be_rendered(tmp_path: Path) -> None:
    [text] = blocks(DOCS / "kubernetes.md", "yaml")
    (tmp_path / "mine.yaml").write_text(text)
    manifests = rendered("vllm", "--values", str(tmp_path / "mine.yaml"))
    images = {c["image"] for m in manifests for c in containers(m)}
    assert {image for image in images if "spillway" in image} == {
        "registry.example.com/spillway-gateway:0.2.0",
        "registry.example.com/spillway-sidecar:0.2.0",
    }
    assert one(manifests, "Deployment", "spillway-worker-vllm")["spec"]["replicas"] == 3


def test_the_page_s_table_has_values_that_exist() -> None:
    table = (DOCS / "kubernetes.md").read_text().partition("## Values worth knowing\n")[2].partition("\n## ")[0]
    keys = re.findall(r"^\| `(\S+?)`", table, re.MULTILINE)
    assert len(keys) > 10
    schema = json.loads((CHART / "values.schema.json").read_text())
    for key in keys:
        node = schema
        for part in key.split("."):
            node = schema["$defs"]["pool"] if part == "NAME" else node["properties"][part]


def test_the_secrets_of_the_page_are_those_that_are_read(tmp_path: Path) -> None:
    """Its commands are run, with a kubectl that writes down what it is given, and an openssl of ours."""
    [block] = [text for text in blocks(DOCS / "kubernetes.md", "sh") if "spillway-nats" in text]
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" --end-- >>{tmp_path}/given\n')
    (tmp_path / "openssl").write_text("#!/bin/sh\nod -An -N32 -tx1 /dev/urandom | tr -d ' \\n'\n")
    for program in ("kubectl", "openssl"):
        (tmp_path / program).chmod(0o755)
    subprocess.run(["sh", "-eu", "-c", block], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    made: dict[str, dict[str, str]] = {}
    for call in (tmp_path / "given").read_text().split("\n--end--\n"):
        if "secret" in call:
            words = call.split("\n")
            literals = [word.removeprefix("--from-literal=") for word in words if word.startswith("--from-literal=")]
            made[words[3]] = {name: value for name, _, value in (literal.partition("=") for literal in literals)}
    nats = documents(HELM_FOLDER / "nats/values.yaml")[0]["container"]["env"]
    assert {name: set(values) for name, values in made.items()} == {
        "spillway": set(documents(CHART / "values.yaml")[0]["secret"]["keys"].values()) - {""},
        "spillway-nats": {v["valueFrom"]["secretKeyRef"]["key"] for v in nats.values() if isinstance(v, dict)},
    }
    password, cluster = made["spillway-nats"]["password"], made["spillway-nats"]["cluster-password"]
    assert re.fullmatch("n[0-9a-f]{64}", password)
    assert re.fullmatch("c[0-9a-f]{64}", cluster)
    assert json.loads(made["spillway"]["nats-urls"]) == [f"nats://spillway:{password}@nats:4222"]
    routes = [f"nats://cluster:{cluster}@nats-{number}.nats-headless:6222" for number in range(3)]
    assert made["spillway-nats"]["routes"] == f"[{', '.join(routes)}]"


def test_manifests_in_the_text_are_valid() -> None:
    [text] = blocks(DOCS / "model-cache.md", "yaml")
    manifests: list[Manifest] = list(yaml.safe_load_all(text))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, NEWEST, strict=True)
    claim, job = manifests
    [container] = containers(job)
    assert container["command"][0] == "hf"
    vllm = pod_of(one(rendered("vllm"), "Deployment", "spillway-worker-vllm"))
    assert vllm is not None
    assert {
        "name": "models",
        "persistentVolumeClaim": {"claimName": claim["metadata"]["name"], "readOnly": True},
    } in vllm["volumes"]
