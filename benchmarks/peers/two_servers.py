"""The systems of ``failure_comparison``: two scripted engines of equal speed behind different servers and proxies.

A killed engine process is restarted a second later, as any supervisor would do.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.peers import litellm
from benchmarks.ports import free_port, wait_until_listening
from benchmarks.spillway_under_test import RunningSpillway, running
from protocol.process import stop_process
from spillway.children import die_with_parent

RESTART_WAIT_S: Final = 1.0
START_LIMIT_S: Final = 60.0
STOP_LIMIT_S: Final = 10.0
TGI_MAX_CONCURRENT: Final = 128  # its default; running requests count
UNBOUNDED: Final = 0
NO_KEY: Final = "none"


@dataclass(frozen=True)
class EngineShape:
    """The concurrency and the speed of each of the two engines."""

    slots: int
    token_ms: float


class EngineProcess(Protocol):
    """A process that runs an engine."""

    @property
    def pid(self) -> int:
        """Its current process id."""
        ...

    async def start(self) -> None:
        """Start it."""
        ...

    async def wait_ready(self) -> object:
        """Wait until it takes requests."""
        ...


async def kill_and_start(process: EngineProcess) -> None:
    """SIGKILL a process; return when its successor takes requests."""
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.sleep(RESTART_WAIT_S)
    await process.start()
    await process.wait_ready()


@dataclass(frozen=True)
class ComparedSystem:
    """A system with a chat endpoint in front of two engines."""

    ports: tuple[int, ...]  # callers alternate between them
    api_key: str
    engines: Sequence[EngineProcess]

    async def kill_engine(self, number: int) -> None:
        """SIGKILL one engine's process; return when its successor takes requests."""
        await kill_and_start(self.engines[number])


class EngineServerProcess:
    """``peers/engine_server.py`` on its own port."""

    def __init__(self, folder: Path, shape: EngineShape, max_concurrent: int) -> None:
        self.port = free_port()
        self._log = folder / f"engine-{self.port}.log"
        self._command = [sys.executable, "-m", "benchmarks.peers.engine_server", "--port", str(self.port)]
        self._command += ["--slots", str(shape.slots), "--token-ms", str(shape.token_ms)]
        self._command += ["--max-concurrent", str(max_concurrent)]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Its current process id."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it."""
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=output, stderr=output, start_new_session=True, preexec_fn=die_with_parent
            )

    async def wait_ready(self) -> None:
        """Wait until it listens. Raises TimeoutError or ChildProcessError, naming its log."""
        assert self._process is not None
        await wait_until_listening(self._process, self.port, START_LIMIT_S, self._log)

    async def stop(self) -> None:
        """End it."""
        if self._process is not None:
            await stop_process(self._process, "engine server", STOP_LIMIT_S)


@asynccontextmanager
async def two_engine_servers(
    folder: Path, shape: EngineShape, max_concurrent: int
) -> AsyncIterator[tuple[EngineServerProcess, ...]]:
    """Start two of the engine's own servers; yield when they are ready."""
    servers = tuple(EngineServerProcess(folder, shape, max_concurrent) for _ in range(2))
    async with AsyncExitStack() as stack:
        for server in servers:
            stack.push_async_callback(server.stop)
            await server.start()
        for server in servers:
            await server.wait_ready()
        yield servers


@asynccontextmanager
async def bounded_engine_servers(folder: Path, shape: EngineShape) -> AsyncIterator[ComparedSystem]:
    """Run engine servers with TGI's queue limit; callers alternate between them."""
    async with two_engine_servers(folder, shape, TGI_MAX_CONCURRENT) as servers:
        yield ComparedSystem(tuple(server.port for server in servers), NO_KEY, servers)


@asynccontextmanager
async def unbounded_engine_servers(folder: Path, shape: EngineShape) -> AsyncIterator[ComparedSystem]:
    """Run engine servers with vLLM's unbounded queue; callers alternate between them."""
    async with two_engine_servers(folder, shape, UNBOUNDED) as servers:
        yield ComparedSystem(tuple(server.port for server in servers), NO_KEY, servers)


@asynccontextmanager
async def litellm_proxy(folder: Path, shape: EngineShape, *, continues: bool) -> AsyncIterator[ComparedSystem]:
    """Run LiteLLM in front of engine servers with TGI's queue limit; retries and fallbacks on."""
    async with two_engine_servers(folder, shape, TGI_MAX_CONCURRENT) as servers:
        ports = [server.port for server in servers]
        async with litellm.running_failover_litellm(folder, ports, continues=continues) as proxy_port:
            yield ComparedSystem((proxy_port,), litellm.MASTER_KEY, servers)


@asynccontextmanager
async def spillway_with_two_workers(
    folder: Path, shape: EngineShape
) -> AsyncIterator[tuple[RunningSpillway, Sequence[EngineProcess]]]:
    """Run Spillway with two workers and default settings; yield it and the workers."""
    engine = {
        "kind": "scripted",
        "inter_token_s": shape.token_ms / 1000,
        "max_sequences": shape.slots,
        "faults_from_prompt": True,
    }
    settings: dict[str, Any] = {
        "models": {"scripted": {}},
        "pools": {"engines": {"models": ["scripted"], "engine": engine}},
    }
    names = ("worker 1", "worker 2")
    async with running(folder, settings, dict.fromkeys(names, "engines")) as system:
        yield system, [system.children[name] for name in names]


@asynccontextmanager
async def spillway(folder: Path, shape: EngineShape) -> AsyncIterator[ComparedSystem]:
    """Run Spillway with default settings."""
    async with spillway_with_two_workers(folder, shape) as (system, workers):
        yield ComparedSystem((system.port,), system.api_key, workers)


Opener = Callable[[Path, EngineShape], contextlib.AbstractAsyncContextManager[ComparedSystem]]
SYSTEMS: Final[dict[str, Opener]] = {
    "spillway": spillway,
    "engine_bounded": bounded_engine_servers,
    "engine_unbounded": unbounded_engine_servers,
    "litellm": partial(litellm_proxy, continues=False),
    "litellm_continuing": partial(litellm_proxy, continues=True),
}
