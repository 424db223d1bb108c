"""The parsed compose file and the Dockerfiles' instructions, for the tests of ``deploy/``."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
COMPOSE_FILE = ROOT / "docker-compose.yml"
OVERLAY_FILE = ROOT / "deploy/compose/remote-workers.yml"
OBSERVABILITY_FILE = ROOT / "deploy/compose/observability.yml"
GRAFANA_FILE = ROOT / "deploy/compose/grafana.yml"
VLLM_FILE = ROOT / "deploy/compose/vllm.yml"
TLS_FILE = ROOT / "deploy/compose/tls.yml"
HOSTED_FILE = ROOT / "deploy/compose/hosted-api.yml"
CONFIG_TARGET = "/etc/spillway/spillway.toml"  # in every image
ROOMS = sorted(
    path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in {"benchmarks", "tests"}
)
DOCKERFILES = sorted((ROOT / "deploy/images").glob("*.Dockerfile"))

# As init-env.sh makes them: hex, and here of digits only, which is the hard case for nats-server's configuration.
ENVIRONMENT = {"POSTGRES_PASSWORD": "1" * 64, "NATS_PASSWORD": "2" * 64, "KEY_PEPPER": "3" * 64}


def tool(name: str) -> str:
    """A program installed beside this Python, or else on PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"{name} is not installed"
    return found


def locked(*options: str) -> dict[str, str]:
    """Return what uv installs of the lock with these options, as package to version, for every system."""
    command = [tool("uv"), "export", "--frozen", "--offline", "--quiet", "--no-hashes", "--no-emit-project", *options]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return dict(re.findall(r"^([\w-]+)==([^ \n]+)", listed, re.MULTILINE))


def promtool() -> str:
    """Prometheus' checker, which scripts/setup.py takes out of Debian's package."""
    beside = Path(sys.executable).parents[1] / "tools/promtool"
    found = str(beside) if beside.exists() else shutil.which("promtool")
    if found is None and not Path("/etc/debian_version").exists():
        pytest.skip("promtool is not installed")
    assert found is not None, "promtool is not installed: scripts/setup.sh test"
    return found


def interpolate(text: str) -> str:
    """Compose's interpolation, of the two forms used here: ``${NAME:-default}`` and ``${NAME:?message}``."""

    def value_of(found: re.Match[str]) -> str:
        name, kind, rest = found.groups()
        if kind == ":?":
            return ENVIRONMENT.get(name, "127.0.0.1")
        return ENVIRONMENT.get(name, rest)

    return re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", value_of, text)


def filled_in(node: Any) -> Any:
    """A parsed document with every string interpolated."""
    if isinstance(node, dict):
        return {key: filled_in(value) for key, value in node.items()}
    if isinstance(node, list):
        return [filled_in(value) for value in node]
    return interpolate(node) if isinstance(node, str) else node


def compose() -> dict[str, Any]:
    """The compose file as the engine sees it: anchors merged, variables filled in."""
    whole: dict[str, Any] = filled_in(yaml.safe_load(COMPOSE_FILE.read_text()))
    return whole


def services() -> dict[str, Any]:
    return dict(compose()["services"])


def observability() -> dict[str, Any]:
    """The services that the overlays for Prometheus and Grafana add."""
    files = (OBSERVABILITY_FILE, GRAFANA_FILE)
    return {
        name: one for file in files for name, one in filled_in(yaml.safe_load(file.read_text()))["services"].items()
    }


def vllm_overlay() -> dict[str, Any]:
    """The overlay with vLLM and a side-car."""
    return dict(filled_in(yaml.safe_load(VLLM_FILE.read_text())))


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, continued lines joined, comments left out."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]  # type: ignore[misc]


def copied_sources(dockerfile: Path) -> list[str]:
    """Return what a Dockerfile takes from the build context."""
    found: list[str] = []
    for name, arguments in instructions(dockerfile):
        if name == "COPY" and not arguments.startswith("--from"):
            found.extend(source for source in arguments.split()[:-1] if not source.startswith("--"))
    return found


def seconds(duration: str) -> float:
    """A compose duration such as ``45s``."""
    assert duration.endswith("s"), duration
    return float(duration.removesuffix("s"))


def options_of(arguments: list[str]) -> dict[str, Any]:
    """The options of a command line, as the real command-line program parses them, without running it."""
    import typer

    from spillway.cli import app

    command = typer.main.get_command(app)
    context = command.make_context("spillway", ["--help"], resilient_parsing=True)
    rest = list(arguments)
    while hasattr(command, "resolve_command"):
        _, command, rest = command.resolve_command(context, rest)
        assert command is not None, arguments
    return command.make_context(command.name, rest).params
