"""The interface of faults: the context they run in, and the record of each strike."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fastapi import Request
from fastapi.responses import Response

from spillway.children import Child
from tests.chaos.load import Call, Load
from tests.chaos.mix import Question
from tests.chaos.system import System
from tests.chaos.workers import LiveWorker

READY_WORKERS = 3  # that serve when a fault strikes, as far as there are so many: a rescue needs a rescuer
VICTIM_LIMIT_S = 60.0  # until somebody is in mid-stream


@dataclass(slots=True)
class Strike:
    """One fault that struck."""

    kind: str
    at_s: float  # monotonic
    worker_id: str | None  # None: no single worker
    streams: list[str]  # the requests in mid-stream that it concerns
    in_flight: int  # requests asked and not answered, of all callers
    mended_s: float | None = None
    may_stay: bool = False  # whether streams may go on with the same worker


@dataclass(frozen=True)
class Wrong:
    """One thing that an inference server does wrong. ``answers``: the ways in which it does it, one after the other."""

    name: str
    does: str
    answers: tuple[Callable[[Request], Response], ...] = ()  # to one request; none: the wire does it to all
    wishes: Literal["answer", "own error"] = "answer"  # the caller
    stays: bool = False  # whether the server's own worker may go on with the request
    told: str = ""  # a caller's own error says so
    listed: bool = True  # among the sixteen


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one request at which a server misbehaved."""

    kind: str  # of the strike
    wrong: Wrong
    call: Call
    struck_s: float  # monotonic
    asked_times: int = 0  # that the server was asked for its first choice


@dataclass(slots=True)
class Chaos:
    """The context of a fault."""

    system: System
    load: Load
    rng: random.Random
    strikes: list[Strike] = field(default_factory=list)
    asked: Sequence[Question] = ()  # that are answered undisturbed, too
    poisoned: list[asyncio.Task[Call]] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    left_running: list[asyncio.Task[None]] = field(default_factory=list)  # by faults that do not wait

    async def victim(self, of: Callable[[str], bool] = lambda _: True) -> LiveWorker:
        """A worker in the midst of at least one stream for which ``of`` holds, chosen as often as it has such."""
        farm, watcher = self.system.farm, self.system.watcher
        needed = min(READY_WORKERS, self.system.shape.workers)
        deadline_s = time.monotonic() + VICTIM_LIMIT_S
        while time.monotonic() < deadline_s:
            ready = {worker_id: worker for worker_id, worker in farm.live.items() if watcher.has_beaten(worker_id)}
            busy = [w for r in self.load.mid_stream(of) if (w := watcher.worker_of(r)) in ready]
            if busy and len(ready) >= needed:
                return ready[self.rng.choice(sorted(busy))]
            await asyncio.sleep(0.005)
        raise AssertionError(f"for {VICTIM_LIMIT_S:g} s no worker was in mid-stream while enough others served")

    async def busy_gateway(self) -> Child:
        """A gateway in the midst of at least one stream, while enough workers serve."""
        deadline_s = time.monotonic() + VICTIM_LIMIT_S
        while time.monotonic() < deadline_s:
            await self.victim()
            if busy := [gateway for gateway in self.system.gateways if self.load.mid_stream(self._is_at(gateway))]:
                return self.rng.choice(busy)
            await asyncio.sleep(0.005)
        raise AssertionError(f"for {VICTIM_LIMIT_S:g} s no gateway was in mid-stream")

    def _is_at(self, gateway: Child) -> Callable[[str], bool]:
        return lambda request_id: self.system.is_at(request_id, gateway)

    def strike(self, kind: str, worker: LiveWorker | None = None, of: Callable[[str], bool] | None = None) -> Strike:
        """Write a fault down, just before it strikes."""
        worker_id = worker.worker_id if worker else None
        concerned = of or (lambda request: worker_id is None or self.system.watcher.worker_of(request) == worker_id)
        streams, in_flight = self.load.mid_stream(concerned), len(self.load.open)
        strike = Strike(kind, time.monotonic(), worker_id, streams, in_flight)
        self.strikes.append(strike)
        return strike

    async def pause(self, bounds_s: tuple[float, float]) -> None:
        await asyncio.sleep(self.rng.uniform(*bounds_s))


Fault = Callable[[Chaos], Awaitable[None]]
FAULTS: dict[str, Fault] = {}


def fault(function: Fault) -> Fault:
    """Register a fault under its function's name."""
    FAULTS[function.__name__] = function
    return function
