"""The controller: every few seconds, while this process is the leader, it observes, decides and acts.

    look     heartbeats, queue, providers' lists ──> the store has the current state
    decide   policy: the size of each pool, with a reason
    act      launches (first a row, then the provider), drains, ends; machines without a row are ended

All state is in SQL and at the providers: a controller that dies loses nothing.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from db.engine import DatabaseUnavailable
from db.tables import Decision
from fleet.drivers.base import Driver
from fleet.errors import FleetError, LaunchRefused, ProviderError
from fleet.leader import Leadership
from fleet.machine import OVER, PAID, STARTING, Machine, Order, ProviderMachine, State, labels_of, new_machine_id
from fleet.machine_store import MachineStore
from fleet.matching import match
from fleet.monitor import Monitor
from fleet.policy.decide import Decider
from fleet.policy.schedule import floor_at
from fleet.policy.view import PlaceView, PoolPlan, PoolView
from fleet.reconcile import DRAIN_MARGIN_S, Limits, reconciled, to_end
from fleet.settings import FleetSettings, PoolFleetSettings
from protocol import subjects
from protocol.errors import BusError
from protocol.gateways import STATE_SUBJECT, FleetState, PoolState, encode_state
from protocol.job import Drain, encode
from protocol.nats.access import CredentialsError, WorkerKeys
from protocol.nats.bus import Bus
from protocol.nats.clock import unix_now_ms

LIST_LIMIT_S: Final = 30.0
LAUNCH_LIMIT_S: Final = 60.0
END_LIMIT_S: Final = 30.0
END_POLL_S: Final = 0.2
MAX_CALLS: Final = 16  # to all providers at once
MAX_LAUNCHES: Final = 50  # in one round, of one pool
EXPIRY_MARGIN_S: Final = 300.0  # between the last drain of a machine and the end of its credentials
FORGET_PERIOD_S: Final = 3600.0

Listed = Mapping[
    str, Sequence[ProviderMachine] | None
]  # machines at the provider, by pool; None: the provider does not answer
Unowned = Mapping[str, set[str]]  # provider ids of machines without a row, by pool

_Result = TypeVar("_Result")

log = logging.getLogger(__name__)


class FleetPool(Struct, frozen=True):
    """One pool that the controller scales."""

    name: str
    tier: str
    usd_per_hour: float
    drain_s: float
    queues: frozenset[str]
    settings: PoolFleetSettings
    driver: Driver
    environment: Mapping[str, str]  # of its workers


class Group(Struct, frozen=True):
    """Pools that serve the same queues, and their policy."""

    queues: frozenset[str]  # subjects.queue_of
    pools: tuple[FleetPool, ...]
    decider: Decider


class Controller:
    """Scales all pools to the size that the policy decides."""

    def __init__(
        self,
        settings: FleetSettings,
        groups: Sequence[Group],
        *,
        bus: Bus,
        store: MachineStore,
        monitor: Monitor,
        leadership: Leadership,
        keys: WorkerKeys | None = None,
    ) -> None:
        """``keys`` sign the credentials of launched machines; None: machines get no credentials."""
        self._settings = settings
        self._groups = groups
        self._pools = [pool for group in groups for pool in group.pools]
        self._bus = bus
        self._store = store
        self._monitor = monitor
        self._leadership = leadership
        self._keys = keys
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._rests_until_s: dict[tuple[str, str], float] = {}  # by pool and place (monotonic clock)
        self._decided: dict[str, int] = {}  # last stored size, by pool
        self._ended: Counter[tuple[str, str]] = Counter()  # ended machines, by pool and state
        self._forgot_s = float("-inf")

    async def run(self) -> None:
        """Run until canceled. Machines keep running."""
        while True:
            began_s = time.monotonic()
            try:
                if await self._leadership.renew():
                    await self.round()
            except (BusError, DatabaseUnavailable) as error:
                log.warning("no fleet decisions this round: %s", error)
            await asyncio.sleep(max(0.0, began_s + self._settings.period_s - time.monotonic()))

    async def round(self) -> None:
        """Run one round: look, decide, act. Raises BusError and DatabaseUnavailable; then call again."""
        await self._monitor.look()
        self._monitor.take_batches(await self._store.batches())
        machines, unowned = await self._reconcile(await self._list_all())
        for group in self._groups:
            await self._size(group, machines)
        await self._end_all(machines, unowned)
        await self._bus.publish(STATE_SUBJECT, encode_state(self._state(machines)))
        await self._forget_decisions()

    async def end_everything(self, limit_s: float) -> None:
        """Drain and end all machines within a time limit; after that, end them without draining."""
        deadline_s = time.monotonic() + limit_s
        plan = PoolPlan("", 0, {}, 0, "the installation ends")
        while self._leadership.is_leader or await self._leadership.renew():
            machines, unowned = await self._reconcile(await self._list_all())
            if not machines:
                return
            for machine in machines.values():
                if machine.state is State.SERVING or machine.state in STARTING:
                    machines[machine.machine_id] = await self._begin_end(machine, plan)
                elif machine.state is State.DRAINING and time.monotonic() > deadline_s:
                    ending = replace(machine, state=State.ENDING)
                    await self._put(ending)
                    machines[machine.machine_id] = ending
            await self._end_all(machines, unowned)
            await asyncio.sleep(END_POLL_S)
            await self._leadership.renew()

    # --- look ---------------------------------------------------------------------------------------------------------

    async def _list_all(self) -> Listed:
        found = await asyncio.gather(*(self._list(pool) for pool in self._pools))
        return dict(zip((pool.name for pool in self._pools), found, strict=True))

    async def _list(self, pool: FleetPool) -> Sequence[ProviderMachine] | None:
        """Return the machines at a pool's provider; None: it does not answer."""
        try:
            async with self._calls, asyncio.timeout(LIST_LIMIT_S):
                return await pool.driver.machines()
        except (FleetError, TimeoutError) as error:
            log.warning("pool %s: the provider did not list its machines: %s", pool.name, str(error) or "no answer")
            return None

    async def _reconcile(self, listed: Listed) -> tuple[dict[str, Machine], Unowned]:
        """Update the stored machines; return those that have not ended, by id, and provider machines without a row.

        ``listed`` is older than the rows that are read here, so each machine in it has had its row before.
        """
        now_unix_ms, rows = unix_now_ms(), await self._store.machines()
        machines: dict[str, Machine] = {}
        unowned: dict[str, set[str]] = {}
        for pool in self._pools:  # rows of pools that are no longer configured are kept unchanged
            theirs = [row for row in rows if row.pool == pool.name]
            there = listed[pool.name]
            matched = None if there is None else match(theirs, there)
            unowned[pool.name] = set() if matched is None else {one.provider_id for one in matched.unowned}
            for now in await self._reconciled(pool, theirs, None if matched is None else matched.owned, now_unix_ms):
                machines[now.machine_id] = now
        return machines, unowned

    async def _reconciled(
        self, pool: FleetPool, rows: Sequence[Machine], owned: Mapping[str, ProviderMachine] | None, now_unix_ms: int
    ) -> list[Machine]:
        """Return a pool's machines that have not ended, in their current state."""
        settings, beats, kept = self._settings, self._monitor.beats(pool.name), []
        limits = Limits(
            settings.launch_limit_s,
            settings.listed_after_s,
            pool.settings.start_limit_s,
            pool.drain_s,
            self._monitor.listened_s,
            self._life_s(pool),
        )
        for row in rows:
            now = reconciled(
                row, owned, beats.get(row.machine_id) or beats.get(row.provider_id or ""), limits, now_unix_ms
            )
            if now != row:
                await self._put(now)
            if now.state is State.LOST:
                self._rest(pool, now.place)
            if now.over_unix_ms is None:
                kept.append(now)
            else:
                self._ended[pool.name, now.state] += 1
        return kept

    def _life_s(self, pool: FleetPool) -> float | None:
        """Return how long a machine may serve, so that its last requests end before its credentials do."""
        if self._keys is None:
            return None
        return self._settings.credentials_hours * 3600 - pool.drain_s - DRAIN_MARGIN_S - EXPIRY_MARGIN_S

    async def _put(self, machine: Machine) -> None:
        log.info("machine %s of pool %s: %s: %s", machine.machine_id, machine.pool, machine.state, machine.reason)
        await self._store.put(machine)

    def _rest(self, pool: FleetPool, place: str) -> None:
        self._rests_until_s[pool.name, place] = time.monotonic() + pool.settings.unavailable_s

    # --- decide -------------------------------------------------------------------------------------------------------

    async def _size(self, group: Group, machines: dict[str, Machine]) -> None:
        views = [self._view(pool, machines) for pool in group.pools]
        plans = group.decider.decide(views, self._monitor.demand(group.queues), time.monotonic())
        await self._write_down(views, plans)
        for pool in group.pools:
            [plan] = [plan for plan in plans if plan.pool == pool.name]
            theirs = [machine for machine in machines.values() if machine.pool == pool.name]
            for machine in to_end(theirs, plan.ends, self._monitor.running()):
                machines[machine.machine_id] = await self._begin_end(machine, plan)
            await self._launch_all(pool, plan, machines)

    def _view(self, pool: FleetPool, machines: Mapping[str, Machine]) -> PoolView:
        theirs = [machine for machine in machines.values() if machine.pool == pool.name]
        now_s = time.monotonic()
        places = tuple(
            PlaceView(
                place,
                ready=sum(one.place == place and one.state is State.SERVING for one in theirs),
                starting=sum(one.place == place and one.state in STARTING for one in theirs),
                rests=self._rests_until_s.get((pool.name, place), 0.0) > now_s,
            )
            for place in pool.driver.places
        )
        return PoolView(
            pool.name,
            pool.tier,
            pool.usd_per_hour,
            self._monitor.tokens_per_s(pool.name) or pool.settings.tokens_per_s,
            pool.settings.start_s,
            _floor(pool.settings, time.time()),
            pool.settings.max_workers,
            places,
        )

    async def _write_down(self, views: Sequence[PoolView], plans: Sequence[PoolPlan]) -> None:
        """Store the sizes that have changed."""
        now_unix_ms = unix_now_ms()
        by_name = {view.name: view for view in views}
        changed = [plan for plan in plans if self._decided.get(plan.pool) != plan.size]
        decisions = []
        for plan in changed:
            view = by_name[plan.pool]
            decisions.append(Decision(now_unix_ms, plan.pool, plan.size, view.ready, view.starting, plan.reason))
        await self._store.add_decisions(decisions)
        for plan in changed:
            log.info("pool %s: %d workers: %s", plan.pool, plan.size, plan.reason)
            self._decided[plan.pool] = plan.size

    def _state(self, machines: Mapping[str, Machine]) -> FleetState:
        """Return the fleet's state for the gateways."""
        states: dict[str, Counter[str]] = {pool.name: Counter() for pool in self._pools}
        for machine in machines.values():
            states[machine.pool][machine.state] += 1
        return FleetState(
            unix_now_ms(),
            tuple(
                PoolState(
                    pool.name,
                    self._decided[pool.name],
                    {state: states[pool.name][state] for state in PAID},
                    {state: self._ended[pool.name, state] for state in OVER},
                )
                for pool in self._pools
            ),
        )

    async def _forget_decisions(self) -> None:
        if time.monotonic() - self._forgot_s > FORGET_PERIOD_S:
            self._forgot_s = time.monotonic()
            kept_ms = self._settings.keep_decisions_days * 86_400_000
            await self._store.forget_decisions(unix_now_ms() - kept_ms)

    # --- act ----------------------------------------------------------------------------------------------------------

    async def _launch_all(self, pool: FleetPool, plan: PoolPlan, machines: dict[str, Machine]) -> None:
        wanted = [place for place, count in plan.launches.items() for _ in range(count)][:MAX_LAUNCHES]
        launched = await _each([self._launch(pool, place, plan.reason) for place in wanted])
        machines.update({machine.machine_id: machine for machine in launched if machine is not None})

    async def _launch(self, pool: FleetPool, place: str, reason: str) -> Machine | None:
        """Store a machine and launch it; None: not launched, or this process is no longer the leader."""
        machine = Machine(new_machine_id(), pool.name, place, State.WANTED, unix_now_ms(), reason=reason)
        async with self._calls:
            if not self._leadership.is_leader:
                return None
            await self._store.add(machine)
            try:
                order = self._order(pool, machine)
                async with asyncio.timeout(LAUNCH_LIMIT_S):
                    provider_id = await pool.driver.launch(order)
            except LaunchRefused as error:
                self._rest(pool, place)
                self._ended[pool.name, State.FAILED] += 1
                await self._put(
                    replace(machine, state=State.FAILED, over_unix_ms=unix_now_ms(), reason=f"launch failed: {error}")
                )
                return None
            except (ProviderError, TimeoutError) as error:
                reason = str(error) or "no answer"
                log.warning(
                    "pool %s: the outcome of launching %s is unknown: %s", pool.name, machine.machine_id, reason
                )
                return machine
        launched = replace(
            machine, state=State.LAUNCHED, provider_id=provider_id, launched_unix_ms=unix_now_ms(), reason="launched"
        )
        await self._put(launched)
        return launched

    def _order(self, pool: FleetPool, machine: Machine) -> Order:
        """Return the order for a driver to launch a machine. Raises LaunchRefused."""
        labels = labels_of(self._settings.fleet_id, machine.machine_id, pool.name)
        environment = {**pool.environment, "SPILLWAY_MACHINE": machine.machine_id}
        if self._keys is not None:
            try:
                text = self._keys.issue(pool.name, machine.machine_id, self._settings.credentials_hours * 3600)
            except CredentialsError as error:
                raise LaunchRefused(str(error)) from error
            environment["SPILLWAY_NATS__CREDENTIALS_TEXT"] = text
        return Order(machine.machine_id, pool.name, machine.place, labels, environment)

    async def _begin_end(self, machine: Machine, plan: PoolPlan) -> Machine:
        """Drain a serving machine; end any other machine immediately."""
        if machine.state is State.SERVING:
            ending = replace(machine, state=State.DRAINING, drained_unix_ms=unix_now_ms(), reason=plan.reason)
        elif machine.provider_id is None:  # it may be launching right now; the next round decides
            return machine
        else:
            ending = replace(machine, state=State.ENDING, reason=plan.reason)
        await self._put(ending)
        return ending

    async def _end_all(self, machines: Mapping[str, Machine], unowned: Unowned) -> None:
        """Tell workers to drain; end drained machines and machines without a row."""
        calls = []
        for pool in self._pools:
            theirs = [machine for machine in machines.values() if machine.pool == pool.name]
            for machine in theirs:
                if machine.state is State.DRAINING and machine.worker_id is not None:
                    await self._bus.publish(subjects.control_subject(machine.worker_id), encode(Drain()))
            ending = {machine.provider_id for machine in theirs if machine.state is State.ENDING}
            for provider_id in unowned[pool.name]:
                log.warning(
                    "pool %s: ending machine %s, which the provider lists but no controller launched",
                    pool.name,
                    provider_id,
                )
            calls += [self._end(pool, one) for one in ending | unowned[pool.name] if one is not None]
        await _each(calls)

    async def _end(self, pool: FleetPool, provider_id: str) -> None:
        async with self._calls:
            if not self._leadership.is_leader:
                return
            try:
                async with asyncio.timeout(END_LIMIT_S):
                    await pool.driver.end(provider_id)
            except (FleetError, TimeoutError) as error:
                log.warning(
                    "pool %s: machine %s is not ended yet: %s", pool.name, provider_id, str(error) or "no answer"
                )


def _floor(settings: PoolFleetSettings, unix_s: float) -> int:
    """Return a pool's minimum size, now or when a machine that is launched now will serve."""
    scheduled = (floor_at(settings.schedules, unix_s + ahead_s) for ahead_s in (0.0, settings.start_s))
    return max(settings.min_workers, *scheduled)


async def _each(calls: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Await all calls, then raise the first error, so that no call outlives a failed round."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
