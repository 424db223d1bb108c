"""The Docker of this machine, and one compose project on it with a name, ports and networks of its own."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.ports import free_port
from tests.unit.deploy.description import ROOT

ENGINE_AT_LEAST: Final = (26, 0)
COMPOSE_AT_LEAST: Final = (2, 26)
BUILD_LIMIT_S: Final = 3600.0  # a cold build downloads torch
COMMAND_LIMIT_S: Final = 900.0
BUILD_ARGS_VARIABLE: Final = "COMPOSE_BUILD_ARGS"
HAPROXY_FILES: Final = 65_536  # as docker-compose.yml asks for
FURTHER_FILES: Final = 100  # that HAProxy has open besides two for each connection
SUBNETS: Final = range(128, 250)  # of 172.31.N.0/24; N = 250 is the compose file's own

STARTER: Final = ROOT / "scripts/start-docker.sh"
STARTER_FOLDER_VARIABLE: Final = "START_DOCKER_FOLDER"
STARTER_LIMIT_S: Final = 1800.0  # the first start installs Docker into a folder

HELP: Final = """\
{reason}
`make compose` needs Docker Engine {engine} and Compose {compose} or newer. Do one of these:
- Install them: https://docs.docker.com/engine/install/
- Point DOCKER_HOST to a running engine, and put `docker` with its plugin `compose` on PATH."""


class NoDocker(Exception):
    """There is no Docker that can run the compose file. The text says how to get one."""

    def __init__(self, reason: str) -> None:
        wanted = {"engine": ENGINE_AT_LEAST[0], "compose": ".".join(map(str, COMPOSE_AT_LEAST))}
        super().__init__(HELP.format(reason=reason, **wanted))


class CommandFailed(Exception):
    """A command ended with something other than 0. The text has the command and the end of its output."""


def call(*words: str, cwd: Path | None = None, limit_s: float = COMMAND_LIMIT_S) -> str:
    """Run a program and return its stdout. Raises CommandFailed with its output."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, timeout=limit_s)
    if done.returncode != 0:
        raise CommandFailed(f"{shlex.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def docker_versions() -> tuple[str, str]:
    """Return the versions of engine and Compose. Raises NoDocker if one is missing or too old."""
    if shutil.which("docker") is None:
        raise NoDocker("The program `docker` is not on PATH.")
    try:
        engine = call("docker", "version", "--format", "{{.Server.Version}}").strip()
    except CommandFailed as error:
        where = os.environ.get("DOCKER_HOST", "its default address")
        raise NoDocker(f"No Docker Engine answers at {where}.\n{error}") from error
    try:
        compose = call("docker", "compose", "version", "--short").strip()
    except CommandFailed as error:
        raise NoDocker("`docker` has no plugin `compose`.") from error
    for name, version, at_least in (("Docker Engine", engine, ENGINE_AT_LEAST), ("Compose", compose, COMPOSE_AT_LEAST)):
        if version_of(version) < at_least:
            raise NoDocker(f"{name} {version} is too old.")
    return engine, compose


@contextmanager
def running_docker(starter: Path = STARTER) -> Iterator[tuple[str, str]]:
    """Yield the versions of engine and Compose. If no engine answers, start one, and stop it at the end.

    ``START_DOCKER_FOLDER`` says where it lies; default: build/docker. Raises NoDocker if none can be started.
    """
    if "DOCKER_HOST" in os.environ or engine_answers():
        yield docker_versions()
        return
    folder = os.environ.get(STARTER_FOLDER_VARIABLE, str(ROOT / "build/docker"))
    started = subprocess.run(
        [starter, folder], stdout=2, stderr=subprocess.PIPE, text=True, check=False, timeout=STARTER_LIMIT_S
    )
    if started.returncode != 0:
        raise NoDocker(f"No Docker Engine answers, and scripts/{starter.name} starts none: {started.stderr.strip()}")
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{folder}/bin{os.pathsep}{path}"
    try:
        yield docker_versions()
    finally:
        os.environ["PATH"] = path
        call(str(starter), "--stop", folder)


def engine_answers() -> bool:
    """Return whether this machine has the program `docker` and an engine that answers it."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def version_of(text: str) -> tuple[int, ...]:
    """Return major and minor version of ``v2.26.1-4`` and the like."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def copy_checkout(target: Path) -> None:
    """Copy what git knows of this checkout and what is new in it, readable by its owner only, as umask 077 makes it."""
    files = call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, files):
        source, copy = ROOT / name, target / name
        if source.is_file():  # not if it is deleted and not yet committed
            copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            shutil.copyfile(source, copy)
            copy.chmod(0o700 if os.access(source, os.X_OK) else 0o600)
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        folder.chmod(0o700)


def builds(folder: Path) -> dict[str, dict[str, Any]]:
    """Return image to ``build`` section, of all files of compose in a checkout that build without a GPU's image."""
    found: dict[str, dict[str, Any]] = {}
    for file in (folder / "docker-compose.yml", *sorted((folder / "deploy/compose").glob("*.yml"))):
        for service in yaml.safe_load(file.read_text())["services"].values():
            if "build" in service:
                found[service["image"]] = service["build"]
    return found


