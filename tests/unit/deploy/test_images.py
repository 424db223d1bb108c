"""The Dockerfiles and shell scripts: linted, pinned, and made of files that exist."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.unit.deploy.description import DOCKERFILES, ROOMS, ROOT, copied_sources, instructions, tool

BUILT_FROM_SOURCE = [path for path in DOCKERFILES if path.name != "nats.Dockerfile"]
SCRIPTS = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("deploy/**/*.sh"), ROOT / ".ci/run"]


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
    sources = copied_sources(path)
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [source for source in sources if not is_in_build_context(source)] == []


@pytest.mark.parametrize("path", BUILT_FROM_SOURCE, ids=name_of)
def test_every_room_is_copied(path: Path) -> None:
    assert set(ROOMS) <= set(copied_sources(path))


@pytest.mark.parametrize("path", BUILT_FROM_SOURCE, ids=name_of)
def test_dependencies_come_from_the_hash_lock(path: Path) -> None:
    installs = re.findall(r"pip (?:--python \S+ )?install [^&\n]*", path.read_text().replace("\\\n", ""))
    from_locks = [command for command in installs if "requirements/" in command]
    assert all("--require-hashes" in command and "--no-deps" in command for command in from_locks)
    # Beside the locks: the project itself, without an index, and torch where it is asked for.
    others = [command for command in installs if command not in from_locks]
    assert all("--no-index" in command or '"torch==$TORCH_VERSION"' in command for command in others)
    assert sum("torch==" in command for command in others) == (path.name == "worker.Dockerfile")


def test_torch_is_the_version_that_everybody_else_installs() -> None:
    pinned = re.search(r'^TORCH_VERSION = "(.+)"', (ROOT / "scripts/install_torch.py").read_text(), re.MULTILINE)
    in_image = re.search(
        r"^ARG TORCH_VERSION=(.+)", (ROOT / "deploy/images/worker.Dockerfile").read_text(), re.MULTILINE
    )
    assert pinned is not None
    assert in_image is not None
    assert in_image[1] == pinned[1]


@pytest.mark.parametrize("lock", ["core", "fleet", "sidecar"])
def test_images_of_gateway_and_side_car_have_no_torch(lock: str) -> None:
    assert re.search(r"^(torch|transformers)==", (ROOT / f"requirements/{lock}.txt").read_text(), re.MULTILINE) is None


def test_the_side_car_has_the_versions_that_are_tested() -> None:
    pins = {
        lock: set(re.findall(r"^([\w-]+==[^ ]+)", (ROOT / f"requirements/{lock}.txt").read_text(), re.MULTILINE))
        for lock in ("sidecar", "core")
    }
    assert pins["sidecar"] < pins["core"]


def test_the_controller_has_what_its_drivers_need_in_the_versions_that_are_tested() -> None:
    pins = {
        lock: set(re.findall(r"^([\w-]+==[^ ]+)", (ROOT / f"requirements/{lock}.txt").read_text(), re.MULTILINE))
        for lock in ("core", "fleet", "dev")
    }
    assert pins["fleet"] <= pins["dev"]
    assert {pin.partition("==")[0] for pin in pins["core"] - pins["fleet"]} == {"obstore"}  # of the extra s3
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {requirement.partition(">")[0] for extra in ("aws", "kubernetes") for requirement in extras[extra]}
    assert needed <= {pin.partition("==")[0] for pin in pins["fleet"]}


def test_each_lock_that_an_image_may_be_built_with_is_there() -> None:
    path = ROOT / "deploy/images/gateway.Dockerfile"
    locks = re.findall(r"\bLOCK=(\w+)", path.read_text())
    assert set(locks) == {"core", "fleet"}
    assert {f"requirements/{lock}.txt" for lock in locks} <= set(copied_sources(path))


def pin_of(package: str, lock: Path) -> str:
    found = re.search(rf"^{package}==.*(?:\n    --hash.*)+", lock.read_text(), re.MULTILINE)
    assert found is not None, f"{package} is not in {lock}"
    return found[0]


def test_build_backend_is_locked_as_in_the_other_locks() -> None:
    assert pin_of("setuptools", ROOT / "requirements/build.txt") == pin_of(
        "setuptools", ROOT / "requirements/worker.txt"
    )


@pytest.mark.parametrize("lock", ["core", "fleet", "worker", "sidecar"])
def test_images_can_trace(lock: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = {requirement.partition(">")[0] for requirement in extras["otel"]}
    locked = re.findall(r"^([\w-]+)==", (ROOT / f"requirements/{lock}.txt").read_text(), re.MULTILINE)
    assert len(needed) == 2
    assert needed <= set(locked)
