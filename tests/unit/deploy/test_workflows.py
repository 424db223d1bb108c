"""What GitHub runs: valid, pinned, and the commands that the README names."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.description import DOCKERFILES, ROOT, instructions, services, tool

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}")


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows" / name).read_text())
    return found


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize(
    ("schema", "paths"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        ("vendor.dependabot", [ROOT / ".github/dependabot.yml"]),
        ("vendor.github-issue-forms", [ROOT / ".github/ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")]),
        ("vendor.github-issue-config", [ROOT / ".github/ISSUE_TEMPLATE/config.yml"]),
    ],
)
def test_files_follow_githubs_schema(schema: str, paths: list[Path]) -> None:
    command = [tool("check-jsonschema"), "--builtin-schema", schema, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_digest_and_may_only_read_by_default(path: Path) -> None:
    used = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert [action for action, _ in used if not PINNED.fullmatch(action)] == []
    assert all(re.search(r"# v\d", comment) for _, comment in used), "a digest without its version cannot be reviewed"
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    checkouts = [step for step in steps_of(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_a_change_is_tested_by_the_two_commands_of_the_readme() -> None:
    runs = [step["run"] for step in steps_of(ROOT / ".github/workflows/ci.yml") if "run" in step]
    quickstart = (ROOT / "README.md").read_text().partition("## Quickstart")[2]
    for command in ("make run", "make test"):
        assert re.search(rf"^{command} ", quickstart, re.MULTILINE)
        assert any(re.search(rf"^{command}\b", run, re.MULTILINE) for run in runs)


def test_a_release_builds_every_image_that_the_compose_file_runs() -> None:
    rows = workflow("release.yml")["jobs"]["images"]["strategy"]["matrix"]["include"]
    built = {service["image"].partition(":")[0] for service in services().values() if "build" in service}
    assert built <= {row["image"] for row in rows}
    files = {path.name.removesuffix(".Dockerfile"): path for path in DOCKERFILES}
    for row in rows:
        declared = {text.partition("=")[0] for name, text in instructions(files[row["file"]]) if name == "ARG"}
        assert {line.partition("=")[0] for line in row.get("args", "").splitlines()} <= declared, row


def test_a_released_image_says_its_source_and_revision() -> None:
    """Its version is in the Dockerfile."""
    steps = workflow("release.yml")["jobs"]["images"]["steps"]
    [build] = [step["with"] for step in steps if step.get("uses", "").startswith("docker/build-push-action@")]
    assert build["labels"] == "org.opencontainers.image.source=${{ github.server_url }}/${{ github.repository }}"
    assert "REVISION=${{ github.sha }}" in build["build-args"].splitlines()
