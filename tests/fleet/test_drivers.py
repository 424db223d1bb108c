"""What every driver must do (fleet/drivers/base.py), each against its provider's stand-in (tests/fleet/rigs.py)."""

import asyncio
import stat
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from fleet.drivers.base import Driver
from fleet.drivers.process import ProcessDriver, id_of
from fleet.errors import LaunchRefused, NoCapacity, OverQuota, ProviderError
from fleet.machine import FLEET_LABEL, POOL_LABEL, Machine, Order, ProviderMachine, State, labels_of, new_machine_id
from fleet.matching import match
from tests.fleet.rigs import FLEET, POOL, RIGS, ProcessRig, Rig
from tests.waiting import until


@pytest.fixture(params=RIGS)
async def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    async with RIGS[request.param](tmp_path, monkeypatch) as one:
        yield one


@pytest.fixture
async def driver(rig: Rig) -> AsyncIterator[Driver]:
    one = rig.driver()
    yield one
    await one.close()


def new_order(rig: Rig, driver: Driver) -> Order:
    machine_id = new_machine_id()
    environment = {"SPILLWAY_POOL": POOL, "SPILLWAY_MACHINE": machine_id}
    return Order(machine_id, POOL, driver.places[0], labels_of(rig.fleet, machine_id, POOL), environment)


def ids(machines: list[ProviderMachine]) -> set[str]:
    return {machine.provider_id for machine in machines if not machine.is_ending}


async def test_what_was_launched_is_listed_with_its_labels(rig: Rig, driver: Driver) -> None:
    orders = [new_order(rig, driver), new_order(rig, driver)]
    launched = {await driver.launch(order): order for order in orders}
    machines = await driver.machines()
    assert ids(machines) == set(launched) == rig.alive()
    for machine in machines:
        assert machine.labels[FLEET_LABEL] == rig.fleet
        assert machine.labels[POOL_LABEL] == POOL
        assert machine.machine_id == (launched[machine.provider_id].machine_id if rig.labels_machines else None)


async def test_launches_at_once_are_machines_of_their_own(rig: Rig, driver: Driver) -> None:
    launched = await asyncio.gather(*(driver.launch(new_order(rig, driver)) for _ in range(5)))
    assert len(set(launched)) == 5
    assert ids(await driver.machines()) == set(launched) == rig.alive()


async def test_the_same_order_again(rig: Rig, driver: Driver) -> None:
    order = new_order(rig, driver)
    first, second = await driver.launch(order), await driver.launch(order)
    assert len(rig.alive()) == len({first, second}) == (1 if rig.finds_orders else 2)


async def test_a_driver_made_anew_finds_and_ends_everything(rig: Rig, driver: Driver) -> None:
    launched = {await driver.launch(new_order(rig, driver)) for _ in range(2)}
    anew = rig.driver()
    try:
        machines = await anew.machines()
        assert ids(machines) == launched
        for machine in machines:
            await anew.end(machine.provider_id)
        assert rig.alive() == set()
    finally:
        await anew.close()


async def test_only_the_machine_that_is_ended_goes(rig: Rig, driver: Driver) -> None:
    first, second, third = [await driver.launch(new_order(rig, driver)) for _ in range(3)]
    await driver.end(second)
    assert rig.alive() == {first, third} == ids(await driver.machines())


async def test_what_is_ending_or_gone_is_not_ended_again(rig: Rig, driver: Driver) -> None:
    kept, ended = [await driver.launch(new_order(rig, driver)) for _ in range(2)]
    await driver.end(ended)
    await driver.end(ended)  # it may still be on its way

    async def is_gone() -> bool:
        return ended not in {machine.provider_id for machine in await driver.machines()}

    await until(is_gone)
    await driver.end(ended)
    assert rig.alive() == {kept}


async def test_what_is_on_its_way_out_is_not_listed_as_staying(rig: Rig, driver: Driver) -> None:
    launched = await driver.launch(new_order(rig, driver))
    await driver.end(launched)
    assert ids(await driver.machines()) == set()


