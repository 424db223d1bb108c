"""The wheel in an environment of its own, as ``pipx install`` makes one, used in a folder with clashing names.

All tests of this folder use what runs there; these are about its being a wheel.
"""

import json
import re
from pathlib import Path

import httpx
import openai

from tests.acceptance.shared.conftest import said_by
from tests.acceptance.system import System
from tests.unit.deploy.description import ROOMS
from tests.waiting import HANGS_S


def test_it_answers_in_a_folder_with_modules_of_the_same_names(
    system: System, environment: Path, users_folder: Path
) -> None:
    key = system.command("keys", "create", "wheel").splitlines()[0]
    with openai.OpenAI(base_url=f"{system.base_url}/v1", api_key=key, timeout=HANGS_S) as client:
        stream = client.chat.completions.create(
            model=system.model,
            messages=[{"role": "user", "content": "What is Spillway?"}],
            stream=True,
            temperature=0,
        )
        chunks = list(stream)
    said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(said) > 5
    assert "gateway" in "".join(said)
    system.wait_for_usage_of("wheel")
    report = said_by(environment, users_folder, "usage", "--by", "key", "--format", "json", program="spillway")
    assert [row["requests"] for row in json.loads(report) if row["key_name"] == "wheel"] == [1]


def test_its_pages_have_all_their_files(system: System) -> None:
    password = system.command("admin", "password").splitlines()[0]
    with httpx.Client(base_url=system.base_url, timeout=HANGS_S, follow_redirects=True) as browser:
        page = browser.post("/login", data={"name": "admin", "password": password})
        assert (page.status_code, page.url.path) == (200, "/dashboard")
        files = re.findall(r'"(/dashboard/static/[^"]+)"', page.text)
        assert files
        assert {browser.get(path).status_code for path in files} == {200}


def test_a_chat_template_gets_a_process_that_finds_the_rooms(environment: Path, users_folder: Path) -> None:
    code = """
import uvloop, spillway
from gateway.tokenizing.renderer import Renderer
async def main():
    renderer = Renderer("{{ messages[0].content }}", {})
    await renderer.start()
    print(await renderer.render([{"content": "rendered"}]))
    await renderer.close()
uvloop.run(main())
"""
    assert said_by(environment, users_folder, "-P", "-c", code) == "rendered\n"


def test_who_does_not_import_spillway_meets_none_of_its_rooms(environment: Path, users_folder: Path) -> None:
    assert said_by(environment, users_folder, "-c", "import db") == "another project\n"
    code = f"from importlib.util import find_spec; print([name for name in {ROOMS} if find_spec(name)])"
    assert said_by(environment, environment, "-c", code) == "['gateway', 'spillway']\n"
