"""Inference servers in the path, each with a side-car of the farm: real ones, and replays that misbehave when told to.

All serve the same model. A real server is a process that can be killed; a replay stands behind a wire that can be cut.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx
import psutil

from benchmarks.ports import free_port
from pool_worker.settings import ServerEngineSettings, Tier
from spillway.config import DEMO_MODEL_PATH
from tests.chaos.proxy import CutProxy
from tests.conformance.real_servers import llamacpp, vllm_server
from tests.conformance.replay import Fault, Replay, running

REVISION = "chaos"  # of all pools: the weights are the same
START_LIMIT_S = 300.0  # vLLM imports for long, and longer where others want the cores
STOP_LIMIT_S = 20.0
READY_POLL_S = 0.1
TOKEN_S = 0.005  # of a replay
FIRST_SLOT = 100  # of the farm, for side-cars
ServerKind = Literal["vllm", "llamacpp"]


@dataclass(frozen=True)
class ServerSpec:
    """One server, which is a pool of its own."""

    pool: str
    kind: ServerKind
    real: bool = True
    tier: Tier = "on-demand"
    settings: Mapping[str, Any] = field(default_factory=dict)  # further keys of [pools.X.engine]
    side_cars: int = 1


class Server(Protocol):
    """A server as faults see it. The order of life is ``start`` → (``kill`` → ``start``)* → ``stop``."""

    spec: ServerSpec
    url: str
    is_up: bool

    async def start(self) -> None:
        """Start it, and wait until it is ready."""
        ...

    def kill(self) -> None:
        """Break it off at once."""
        ...

    async def stop(self) -> None:
        """End it in order."""
        ...


class LlamaCppServers:
    """Starts processes of llama.cpp's server with the demo model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._command: list[str] = []

    async def launch(self, port: int, log: Path) -> int:
        """Return the id of a new process, and of its group. The first time installs the server, converts the model."""
        if not self._command:
            self._command, _ = await asyncio.to_thread(llamacpp, self._folder, port)
        python, script, model, _, *sizes = self._command
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                python, script, model, str(port), *sizes, stdout=output, stderr=output, start_new_session=True
            )
        return process.pid

    async def stop(self) -> None:
        """There is nothing but the servers."""


class VllmServers:
    """Starts processes of vLLM's server with the demo model: see ``vllm_forks``."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self._folder = folder
        self._log = logs / "vllm-forks.log"
        self._forks: asyncio.subprocess.Process | None = None
        self._one_by_one = asyncio.Lock()  # requests of one process, and their answers

    async def launch(self, port: int, log: Path) -> int:
        """Return the id of a new process, and of its group. The first time installs vLLM, and imports it."""
        async with self._one_by_one:
            return await self._fork(port, log)

    async def _fork(self, port: int, log: Path) -> int:
        if self._forks is None:
            ([python, _, _, *arguments], environment) = await asyncio.to_thread(vllm_server, self._folder, port)
            with self._log.open("ab") as output:
                self._forks = await asyncio.create_subprocess_exec(
                    python,
                    str(Path(__file__).with_name("vllm_forks.py")),
                    *arguments,
                    "--enforce-eager",
                    env={**os.environ, **environment},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                )
        assert self._forks.stdin is not None
        assert self._forks.stdout is not None
        self._forks.stdin.write(f"{port} {log}\n".encode())
        async with asyncio.timeout(START_LIMIT_S):
            return int(await self._forks.stdout.readline())

    async def stop(self) -> None:
        """End the process that servers are forked from; they themselves go on."""
        if self._forks is not None and self._forks.stdin is not None:
            self._forks.stdin.close()
            await self._forks.wait()


class RealServer:
    """A process of vLLM or llama.cpp. It dies as a group: vLLM's engine outlives its HTTP server otherwise."""

    def __init__(self, spec: ServerSpec, launcher: LlamaCppServers | VllmServers, logs: Path) -> None:
        self.spec = spec
        self.is_up = False
        self._launcher = launcher
        self._log = logs / f"server-{spec.pool}.log"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process_id: int | None = None

    async def start(self) -> None:
        """Implement ``Server``."""
        await self._wait_for_port()
        self._process_id = await self._launcher.launch(self._port, self._log)
        deadline_s = time.monotonic() + START_LIMIT_S
        async with httpx.AsyncClient(trust_env=False) as client:
            while time.monotonic() < deadline_s and psutil.pid_exists(self._process_id):
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/health")).is_success:
                        self.is_up = True
                        return
                await asyncio.sleep(READY_POLL_S)
        raise AssertionError(f"{self.spec.pool} did not start: {self._log.read_text(errors='replace')[-2000:]}")

    async def _wait_for_port(self) -> None:
        """Wait until nobody has the port: the kernel takes its time to end who was killed with so much memory."""
        async with asyncio.timeout(STOP_LIMIT_S):
            while True:
                try:
                    socket.create_server(("127.0.0.1", self._port)).close()
                except OSError:
                    await asyncio.sleep(READY_POLL_S)
                else:
                    return

    def kill(self) -> None:
        """SIGKILL it."""
        self.is_up = False
        if self._process_id is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process_id, signal.SIGKILL)

    async def stop(self) -> None:
        """Implement ``Server``."""
        self.is_up = False
        if self._process_id is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process_id, signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_LIMIT_S
        while psutil.pid_exists(self._process_id) and time.monotonic() < deadline_s:
            await asyncio.sleep(READY_POLL_S)
        self.kill()