def build_images(folder: Path, log: Path) -> list[str]:
    """Build all images of the compose files in ``folder``; return their names.

    ``COMPOSE_BUILD_ARGS`` has what this site's builds need besides, such as ``--network host --build-arg …``.
    """
    names = builds(folder)
    for image, build in names.items():
        given = [word for name, value in build.get("args", {}).items() for word in ("--build-arg", f"{name}={value}")]
        command = ["docker", "build", "--progress", "plain", "-f", build["dockerfile"], "-t", image, *given]
        command += [*shlex.split(os.environ.get(BUILD_ARGS_VARIABLE, "")), build["context"]]
        with log.open("a") as output:
            output.write(f"+ {shlex.join(command)}\n")
            output.flush()
            done = subprocess.run(command, cwd=folder, stdout=output, stderr=output, check=False, timeout=BUILD_LIMIT_S)
        if done.returncode != 0:
            raise CommandFailed(f"{shlex.join(command)} ended with {done.returncode}: see {log}")
    return list(names)


def has_image(name: str) -> bool:
    """Return whether an image is here or can be pulled."""
    for verb in (["image", "inspect"], ["pull", "--quiet"]):
        if subprocess.run(["docker", *verb, name], capture_output=True, check=False).returncode == 0:
            return True
    return False


def free_subnet() -> str:
    """Return the first three numbers of a network of 256 addresses that no network of this Docker uses."""
    networks = call("docker", "network", "ls", "--quiet").split()
    used = call("docker", "network", "inspect", *networks, "--format", "{{range .IPAM.Config}}{{.Subnet}} {{end}}")
    return random.choice([f"172.31.{number}" for number in SUBNETS if f"172.31.{number}." not in used])


def remove_labelled(label: str) -> None:
    """Remove all containers, networks and volumes with a label."""
    for kind, listed, removed in (
        ("container", ["--all"], ["--force"]),
        ("network", [], []),
        ("volume", [], ["--force"]),
    ):
        names = call("docker", kind, "ls", *listed, "--quiet", "--filter", f"label={label}").split()
        if names:
            call("docker", kind, "rm", *removed, *names)


class Project:
    """One compose project in a folder with a copy of the checkout. Its ``.env`` and configurations are its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.port, self.pages_port = free_port(), free_port()
        self.tls_port, self.pages_tls_port = free_port(), free_port()
        self.subnet = free_subnet()
        self.environment = {
            "COMPOSE_PROJECT_NAME": name,
            "PUBLISH_PORT": str(self.port),
            "PAGES_PORT": str(self.pages_port),
            "TLS_ADDRESS": "127.0.0.1",
            "TLS_PORT": str(self.tls_port),
            "PAGES_TLS_PORT": str(self.pages_tls_port),
            "EDGE_SUBNET": f"{self.subnet}.0/24",
            "BALANCER_ADDRESS": f"{self.subnet}.250",
        }

    def run(self, script: str, log: Path, limit_s: float = COMMAND_LIMIT_S) -> str:
        """Run a script of the shell in the folder and return its stdout; its stderr goes into the log."""
        # In a session of its own: if this process is interrupted, it ends all that the script has started.
        with (
            log.open("a") as errors,
            subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", script],
                cwd=self.folder,
                env={**os.environ, **self.environment},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            ) as process,
        ):
            try:
                out, _ = process.communicate(timeout=limit_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            errors.write(out)
        if process.returncode != 0:
            raise CommandFailed(f"ended with {process.returncode}, see {log}:\n{script}\n{last_lines(log)}")
        return out

    def compose(self, *words: str, log: Path, limit_s: float = COMMAND_LIMIT_S) -> str:
        """Run ``docker compose`` in the folder."""
        return self.run(shlex.join(["docker", "compose", *words]), log, limit_s)

    def states(self, log: Path) -> dict[str, str]:
        """Return the health of each container, or its state where it has no check."""
        lines = self.compose("ps", "--all", "--format", "json", log=log).splitlines()
        return {one["Name"]: one["Health"] or one["State"] for one in map(json.loads, lines)}

    def fit_haproxy(self) -> int | None:
        """Lower ``maxconn`` in this copy's haproxy.cfg if this Docker gives fewer open files; return the new one.

        Some engines, rootless ones among them, cannot raise the limit that docker-compose.yml asks for.
        """
        image = "haproxy:3.2-alpine"
        limit = f"nofile={HAPROXY_FILES}:{HAPROXY_FILES}"
        files = int(call("docker", "run", "--rm", "--ulimit", limit, "--entrypoint", "sh", image, "-c", "ulimit -n"))
        config = self.folder / "deploy/haproxy/haproxy.cfg"
        wanted = re.search(r"^    maxconn (\d+)$", config.read_text(), re.MULTILINE)
        assert wanted is not None
        fits = files // 2 - FURTHER_FILES
        if fits >= int(wanted[1]):
            return None
        config.write_text(config.read_text().replace(wanted[0], f"    maxconn {fits}"))
        return fits

    def down(self) -> None:
        """Remove all containers, networks and volumes of the project."""
        remove_labelled(f"com.docker.compose.project={self.name}")


def last_lines(log: Path, count: int = 20) -> str:
    """Return the end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
