"""All faults, one function each: it causes the fault, and returns when it is repaired.

To add one, write it here with ``@fault``, and give it a weight and a description in ``plan``.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from tests.simulation.network import Host
from tests.simulation.parts import Part
from tests.simulation.plan import Fault
from tests.simulation.world import Noise

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

SLOW_FACTOR = 20
HEALTH_PERIOD_S = 5.0  # of the check that restarts a queue server that stores nothing (docker-compose.yml)
_One = TypeVar("_One")

FAULTS: dict[str, Callable[["Simulation", Fault], Awaitable[None]]] = {}


def fault(function: Callable[["Simulation", Fault], Awaitable[None]]) -> None:
    FAULTS[function.__name__] = function


def _picked(some: Sequence[_One], pick: float) -> _One:
    return some[int(pick * len(some))]


def _kill(simulation: "Simulation", part: Part, *, with_host: bool = False) -> None:
    lost = simulation.oracle.lost_workers if part in simulation.workers else simulation.oracle.lost_gateways
    lost.add(part.id)
    part.kill(with_host=with_host)


async def _frozen(simulation: "Simulation", part: Part, for_s: float) -> None:
    part.freeze()
    await asyncio.sleep(for_s)
    part.thaw()


@fault
async def worker_crash(simulation: "Simulation", fault: Fault) -> None:
    _kill(simulation, _picked(simulation.workers, fault.pick))


@fault
async def worker_freeze(simulation: "Simulation", fault: Fault) -> None:
    await _frozen(simulation, _picked(simulation.workers, fault.pick), fault.for_s)


@fault
async def worker_slow(simulation: "Simulation", fault: Fault) -> None:
    pace = _picked(simulation.workers, fault.pick).pace
    pace.token_s *= SLOW_FACTOR
    await asyncio.sleep(fault.for_s)
    pace.token_s /= SLOW_FACTOR


@fault
async def worker_drain(simulation: "Simulation", fault: Fault) -> None:
    _picked(simulation.workers, fault.pick).stop_in_order()


@fault
async def engine_death(simulation: "Simulation", fault: Fault) -> None:
    engine = _picked(simulation.workers, fault.pick).engine
    if engine is not None:
        engine.will_die = True
        engine._wake.set()


@fault
async def workers_away(simulation: "Simulation", fault: Fault) -> None:
    for worker in simulation.workers:
        worker.may_start = False
        _kill(simulation, worker)
    await asyncio.sleep(fault.for_s)
    for worker in simulation.workers:
        worker.may_start = True
        worker.start()


@fault
async def gateway_crash(simulation: "Simulation", fault: Fault) -> None:
    _kill(simulation, _picked(simulation.gateways, fault.pick))


@fault
async def gateway_freeze(simulation: "Simulation", fault: Fault) -> None:
    simulation.oracle.frozen_s += fault.for_s
    await _frozen(simulation, _picked(simulation.gateways, fault.pick), fault.for_s)


@fault
async def gateway_restart(simulation: "Simulation", fault: Fault) -> None:
    _picked(simulation.gateways, fault.pick).stop_in_order()


@fault
async def ledger_crash(simulation: "Simulation", fault: Fault) -> None:
    simulation.ledger.may_start = False
    _kill(simulation, simulation.ledger)
    await asyncio.sleep(fault.for_s)
    simulation.ledger.may_start = True
    simulation.ledger.start()


@fault
async def sql_away(simulation: "Simulation", fault: Fault) -> None:
    simulation.database.is_away = True
    await asyncio.sleep(fault.for_s)
    simulation.database.is_away = False


@fault
async def nats_crash(simulation: "Simulation", fault: Fault) -> None:
    server = simulation.world.server
    was_up = server.is_up
    if was_up:
        server.crash()
        await asyncio.sleep(fault.for_s)
        if server.host.is_up and not server.is_up:
            server.start()


@fault
async def nats_freeze(simulation: "Simulation", fault: Fault) -> None:
    process = simulation.world.server.process
    process.freeze()
    await asyncio.sleep(fault.for_s)
    process.thaw()


@fault
async def kick(simulation: "Simulation", fault: Fault) -> None:
    connections = simulation.world.server.connections
    if connections:
        simulation.world.server.kick(_picked(connections, fault.pick))


@fault
async def partition(simulation: "Simulation", fault: Fault) -> None:
    hosts = [host for host in simulation.world.hosts.values() if host is not simulation.world.server.host]
    if not hosts:
        return
    host = _picked(hosts, fault.pick)
    host.is_deaf, host.is_mute = simulation.rng.choice(((True, False), (False, True), (True, True)))
    simulation.world.log("cut off", host.name, host.is_deaf, host.is_mute)
    await asyncio.sleep(fault.for_s)
    host.is_deaf = host.is_mute = False
    simulation.world.server.healed(host)


@fault
async def noise(simulation: "Simulation", fault: Fault) -> None:
    rng, world = simulation.rng, simulation.world
    world.loudness = Noise(*[rng.choice((0.0, 0.02, 0.2)) for _ in range(4)])
    await asyncio.sleep(fault.for_s)
    world.loudness = Noise()


def _power_off(simulation: "Simulation", host: Host) -> None:
    host.is_up = False
    for part in simulation.parts:
        if part.host is host:
            _kill(simulation, part, with_host=True)
    if simulation.world.server.host is host and not simulation.world.server.process.is_dead:
        simulation.world.server.crash()


def _power_on(simulation: "Simulation", host: Host) -> None:
    host.is_up = True
    server = simulation.world.server
    if server.host is host and server.process.is_dead:
        server.start()
    for part in simulation.parts:
        if part.host is host:
            part.start()


@fault
async def host(simulation: "Simulation", fault: Fault) -> None:
    machine = _picked(list(simulation.world.hosts.values()), fault.pick)
    simulation.world.log("power off", machine.name)
    _power_off(simulation, machine)
    await asyncio.sleep(fault.for_s)
    _power_on(simulation, machine)


@fault
async def power(simulation: "Simulation", fault: Fault) -> None:
    for machine in simulation.world.hosts.values():
        _power_off(simulation, machine)
    await asyncio.sleep(fault.for_s)
    for machine in simulation.world.hosts.values():
        _power_on(simulation, machine)


@fault
async def disk_full(simulation: "Simulation", fault: Fault) -> None:
    server = simulation.world.server
    server.jetstream.is_full = True
    await asyncio.sleep(fault.for_s)
    server.jetstream.is_full = False
    await asyncio.sleep(HEALTH_PERIOD_S)
    if server.jetstream.is_broken and server.is_up:
        server.crash()
        await asyncio.sleep(1.0)
        if server.host.is_up:
            server.start()
