"""``examples/one-gpu-box``, as its README says, with stand-ins for the programs ``vllm`` and ``hf``.

vLLM starts slowly: what the first start prints and answers meanwhile is tested here as well.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from spillway.config import DEMO_MODEL_PATH
from tests.acceptance.examples.conftest import Example
from tests.acceptance.examples.terminal import STARTED, Terminal
from tests.acceptance.system import System
from tests.conformance.replay import Replay, running

VLLM = '[ "$*" = "serve Qwen3-0.6B --port {port} --max-num-seqs 64" ]'
HF = f'[ "$1 $2 $3" = "download Qwen/Qwen3-0.6B --local-dir" ] && ln -s {DEMO_MODEL_PATH} "$4"'


def test_it_waits_for_vllm_streams_from_it_and_writes_the_bill(
    example: Callable[[str], Example], tmp_path: Path
) -> None:
    box = example("one-gpu-box")
    programs = tmp_path / "bin"
    programs.mkdir()
    with running(Replay("vllm", is_healthy=False)) as vllm:
        port = vllm.url.rpartition(":")[2]
        for name, script in {"vllm": VLLM.format(port=port), "hf": HF}.items():
            (programs / name).write_text(f"#!/bin/sh\n{script} || echo wrong: {name} $*\n")
            (programs / name).chmod(0o755)
        box.variables |= {
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SPILLWAY_POOLS__GPU__ENGINE__URL": vllm.url,
        }
        with box.terminal("first") as first, box.terminal("second") as second:
            first.type(box.page.script("One GPU box", 0, {"--port 8001": f"--port {port}"}))
            check_what_is_said_before_vllm_is_ready(first, box.system, vllm.url)
            vllm.is_healthy = True
            first.wait_for(STARTED)
            assert "wrong" not in first.output()
            printed = second.run(box.page.script("One GPU box", 1, {}))
            assert re.search(r"^\S{10,}\nfrom: gpu reserved$", printed, re.MULTILINE)
            box.system.wait_for_requests(1)
            [row] = box.system.usage()
            assert (row["model"], row["requests"], row["failed"]) == ("qwen3", 1, 0)
            first.press_ctrl_c()
        assert len(vllm.bodies) == 1


def check_what_is_said_before_vllm_is_ready(first: Terminal, system: System, url: str) -> None:
    """Login and endpoint come first, and the gateway says what is missing."""
    first.wait_for(f"worker-gpu-1: starting: {url} is not ready")
    first.wait_for("gateway: ready")
    output = first.output()
    assert re.search(r"Login +admin +\S+ +\(shown only once\)", output)
    assert output.index("Login") < output.index("gateway: ready")
    assert f"{system.base_url}/v1" in output
    with system.http() as http:
        assert http.get("/v1/models").status_code == 200
        ask = {"model": "qwen3", "messages": [{"role": "user", "content": "Hi"}]}
        answer = http.post("/v1/chat/completions", json=ask)
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == "model_not_ready"
    assert "Start a worker of a pool whose `models` name it (gpu)" in error["message"]
    status = system.command("status")
    assert re.search(rf"gpu +worker-gpu-1 +starting: {re.escape(url)} is not ready", status), status
