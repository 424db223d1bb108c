"""The fleet controller's process: connect, learn from history, then decide and act while it is the leader."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from db.engine import create_engine
from fleet.controller import Controller, FleetPool, Group
from fleet.drivers import registry
from fleet.history import learn, tokens_per_request
from fleet.leader import Leadership
from fleet.machine_store import MachineStore
from fleet.monitor import Monitor, MonitoredGroup
from fleet.policy.decide import Decider
from fleet.settings import ControllerSettings, FleetSettings, ManagedPool, ProcessSettings
from protocol.errors import BusError
from protocol.nats.access import WorkerKeys, access_options
from protocol.nats.bus import Bus
from protocol.process import backoff_s, on_stop_signals

log = logging.getLogger(__name__)


def groups_of(pools: Mapping[str, ManagedPool]) -> list[frozenset[str]]:
    """Return the names of pools that belong together, because some queue is served by each next two of them."""
    groups: list[tuple[set[str], set[str]]] = []  # names, queues
    for name, pool in sorted(pools.items()):
        names, queues = {name}, set(pool.queues)
        for group in [group for group in groups if group[1] & queues]:
            groups.remove(group)
            names |= group[0]
            queues |= group[1]
        groups.append((names, queues))
    return [frozenset(names) for names, _ in groups]


async def run(
    settings: ControllerSettings, on_ready: Callable[[], None] | None = None, *, ends_machines: bool = False
) -> None:
    """Control the fleet until SIGTERM or SIGINT. Raises BusError if no queue server answers at first.

    ``ends_machines``: drain and end all machines before returning; otherwise the next controller adopts them.
    """
    stopped = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(on_stop_signals(stopped.set))
        access = access_options(settings.nats_credentials, settings.nats_ca_file, "fleet")
        bus = await Bus.connect(list(settings.nats_urls), name=f"fleet {settings.controller_id}", options=access)
        stack.push_async_callback(bus.close)
        engine = create_engine(settings.database_url)
        stack.push_async_callback(engine.dispose)
        groups = [_group(settings, names, stack) for names in groups_of(settings.pools)]
        request_tokens = partial(tokens_per_request, engine, settings.trusted_pools)
        monitor = Monitor(bus, [_monitored(settings, group) for group in groups], request_tokens)
        for group in groups:
            await learn(monitor.forecast(group.queues), engine, group.queues, settings.trusted_pools)
        await monitor.start()
        leadership = Leadership(bus, settings.controller_id)
        stack.push_async_callback(_release, leadership)
        keys = None if settings.fleet.worker_keys is None else WorkerKeys.read(settings.fleet.worker_keys)
        controller = Controller(
            settings.fleet,
            groups,
            bus=bus,
            store=MachineStore(engine),
            monitor=monitor,
            leadership=leadership,
            keys=keys,
        )
        clock = asyncio.create_task(bus.clock.run(), name="server clock")
        controlling = asyncio.create_task(_control(bus, controller), name="controller")
        stopping = asyncio.create_task(stopped.wait(), name="stopping")
        if on_ready is not None:
            on_ready()
        tasks = {clock, controlling, stopping}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in done - {stopping}:
            task.result()  # it has failed: the process ends with its error
        if ends_machines:
            await controller.end_everything(max(pool.drain_s for pool in settings.pools.values()))


def _group(settings: ControllerSettings, names: Iterable[str], stack: contextlib.AsyncExitStack) -> Group:
    pools = tuple(_pool(settings, name, stack) for name in sorted(names))
    queues = frozenset[str]().union(*(pool.queues for pool in pools))
    return Group(queues, pools, _decider(settings.fleet))


def _decider(fleet: FleetSettings) -> Decider:
    return Decider(max_wait_s=fleet.max_wait_s, idle_s=fleet.idle_s, cool_down_s=fleet.cool_down_s)


def _monitored(settings: ControllerSettings, group: Group) -> MonitoredGroup:
    # What demands trusted pools goes to no hosted API: their queues have no price here.
    prices = [settings.hosted_usd_per_token[queue] for queue in group.queues if queue in settings.hosted_usd_per_token]
    start_s = max(pool.settings.start_s for pool in group.pools)
    hosted_usd = min(prices) if len(prices) == len(group.queues) else None
    return MonitoredGroup(group.queues, start_s, settings.fleet.idle_s, hosted_usd)


def _pool(settings: ControllerSettings, name: str, stack: contextlib.AsyncExitStack) -> FleetPool:
    pool = settings.pools[name]
    driver = registry.create(
        pool.fleet.driver,
        fleet_id=settings.fleet.fleet_id,
        pool=name,
        tier=pool.tier,
        worker_command=settings.worker_commands.get(name, ()),
        log_dir=settings.data_dir / "logs" / "fleet",
    )
    stack.push_async_callback(driver.close)
    local = settings.local_environment if isinstance(pool.fleet.driver, ProcessSettings) else {}
    environment = {**settings.worker_environment, **local, "SPILLWAY_POOL": name}
    return FleetPool(name, pool.tier, pool.usd_per_hour, pool.drain_s, pool.queues, pool.fleet, driver, environment)


async def _control(bus: Bus, controller: Controller) -> None:
    """Control the fleet once the queue server's time is known, by which leases end: its streams may not exist yet."""
    for wait_s in backoff_s():
        try:
            await bus.clock.measure()
            break
        except BusError as error:
            log.debug("the queue server's time is not known yet: %s", error)
            await asyncio.sleep(wait_s)
    await controller.run()


async def _release(leadership: Leadership) -> None:
    with contextlib.suppress(BusError):
        await leadership.release()
