"""One simulation from start to verdict."""

import asyncio
import gc
import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation import sql
from tests.simulation.callers import Caller
from tests.simulation.faults import FAULTS
from tests.simulation.oracle import Oracle
from tests.simulation.parts import Gateway, Ledger, Part, PoolWorker
from tests.simulation.plan import Fault, Plan
from tests.simulation.virtual_time import CURRENT, SimulationStuck, VirtualLoop, simulated_world
from tests.simulation.world import World

ANSWER_LIMIT_S = 400.0  # after the last fault
SETTLE_LIMIT_S = 120.0  # after the last answer
LOOK_PERIOD_S = 0.25
SETTLE_LOOK_S = 0.5


@dataclass
class Verdict:
    """The result of one simulation."""

    seed: int
    offences: list[str]
    simulated_s: float
    requests: int
    answered: int
    codes: dict[str, int]  # of errors that clients received
    digest: str  # of all events
    events: list[tuple[Any, ...]]


class Simulation:
    def __init__(self, plan: Plan, loop: VirtualLoop) -> None:
        self.plan = plan
        self.world = world = World(loop, plan.seed)
        world.server.skew_s = self._skew_s("queue")
        self.rng = random.Random(f"faults {plan.seed}")
        self.database = sql.Database(world)
        self.oracle = oracle = Oracle(world, plan, self.database)
        self.ledger = Ledger(world, self._host("ledger"), self._skew_s("ledger"))
        self.gateways = oracle.gateways
        self.workers = oracle.workers
        for number in range(plan.gateways):
            name = f"g{number}"
            gateway = Gateway(world, name, self._host(name), self._skew_s(name), plan.policies, oracle.on_open)
            self.gateways.append(gateway)
        for number in range(plan.workers):
            name, tier = f"w{number}", ("spot", "on-demand")[number % 2]
            worker = PoolWorker(world, name, self._host(name), self._skew_s(name), plan.max_sequences, tier)
            worker.pace.token_s = plan.token_s
            self.workers.append(worker)
        oracle.callers += [Caller(world, question) for question in plan.questions]

    def _host(self, name: str) -> Any:
        if self.plan.layout == "one":
            return self.world.host("queue")
        is_front = self.plan.layout == "front" and name != "ledger"
        return self.world.host("front" if is_front else f"host-{name}")

    def _skew_s(self, name: str) -> float:
        return self.plan.skews_s.get(name, 0.0)

    @property
    def parts(self) -> list[Part]:
        return [self.ledger, *self.gateways, *self.workers]

    async def run(self) -> None:
        for part in self.parts:
            part.start()
        watching = asyncio.create_task(self._watch())
        asking = [asyncio.create_task(caller.ask(self.gateways)) for caller in self.oracle.callers]
        striking = [asyncio.create_task(self._strike(fault)) for fault in self.plan.faults]
        if striking:
            await asyncio.wait(striking)
        for task in striking:
            task.result()
        await asyncio.wait(asking, timeout=ANSWER_LIMIT_S)
        for task in asking:
            if task.done():
                task.result()
        await self._settle()
        watching.cancel()
        self.oracle.judge()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            self.oracle.look_at_leases()

    async def _strike(self, fault: Fault) -> None:
        await asyncio.sleep(max(0.0, fault.at_s - self.world.now_s))
        self.world.log("fault", fault.kind, fault.for_s, fault.pick)
        await FAULTS[fault.kind](self, fault)
        self.world.log("mended", fault.kind)

    async def _settle(self) -> None:
        deadline_s = self.world.now_s + SETTLE_LIMIT_S
        while self.world.now_s < deadline_s and self.oracle.unsettled():
            await asyncio.sleep(SETTLE_LOOK_S)


class _Logged(logging.Handler):
    """Shows log records to an observer, and reports critical ones and tracebacks as violations."""

    def __init__(self, world: World, show: Callable[[str], None] | None) -> None:
        super().__init__()
        self._world = world
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        process = CURRENT.get()
        name = process.name if process is not None else "-"
        if record.levelno >= logging.CRITICAL or (record.exc_info and record.levelno >= logging.ERROR):
            error = record.exc_info[1] if record.exc_info else None
            self._world.complain(f"{name}: {record.getMessage()} {error!r}")
        if self._show is not None:
            self._show(f"{self._world.now_s:12.6f} {name:<10} {record.levelname} {record.getMessage()}")


def _verdict_of(simulation: Simulation) -> Verdict:
    world, oracle = simulation.world, simulation.oracle
    return Verdict(
        seed=simulation.plan.seed,
        offences=world.offences,
        simulated_s=world.now_s,
        requests=len(oracle.callers),
        answered=sum(map(oracle.is_answered, oracle.callers)),
        codes=dict(Counter([code for caller in oracle.callers if (code := caller.error_code()) is not None])),
        digest=hashlib.sha256(repr(world.events).encode()).hexdigest(),
        events=world.events,
    )


def simulate(plan: Plan, show: Callable[[str], None] | None = None) -> Verdict:
    """Run one simulation; ``show`` is called with every event."""
    gc.disable()  # finalizers of dead processes must not run at times that the seed does not decide
    gc.freeze()  # existing objects stay, and need no scan later
    loop = VirtualLoop()
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        with simulated_world(loop, plan.seed):
            verdict = _run(plan, loop, show)
            loop.throw_away()  # completely: leftovers would accumulate and affect the next simulation
            return verdict
    finally:
        logging.disable(logging.NOTSET)
        root.handlers[:] = handlers
        root.setLevel(level)
        gc.enable()


def _run(plan: Plan, loop: VirtualLoop, show: Callable[[str], None] | None) -> Verdict:
    simulation = Simulation(plan, loop)
    world, root = simulation.world, logging.getLogger()
    root.handlers[:] = [_Logged(world, show)]
    root.setLevel(logging.INFO if show else logging.ERROR)
    if show is not None:
        world.show = show
    try:
        loop.run_until_complete(simulation.run())
    except SimulationStuck as error:
        world.offend(f"the simulation is stuck: {error}")
    world.is_over = True
    verdict = _verdict_of(simulation)
    logging.disable()
    root.handlers.clear()
    simulation.database.close()
    loop.end_tasks()
    for gateway in simulation.gateways:
        gateway.disk.throw_away()
    return verdict
