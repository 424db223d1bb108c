"""A controller that dies at any step of a launch or an end leaks nothing.

The real controller and the real books; heartbeats and the policy are scripted, and the provider is a scripted one, or
EC2 in a box with the real driver. Every call to the books and to the provider has a step before it and one after it,
and a controller dies at one of these.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from db.engine import create_engine
from fleet.controller import Controller, FleetPool, Group
from fleet.drivers.base import Driver
from fleet.drivers.ec2 import Ec2Driver
from fleet.machine import FLEET_LABEL, MACHINE_LABEL, State
from fleet.machine_store import MachineStore
from fleet.policy.view import Demand, PoolPlan, PoolView
from fleet.reconcile import Beat
from fleet.settings import Ec2Settings, FleetSettings, PoolFleetSettings, ProcessSettings
from tests.fleet.ec2_box import CREDENTIALS, Ec2Box
from tests.fleet.fake_provider import FakeDriver, FakeProvider, RunningMachine

FLEET = "test"
KILLS = 100
KILLS_IN_THE_BOX = int(os.environ.get("FLEET_KILLS", "6"))  # `make fleet-kills`: 200, some four minutes


class Killed(BaseException):
    """The controller's process has ended."""


class Steps:
    """Counts steps, and dies at one of them."""

    def __init__(self) -> None:
        self.left: int | None = None

    def step(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed

    def around(self, target: Any, *names: str) -> Any:
        """Return a stand-in for ``target`` whose named methods have a step before and after them."""
        steps = self

        class Around:
            def __getattr__(self, name: str) -> Any:
                found = getattr(target, name)
                if name not in names:
                    return found

                async def call(*arguments: Any) -> Any:
                    steps.step()
                    result = await found(*arguments)
                    steps.step()
                    return result

                return call

        return Around()


class Provider(Protocol):
    """What outlives controllers."""

    def live(self) -> dict[str, dict[str, str]]:
        """Return the labels of what is charged for, by id."""
        ...


class ScriptedMonitor:
    """Every machine of the provider serves, once it has been looked at a few times."""

    listened_s = 3600.0

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._looks: Counter[str] = Counter()
        self.draining: set[str] = set()

    async def look(self) -> None:
        pass

    def take_batches(self, batches: object) -> None:
        pass

    def beats(self, pool: str) -> Mapping[str, Beat]:
        live = {one: labels for one, labels in self._provider.live().items() if labels.get(FLEET_LABEL) == FLEET}
        self._looks.update(live.keys())
        return {
            labels[MACHINE_LABEL]: Beat(f"w-{one}", 0.0)
            for one, labels in live.items()
            if self._looks[one] > 2 and f"w-{one}" not in self.draining
        }

    def running(self) -> Mapping[str, int]:
        return {}

    def tokens_per_s(self, pool: str) -> float | None:
        return None

    def demand(self, models: frozenset[str]) -> Demand:
        return Demand(0.0, 0.0, lambda _: 0.0, lambda _: 1.0)


class ScriptedBus:
    """Takes the order to drain: the worker ends at once."""

    def __init__(self, monitor: ScriptedMonitor) -> None:
        self._monitor = monitor

    async def publish(self, subject: str, payload: bytes) -> None:
        self._monitor.draining.add(subject.partition(".")[2])


class ScriptedSize:
    """A policy that wants a number of machines."""

    def __init__(self) -> None:
        self.size = 0

    def decide(self, pools: Sequence[PoolView], demand: Demand, now_s: float) -> Sequence[PoolPlan]:
        [pool] = pools
        missing = self.size - pool.size
        launches = {pool.places[0].name: missing} if missing > 0 else {}
        return [PoolPlan(pool.name, self.size, launches, max(0, -missing), "scripted")]


class Leader:
    is_leader = True

    async def renew(self) -> bool:
        return True


class Rig:
    """What outlives controllers: provider, store, workers."""

    def __init__(self, provider: Provider, store: MachineStore, driver: Callable[[], Driver]) -> None:
        self.provider = provider
        self._driver = driver
        self.store = store
        self.steps = Steps()
        self.size = ScriptedSize()
        self.monitor = ScriptedMonitor(provider)
        self.listed_after_s = 0.0

    def controller(self) -> Controller:
        """Return a new controller process."""
        driver = self.steps.around(self._driver(), "launch", "end", "machines")
        pool = FleetPool(
            name="spot",
            tier="spot",
            usd_per_hour=1.0,
            drain_s=1.0,
            queues=frozenset({"m"}),
            settings=PoolFleetSettings(driver=ProcessSettings(kind="process")),
            driver=driver,
            environment={},
        )
        group: Any = Group(frozenset({"m"}), (pool,), self.size)  # type: ignore[arg-type]
        parts: Any = {
            "bus": ScriptedBus(self.monitor),
            "store": self.steps.around(self.store, "add", "put", "machines", "add_decisions"),
            "monitor": self.monitor,
            "leadership": Leader(),
        }
        settings = FleetSettings(fleet_id=FLEET, launch_limit_s=0.0, listed_after_s=self.listed_after_s)
        return Controller(settings, [group], **parts)

    async def settle(self) -> None:
        """Let an undisturbed controller work until nothing changes any more."""
        self.steps.left = None
        controller = self.controller()
        for _ in range(12):
            await controller.round()

    async def check(self) -> None:
        """Compare the provider's machines with those in the store."""
        there = {
            labels[MACHINE_LABEL]: one
            for one, labels in self.provider.live().items()
            if labels.get(FLEET_LABEL) == FLEET
        }
        store = {one.machine_id: one.provider_id for one in await self.store.machines()}
        assert there == store
        assert len(there) == self.size.size


@pytest.fixture
async def rig(sqlite_url: str) -> Any:
    engine = create_engine(sqlite_url)
    provider = FakeProvider(random.Random(1))
    yield Rig(provider, MachineStore(engine), lambda: FakeDriver(provider, FLEET))
    await engine.dispose()


@pytest.mark.parametrize("lists_late", [False, True])
async def test_whatever_step_a_controller_dies_at_nothing_leaks(rig: Rig, lists_late: bool) -> None:
    assert isinstance(rig.provider, FakeProvider)
    if (
        lists_late
    ):  # what nobody has seen within ``launch_limit_s`` counts as not launched, and is ended when it appears
        rig.provider.late_listing, rig.listed_after_s = 1, 60.0
    rig.provider.machines["i-0"] = RunningMachine("i-0", {FLEET_LABEL: "somebody else's"}, "a")
    await kill_at_random(rig, KILLS // 2, seed=7)
    assert "i-0" in rig.provider.machines
    assert rig.provider.launched > KILLS / 4


async def kill_at_random(rig: Rig, kills: int, seed: int) -> None:
    """Let so many controllers die at random steps while the pool's size changes; check whenever it has settled."""
    rng = random.Random(seed)
    deaths = 0
    while deaths < kills:
        rig.size.size = rng.randrange(6)
        rig.steps.left = rng.randrange(40)
        controller = rig.controller()
        try:
            for _ in range(4):
                await controller.round()
        except Killed:
            deaths += 1
            if deaths % 10 == 0:
                await rig.settle()
                await rig.check()
    await rig.settle()
    await rig.check()


async def test_at_ec2_in_a_box_nothing_leaks(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    engine = create_engine(sqlite_url)
    async with Ec2Box(tmp_path / "ec2", {}, boots=False).running() as box:
        settings = Ec2Settings(**box.driver("spillway worker"))
        rig = Rig(box, MachineStore(engine), lambda: Ec2Driver(settings, FLEET, "spot", spot=True))
        foreign = box.add_foreign()
        await kill_at_random(rig, KILLS_IN_THE_BOX, seed=9)
        assert foreign in box.live()
        unlabelled = [one for one, labels in box.live().items() if MACHINE_LABEL not in labels and one != foreign]
        assert unlabelled == []
    await engine.dispose()


async def test_lost_answers_leak_nothing(rig: Rig) -> None:
    assert isinstance(rig.provider, FakeProvider)
    rng = random.Random(8)
    rig.provider.lost_answers = 0.3
    for _ in range(40):
        rig.size.size = rng.randrange(6)
        controller = rig.controller()
        for _ in range(3):
            await controller.round()
    rig.provider.lost_answers = 0.0
    await rig.settle()
    await rig.check()


async def test_what_the_market_takes_is_replaced_and_written_down(rig: Rig) -> None:
    assert isinstance(rig.provider, FakeProvider)
    rig.size.size = 3
    await rig.settle()
    rig.provider.take(next(iter(rig.provider.machines)))
    await rig.settle()
    await rig.check()
    lost = [one for one in await rig.store.over_since(0) if one.state is State.LOST]
    assert len(lost) == 1