class MisbehavingReplay(Replay):
    """A replay that does something else for the requests with certain seeds, once."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, token_s=TOKEN_S)
        self.faults_by_seed: dict[int, Fault] = {}
        self.struck_s: dict[int, float] = {}  # monotonic
        self.asked_times: dict[int, int] = {}

    def arm(self, seed: int, fault: Fault) -> None:
        """Do that to the next request with this seed."""
        self.asked_times[seed] = 0
        self.faults_by_seed[seed] = fault

    def fault_for(self, body: Mapping[str, Any]) -> Fault | None:
        """Implement ``Replay``."""
        seed = body.get("seed")
        if seed in self.asked_times:
            self.asked_times[seed] += 1
        fault = self.faults_by_seed.pop(seed, None) if seed is not None else None
        if seed is not None and fault is not None:
            self.struck_s[seed] = time.monotonic()
        return fault


class ReplayServer:
    """A replay behind a wire."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.is_up = False
        self.replay = MisbehavingReplay(spec.kind)
        self.wire: CutProxy
        self.url = ""
        self._stack = ExitStack()

    async def start(self) -> None:
        """Implement ``Server``."""
        if self.url:
            await self.wire.accept()
        else:
            self._stack.enter_context(running(self.replay))
            self.wire = CutProxy(int(self.replay.url.rpartition(":")[2]))
            await self.wire.start()
            self.url = f"http://127.0.0.1:{self.wire.port}"
        self.is_up = True

    def kill(self) -> None:
        """Cut the wire, and refuse who connects."""
        self.is_up = False
        self.wire.refuse()

    async def stop(self) -> None:
        """Implement ``Server``."""
        self.is_up = False
        if self.url:
            await self.wire.stop()
            await asyncio.to_thread(self._stack.pop_all().close)
        self.url = ""


def make_servers(specs: Sequence[ServerSpec], folder: Path, logs: Path, stack: AsyncExitStack) -> dict[str, Server]:
    """Make the servers by pool, not started yet; the stack stops them."""
    launchers: dict[str, LlamaCppServers | VllmServers] = {
        "llamacpp": LlamaCppServers(folder),
        "vllm": VllmServers(folder, logs),
    }
    servers: dict[str, Server] = {}
    for launcher in launchers.values():
        stack.push_async_callback(launcher.stop)
    for spec in specs:
        server = RealServer(spec, launchers[spec.kind], logs) if spec.real else ReplayServer(spec)
        stack.push_async_callback(server.stop)
        servers[spec.pool] = server
    return servers


def engine_settings(server: Server) -> ServerEngineSettings:
    """The settings of a side-car's engine."""
    further = {"max_sequences": 4, **server.spec.settings} if server.spec.real else server.spec.settings
    return ServerEngineSettings.model_validate(
        {
            "kind": server.spec.kind,
            "url": server.url,
            "tokenizer": str(DEMO_MODEL_PATH),
            "revision": REVISION,
            **further,
        }
    )
