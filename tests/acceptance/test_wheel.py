"""The wheel in an environment of its own, as ``pipx install`` makes one, used in a folder with clashing names."""

import json
import os
import re
import signal
import subprocess
import sys
import venv
from pathlib import Path

import httpx
import openai
import pytest

from tests.acceptance.system import System, clean_environment
from tests.unit.deploy.description import ROOMS
from tests.waiting import HANGS_S
from tests.wheel import PIP, build_wheel

# Modules in the folder in which Spillway is used: called like rooms of ours, like Spillway, like Python's own.
CLASHING = ("gateway", "db", "tokens", "spillway", "json")
THEIRS = "raise SystemExit('another project')\n"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, and with a package that is called like a room.

    What the wheel depends on is searched where the tests have it. Their editable install is not seen: Python reads no
    .pth files in a folder that a .pth file names.
    """
    folder = tmp_path_factory.mktemp("installed")
    wheel = build_wheel(folder)
    made = folder / "venv"
    venv.create(made, symlinks=True)
    [site] = made.glob("lib/python*/site-packages")
    (site / "gateway.py").write_text(THEIRS)
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    options = ["--python", str(made / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run([*PIP, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    for name in CLASHING:
        (folder / f"{name}.py").write_text(THEIRS)
    return folder


def said_by(environment: Path, folder: Path, *arguments: str, program: str = "python") -> str:
    """Return what a program of the environment prints, started in this folder."""
    done = subprocess.run(
        [environment / "bin" / program, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
        env=clean_environment(),
    )
    return done.stdout + done.stderr


def test_spillway_up_answers_in_a_folder_with_modules_of_the_same_names(
    environment: Path, users_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # where nats-server is
    program = (str(environment / "bin" / "spillway"),)
    system = System(users_folder / "data", [], program=program, folder=users_folder)
    system.start()
    try:
        client = openai.OpenAI(base_url=f"{system.base_url}/v1", api_key=system.api_key, max_retries=0, timeout=HANGS_S)
        stream = client.chat.completions.create(
            model="spillway-demo",
            messages=[{"role": "user", "content": "What is Spillway?"}],
            stream=True,
            temperature=0,
        )
        chunks = list(stream)
        check_the_pages(system)
        assert system.stop(signal.SIGINT) == 0
    finally:
        system.kill_if_running()
    said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(said) > 5
    assert "gateway" in "".join(said)
    report = said_by(environment, users_folder, "usage", "--format", "json", program="spillway")
    assert [row["requests"] for row in json.loads(report)] == [1]


def check_the_pages(system: System) -> None:
    password = re.search(r"Login +admin +(\w{20})", system.output)
    assert password is not None, system.output
    with httpx.Client(base_url=system.base_url, timeout=HANGS_S, follow_redirects=True) as browser:
        page = browser.post("/login", data={"name": "admin", "password": password[1]})
        assert (page.status_code, page.url.path) == (200, "/dashboard")
        files = re.findall(r'"(/dashboard/static/[^"]+)"', page.text)
        assert {browser.get(path).status_code for path in files} == {200}


def test_a_chat_template_gets_a_process_that_finds_the_rooms(environment: Path, users_folder: Path) -> None:
    code = """
import asyncio, spillway
from tokens.renderer import Renderer
async def main():
    renderer = Renderer("{{ messages[0].content }}", {})
    await renderer.start()
    print(await renderer.render([{"content": "rendered"}]))
    await renderer.close()
asyncio.run(main())
"""
    assert said_by(environment, users_folder, "-P", "-c", code) == "rendered\n"


def test_who_does_not_import_spillway_meets_none_of_its_rooms(environment: Path, users_folder: Path) -> None:
    assert said_by(environment, users_folder, "-c", "import db") == "another project\n"
    code = f"from importlib.util import find_spec; print([name for name in {ROOMS} if find_spec(name)])"
    assert said_by(environment, environment, "-c", code) == "['gateway', 'spillway']\n"