async def test_machines_of_others_are_neither_listed_nor_ended(rig: Rig, driver: Driver) -> None:
    mine = await driver.launch(new_order(rig, driver))
    foreign = rig.add_foreign()
    before = rig.alive()
    assert ids(await driver.machines()) == {mine}
    await driver.end(foreign)
    assert rig.alive() == before


async def test_a_machine_whose_launch_was_not_answered_is_found(rig: Rig, driver: Driver) -> None:
    order = new_order(rig, driver)
    rig.lose_answer()
    with pytest.raises(ProviderError):
        await driver.launch(order)
    row = Machine(order.machine_id, POOL, order.place, State.WANTED, wanted_unix_ms=0)

    async def is_found() -> bool:
        return order.machine_id in match([row], await driver.machines()).owned

    await until(is_found)
    [alive] = rig.alive()
    await driver.end(alive)
    assert rig.alive() == set()


async def test_an_end_that_was_not_answered_ends_one_machine(rig: Rig, driver: Driver) -> None:
    kept, ended = [await driver.launch(new_order(rig, driver)) for _ in range(2)]
    rig.lose_answer()
    with pytest.raises(ProviderError):
        await driver.end(ended)
    await driver.end(ended)
    assert rig.alive() == {kept}


@pytest.mark.parametrize("refusal", [NoCapacity, OverQuota, LaunchRefused])
async def test_a_refusal_says_what_it_is(rig: Rig, driver: Driver, refusal: type[LaunchRefused]) -> None:
    if refusal not in rig.refusals:
        pytest.skip("this provider cannot say so")
    kept = await driver.launch(new_order(rig, driver))
    rig.refuse(refusal)
    with pytest.raises(LaunchRefused) as raised:
        await driver.launch(new_order(rig, driver))
    assert raised.type is refusal
    assert rig.alive() == {kept} == ids(await driver.machines())
    rig.refuse(None)
    assert rig.alive() == {kept}  # what was refused does not come later
    assert await driver.launch(new_order(rig, driver)) in rig.alive() - {kept}


async def test_a_provider_out_of_reach_is_an_error_of_its_own(rig: Rig) -> None:
    rig.go_away()
    driver = rig.driver()
    try:
        with pytest.raises(ProviderError):
            await driver.machines()
        with pytest.raises(ProviderError):
            await driver.launch(new_order(rig, driver))
    finally:
        await driver.close()


async def test_a_process_whose_environment_comes_late_is_found_once_it_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine Linux shows no environment of a process for a moment after its start."""
    environ, reads = psutil.Process.environ, Counter[int]()

    def late(process: psutil.Process) -> dict[str, str]:
        reads[process.pid] += 1
        return environ(process) if reads[process.pid] > 3 else {}

    rig = ProcessRig(tmp_path)
    driver = rig.driver()
    order = new_order(rig, driver)
    monkeypatch.setattr(psutil.Process, "environ", late)
    try:
        launched = await driver.launch(order)
        assert await driver.launch(order) == launched
        await driver.end(launched)
        assert ids(await driver.machines()) == set()
    finally:
        rig.end_all()


async def test_a_worker_process_that_ends_by_itself_leaves_no_zombie(tmp_path: Path) -> None:
    driver = ProcessDriver(FLEET, POOL, [""], log_dir=tmp_path / "logs", command=["echo", "over"])
    machine_id = new_machine_id()
    order = Order(machine_id, POOL, "", labels_of(FLEET, machine_id, POOL), {})
    pid = int((await driver.launch(order)).partition("-")[0])

    async def is_reaped() -> bool:
        return await driver.machines() == [] and not psutil.pid_exists(pid)

    await until(is_reaped)
    log = tmp_path / "logs" / f"{machine_id}.log"
    assert (log.read_text(), stat.S_IMODE(log.stat().st_mode)) == ("over\n", 0o600)


def test_a_process_keeps_its_id_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = id_of(psutil.Process())
    booted_s = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted_s + 1)
    assert id_of(psutil.Process()) == before
