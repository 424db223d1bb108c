"""``spillway worker`` beside a server, without a configuration file, as a process of its own."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

from protocol import job as m
from protocol.nats.bus import Bus
from spillway.config import DEMO_MODEL_PATH
from tests.conformance.replay import Replay, running
from tests.integration.pool_worker.playing_gateway import PlayingGateway
from tests.unit.deploy.description import locked
from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]


# Runs the command line where nothing can be imported but the standard library, we, and the distributions named.
WITH_NOTHING_ELSE = """
import importlib.metadata, sys

allowed = {"spillway", *sys.argv.pop(1).split(",")}
hidden = {
    package
    for package, owners in importlib.metadata.packages_distributions().items()
    if not allowed & {owner.lower().replace("_", "-").replace(".", "-") for owner in owners}
}
assert {"torch", "transformers", "numpy", "fastapi"} <= hidden

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
from spillway.cli import app
app(prog_name="spillway")
"""


def start(
    folder: Path, nats_url: str, server_url: str, *more: str, program: tuple[str, ...] = ("-m", "spillway")
) -> subprocess.Popen[str]:
    command = [sys.executable, *program, "worker", "--pool", "laptop", "--model", "llama-8b"]
    command += ["--tokenizer", str(DEMO_MODEL_PATH), "--engine-url", server_url, "--nats-url", nats_url, *more]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


async def log_of(process: subprocess.Popen[str]) -> str:
    try:
        return (await asyncio.to_thread(process.communicate, timeout=HANGS_S))[1]
    finally:
        process.kill()


async def test_it_serves_and_leaves_with_an_error_when_its_server_is_gone(nats_url: str, tmp_path: Path) -> None:
    gateway = PlayingGateway(await Bus.connect(nats_url, name="gateway"))
    await gateway.start(("llama-8b",))
    with running(Replay("vllm")) as replay:
        process = start(tmp_path, nats_url, replay.url, "--engine-kind", "vllm")
        asked: dict[str, Any] = {"model": "llama-8b", "prompt_ids": m.pack_token_ids(range(40, 50)), "ignore_eos": True}
        assert isinstance(await gateway.end_of(await gateway.ask(**asked)), m.Finished)
        replay.token_s = 30.0
        held = await gateway.ask(**asked)
        await gateway.wait(lambda: held in gateway.frames)
    failed = await gateway.end_of(held)
    assert isinstance(failed, m.Failed)
    assert failed.retryable
    log = await log_of(process)
    assert process.returncode == 1, log
    assert "is lost" in log.splitlines()[-1]
    await gateway.bus.close()


async def test_it_needs_nothing_but_what_the_side_cars_image_has(nats_url: str, tmp_path: Path) -> None:
    """No torch, no transformers; its group in the lock lists what is there."""
    gateway = PlayingGateway(await Bus.connect(nats_url, name="gateway"))
    await gateway.start(("llama-8b",))
    with running(Replay("vllm")) as replay:
        program = ("-c", WITH_NOTHING_ELSE, ",".join(locked("--only-group", "sidecar")))
        process = start(tmp_path, nats_url, replay.url, "--engine-kind", "vllm", program=program)
        asked: dict[str, Any] = {"model": "llama-8b", "prompt_ids": m.pack_token_ids(range(40, 50)), "ignore_eos": True}
        assert isinstance(await gateway.end_of(await gateway.ask(**asked)), m.Finished)
        process.terminate()
        log = await log_of(process)
    assert process.returncode == 0, log
    await gateway.bus.close()
