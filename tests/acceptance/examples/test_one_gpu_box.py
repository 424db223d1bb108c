"""``examples/one-gpu-box``, as its README says. Stand-ins take the place of the programs ``vllm`` and ``hf``."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.ports import free_port
from spillway.config import DEMO_MODEL_PATH
from tests.acceptance.examples.conftest import Example
from tests.acceptance.examples.terminal import STARTED
from tests.unit.deploy.description import ROOT

VLLM = f'PYTHONPATH={ROOT} exec {sys.executable} -m tests.acceptance.examples.vllm_stand_in "$@"'
HF = f'[ "$1 $2 $3" = "download Qwen/Qwen3-0.6B --local-dir" ] && ln -s {DEMO_MODEL_PATH} "$4"'


def test_it_streams_from_vllm_and_writes_the_bill(example: Callable[[str], Example], tmp_path: Path) -> None:
    box = example("one-gpu-box")
    vllm_port = free_port()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in {"vllm": VLLM, "hf": HF}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    box.variables |= {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SPILLWAY_POOLS__GPU__ENGINE__URL": f"http://127.0.0.1:{vllm_port}",
    }
    with box.terminal("first") as first, box.terminal("second") as second:
        first.type(box.page.script("One GPU box", 0, {"--port 8001": f"--port {vllm_port}"}))
        first.wait_for(STARTED)
        printed = second.run(box.page.script("One GPU box", 1, {}))
        assert "multi-cloud gateway for large language models" in printed
        assert "from: gpu reserved" in printed
        [row] = second.wait_for_usage("model", 1)
        assert (row["model"], row["requests"], row["failed"]) == ("qwen3", 1, 0)
        first.press_ctrl_c()
