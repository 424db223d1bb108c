"""NVIDIA Dynamo's frontend in front of two of its mockers (engines without a model), with NATS as the request plane.

``instant`` makes tokens without delay, ``paced`` one every ``token_ms``. Requests go over NATS, answers over TCP
directly from worker to frontend: Dynamo has no response plane on NATS. Discovery uses a folder instead of etcd. The
frontend checks no key. Its environment is made on demand from the pinned set in ``dynamo.txt``.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import numpy as np

from benchmarks.peers import pinned
from benchmarks.ports import free_port, wait_until_listening
from protocol.process import stop_process
from spillway.children import die_with_parent
from spillway.embedded_nats import USER, EmbeddedNats

MODEL: Final = Path(__file__).resolve().parents[2] / "models" / "spillway-demo"  # for its tokenizer and template
MODELS: Final = ("instant", "paced")
START_LIMIT_S: Final = 120.0
POLL_S: Final = 0.1
STOP_LIMIT_S: Final = 10.0
LARGEST: Final = 1e9  # tokens; beyond the end of a profile the mocker has no delay at all


@dataclass(frozen=True)
class RunningDynamo:
    """A frontend on 127.0.0.1 and its processes."""

    port: int
    pids: dict[str, int]  # "frontend" | "mocker instant" | "mocker paced" | "nats" → process id


def install() -> str:
    """Install the pinned environment; return the version (``pinned.install``)."""
    return pinned.install("dynamo", "ai-dynamo")


@asynccontextmanager
async def running_dynamo(folder: Path, token_ms: float) -> AsyncIterator[RunningDynamo]:
    """Run NATS, mockers and frontend while the context lasts; logs and state go into ``folder``.

    Raises TimeoutError or ChildProcessError, naming the log, if the frontend fails to start.
    """
    port, nats = free_port(), EmbeddedNats(folder / "dynamo", free_port())
    profile = folder / "paced.npz"
    _write_profile(profile, token_ms)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "HF_"))},
        "NATS_SERVER": f"nats://127.0.0.1:{nats.port}",
        "NATS_AUTH_USERNAME": USER,
        "NATS_AUTH_PASSWORD": nats.password,
        "DYN_REQUEST_PLANE": "nats",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "dynamo" / "discovery"),
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
    }
    commands = {
        "mocker instant": _mocker("instant", "--speedup-ratio", "0"),
        "mocker paced": _mocker("paced", "--planner-profile-data", str(profile)),
        "frontend": ["dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)],
    }
    async with AsyncExitStack() as stack:
        stack.push_async_callback(nats.stop)
        await nats.start()
        pids = {"nats": nats.pid}
        for name, command in commands.items():
            log = folder / f"{name}.log"
            process = await _start(command, environment, log)
            stack.push_async_callback(stop_process, process, name, STOP_LIMIT_S)
            pids[name] = process.pid
        await wait_until_listening(process, port, START_LIMIT_S, log)
        await _wait_until_served(port)
        yield RunningDynamo(port, pids)


async def _wait_until_served(port: int) -> None:
    """Wait until the frontend serves both models. Raises TimeoutError."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client, asyncio.timeout(START_LIMIT_S):
        while len((await client.get("/v1/models")).json()["data"]) < len(MODELS):  # noqa: ASYNC110  # another process
            await asyncio.sleep(POLL_S)


def _mocker(model: str, *timing: str) -> list[str]:
    endpoint = f"dyn://dynamo.{model}.generate"
    return ["dynamo.mocker", "--model-path", str(MODEL), "--model-name", model, "--endpoint", endpoint, *timing]


def _write_profile(path: Path, token_ms: float) -> None:
    edges = np.array([0.0, LARGEST])
    np.savez(
        path,
        prefill_isl=edges,
        prefill_ttft_ms=np.zeros(2),
        decode_active_kv_tokens=edges,
        decode_context_length=edges,
        decode_itl=np.full((2, 2), token_ms),
    )


async def _start(command: list[str], environment: dict[str, str], log: Path) -> asyncio.subprocess.Process:
    python = str(pinned.ENVIRONMENTS / "dynamo" / "bin" / "python")
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *(python, "-m", *command),
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
