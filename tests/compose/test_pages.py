"""Every command of the compose pages is run by ``make compose``, or says why not."""

import re
import stat
from pathlib import Path

import pytest

from tests.compose import steps
from tests.compose.docker import NoDocker, copy_checkout, docker_versions, version_of
from tests.compose.pages import COMPOSE, OBSERVABILITY, ONE_BOX, Page
from tests.unit.deploy.description import ROOT

RUN = re.compile(r'rig\.page\(\s*(\w+),\s*"([^"]+)"(?:,\s*(\d+))?')
PAGES = {"ONE_BOX": ONE_BOX, "COMPOSE": COMPOSE, "OBSERVABILITY": OBSERVABILITY}


def test_every_block_of_commands_is_run_or_says_why_not() -> None:
    text = (ROOT / "tests/compose/steps.py").read_text()
    run = {(PAGES[page].name, heading, int(block or 0)) for page, heading, block in RUN.findall(text)}
    run.add(("compose.md", "Change the configuration", 0))  # a step holds that it is a line of another block
    assert {one for page in PAGES.values() for one in page.scripts()} == run | steps.NOT_RUN.keys()
    assert not run & steps.NOT_RUN.keys()


def test_blocks_are_found_below_their_heading(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```sh\n# no heading\none\n```\n\n## B\n\n1. x\n\n   ```sh\n   two \\\n     three\n   ```\n")
    assert Page(page).blocks("A", "sh") == ["# no heading\none\n"]
    assert Page(page).script("B", 0, {"three": "four"}) == "two \\\n  four\n"
    assert list(Page(page).scripts()) == [("page.md", "A", 0), ("page.md", "B", 0)]


def test_it_is_four_commands_to_a_stream_and_eight_to_a_second_provider() -> None:
    commands = [
        line
        for heading in ("Four commands to a stream", "Four more to a second provider")
        for line in ONE_BOX.script(heading, 0, {"\\\n": ""}).splitlines()
    ]
    assert len(commands) == 8
    assert commands[3].startswith("curl ")
    assert commands[7].startswith("curl ")


@pytest.mark.parametrize(
    ("docker", "reason"),
    [
        (None, "The program `docker` is not on PATH."),
        ("exit 1", "No Docker Engine answers"),
        ("test $1 = version && echo 27.1", "no plugin `compose`"),
        ("test $1 = version && echo 25.0.1 || echo v2.30.0", "Docker Engine 25.0.1 is too old."),
        ("test $1 = version && echo 27.1 || echo 2.24.6-1", "Compose 2.24.6-1 is too old."),
    ],
)
def test_what_is_missing_is_said(
    docker: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if docker is not None:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{docker}\n")
        (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoDocker, match="Install them: ") as missing:
        docker_versions()
    assert reason in str(missing.value)


def test_versions_are_compared_as_numbers() -> None:
    assert version_of("v2.26.1-4") == (2, 26)
    assert version_of("26.1.5+dfsg1") == (26, 1)


def test_the_copy_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    copy_checkout(tmp_path / "copy")
    assert (tmp_path / "copy/docker-compose.yml").read_text() == (ROOT / "docker-compose.yml").read_text()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "copy").rglob("*")}
    assert modes == {0o600, 0o700}
