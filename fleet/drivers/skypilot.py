"""Clusters of one machine each on any cloud that SkyPilot knows, by SkyPilot 0.14.

Its functions and what they raise: https://docs.skypilot.co/en/latest/reference/api.html (sky/client/sdk.py and
sky/exceptions.py of https://github.com/skypilot-org/skypilot). Importing it takes seconds, and it pins many
packages: it runs in a separate process, with ``python`` of the settings (``skypilot_runner``).

A cluster has its labels only once it is provisioned, and its name as soon as it is listed, some ten seconds after the
request, so the name contains the labels. SkyPilot's state is in its API server: controllers on several
machines need a common one.
"""

import asyncio
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import msgspec

from fleet.errors import LaunchRefused, NoCapacity, OverQuota, ProviderError
from fleet.machine import Order, ProviderMachine, labels_in, name_of
from fleet.settings import SkyPilotSettings
from protocol.process import ending, without_own_variables, write_to
from protocol.wire import UNDECODABLE

RUNNER: Final = Path(__file__).with_name("skypilot_runner.py")
CALL_LIMIT_S: Final = 50.0
# For a launch or an end to be done, before both continue in the background. Most refusals come within it; after a
# later one the machine is no longer listed. A cluster that SkyPilot could not set up stays, without a worker.
WAIT_S: Final = 25.0
LINE_MAX_BYTES: Final = 16 * 2**20  # of one answer: a list of clusters
ERRORS: Final = {error.__name__: error for error in (LaunchRefused, NoCapacity, OverQuota, ProviderError)}
ENDING: Final = "AUTOSTOPPING"


class _Answer(msgspec.Struct):
    id: int
    result: Any = None
    error: str | None = None  # the name of one of our errors
    text: str = ""


_decode_answer: Final = msgspec.json.Decoder(_Answer).decode


class _Cluster(msgspec.Struct):
    name: str
    status: str  # INIT, UP, STOPPED, AUTOSTOPPING


class SkyPilotDriver:
    """Launches a cluster for each machine; the places are SkyPilot's ``infra``."""

    launches_once: ClassVar[bool] = True  # a name is one cluster

    def __init__(
        self,
        settings: SkyPilotSettings,
        fleet_id: str,
        pool: str,
        *,
        spot: bool,
        wait_s: float = WAIT_S,
    ) -> None:
        self._settings = settings
        self._fleet_id = fleet_id
        self._pool = pool
        self._spot = spot
        self._wait_s = wait_s
        self._runner = _Runner(settings.python)

    @property
    def places(self) -> Sequence[str]:
        """The configured infras; [""]: what the task file says."""
        return self._settings.infra or ("",)

    async def launch(self, order: Order) -> str:
        """Ask SkyPilot's server for a cluster; returns its name without waiting until it is up."""
        name = await self._runner.call(
            "launch",
            name=name_of(order.labels),
            task=self._settings.task,
            infra=order.place,
            use_spot=self._spot,
            labels=dict(order.labels),
            environment=dict(order.environment),
            wait_s=self._wait_s,
        )
        return str(name)

    async def machines(self) -> list[ProviderMachine]:
        """Return our clusters; also a stopped one, whose disk is charged for."""
        clusters = msgspec.convert(await self._runner.call("list"), list[_Cluster])
        return [
            ProviderMachine(cluster.name, labels, cluster.status == ENDING)
            for cluster in clusters
            if (labels := labels_in(cluster.name, self._fleet_id, self._pool)) is not None
        ]

    async def end(self, provider_id: str) -> None:
        """End a cluster, if it is ours."""
        if labels_in(provider_id, self._fleet_id, self._pool) is not None:
            await self._runner.call("down", name=provider_id, wait_s=self._wait_s)

    async def close(self) -> None:
        """End the process."""
        await self._runner.stop()


class _Runner:
    """The process with SkyPilot: started by the first call, and again by the first one after it has died."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def call(self, verb: str, **arguments: Any) -> Any:  # noqa: ANN401 - JSON
        """Return the result. Raises ProviderError, or for a launch what refuses it."""
        process = await self._started()
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            request = msgspec.json.encode({"id": number, "verb": verb, "arguments": arguments})
            async with asyncio.timeout(CALL_LIMIT_S):
                await write_to(cast("asyncio.StreamWriter", process.stdin), request + b"\n")
                return await answer
        except TimeoutError as error:
            raise ProviderError(f"SkyPilot did not answer within {CALL_LIMIT_S:g} s") from error
        except OSError as error:
            raise ProviderError(f"SkyPilot's process: {error}") from error
        finally:
            del self._waiting[number]

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._reading is None or self._reading.done():
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        self._python,
                        str(RUNNER),
                        env=without_own_variables(os.environ),
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        limit=LINE_MAX_BYTES,
                    )
                except OSError as error:
                    raise ProviderError(f"{self._python}: {error.strerror}") from error
                self._reading = asyncio.create_task(self._read(self._process), name="skypilot answers")
            return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand out answers until the process ends."""
        try:
            async for line in cast("asyncio.StreamReader", process.stdout):
                self._hand_out(_decode_answer(line))
        except (*UNDECODABLE, ValueError) as error:
            self._fail(f"SkyPilot's process sent an invalid answer: {error}")
            process.kill()
        status = await process.wait()
        self._fail(f"SkyPilot's process ended with {ending(status)}")

    def _hand_out(self, answer: _Answer) -> None:
        future = self._waiting.get(answer.id)
        if future is None or future.done():  # no longer awaited
            return
        if answer.error is None:
            future.set_result(answer.result)
        else:
            future.set_exception(ERRORS.get(answer.error, ProviderError)(answer.text))

    def _fail(self, text: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ProviderError(text))

    async def stop(self) -> None:
        """Close its standard input and wait for its end."""
        if self._process is not None and self._reading is not None:
            cast("asyncio.StreamWriter", self._process.stdin).close()
            await self._reading
