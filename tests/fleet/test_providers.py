"""What single drivers do beyond the duties that all have."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import SecretStr

from fleet.drivers.base import Driver
from fleet.errors import FleetError, LaunchRefused, NoCapacity, ProviderError
from fleet.machine import Order, ProviderMachine, labels_of, new_machine_id
from fleet.settings import KubernetesSettings, RunPodSettings, SkyPilotSettings, StaticSettings
from tests.fleet.rigs import FLEET, POOL, SkyPilotRig, driver_of
from tests.fleet.runpod_api import KEY, RunPodApi
from tests.waiting import until


def order(place: str = "", **environment: str) -> Order:
    machine_id = new_machine_id()
    return Order(machine_id, POOL, place, labels_of(FLEET, machine_id, POOL), environment)


# --- RunPod -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def runpod() -> Iterator[RunPodApi]:
    with RunPodApi() as api:
        yield api


def runpod_settings(api: RunPodApi, key: str = KEY) -> RunPodSettings:
    return RunPodSettings(
        kind="runpod",
        api_key=SecretStr(key),
        gpu_types=("NVIDIA L40S", "NVIDIA A40"),
        image="spillway/worker:1",
        data_centers=("EU-RO-1", "US-KS-2"),
        cloud="COMMUNITY",
        disk_gib=80,
        url=f"{api.url}/v2",
    )


@pytest.fixture
async def pods(runpod: RunPodApi) -> AsyncIterator[Driver]:
    driver = driver_of(runpod_settings(runpod))
    yield driver
    await driver.close()


async def test_a_pod_is_what_was_configured(runpod: RunPodApi, pods: Driver) -> None:
    assert pods.places == ("EU-RO-1", "US-KS-2")
    pod = runpod.pods[await pods.launch(order("US-KS-2", SPILLWAY_POOL=POOL))]
    wanted = {
        "image": "spillway/worker:1",
        "cloud": "COMMUNITY",
        "gpu": {"id": "NVIDIA L40S", "count": 1},
        "disk": 80,
        "env": {"SPILLWAY_POOL": POOL},
        "dataCenterIds": ["US-KS-2"],
        "ports": [],
    }
    assert {name: pod[name] for name in wanted} == wanted


async def test_a_key_that_is_not_configured_is_taken_from_the_environment(
    runpod: RunPodApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other parts of Spillway read the same configuration, and need no key."""
    settings = runpod_settings(runpod).model_copy(update={"api_key": None})
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    with pytest.raises(FleetError, match="Set it or the variable RUNPOD_API_KEY"):
        driver_of(settings)
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    driver = driver_of(settings)
    assert await driver.machines() == []
    await driver.close()


@pytest.mark.parametrize("reason", ["none is free", "not for this account"])
async def test_the_next_type_of_gpu_is_taken_where_the_best_cannot_be_had(
    runpod: RunPodApi, pods: Driver, reason: str
) -> None:
    if reason == "none is free":
        runpod.free_gpus["NVIDIA L40S"] = 0
    else:
        runpod.forbidden_types = {"NVIDIA L40S"}
    assert runpod.pods[await pods.launch(order())]["gpu"]["id"] == "NVIDIA A40"


async def test_both_of_two_pods_for_one_order_are_listed(runpod: RunPodApi, pods: Driver) -> None:
    """RunPod takes any name twice: if something between us repeats a request, there are two."""
    runpod.copies = 2
    wanted = order()
    await pods.launch(wanted)
    machines = await pods.machines()
    assert [machine.machine_id for machine in machines] == [wanted.machine_id] * 2
    for machine in machines:
        await pods.end(machine.provider_id)
    assert runpod.pods == {}


async def test_a_stopped_pod_is_listed_until_it_is_deleted(runpod: RunPodApi, pods: Driver) -> None:
    stopped, terminated = await pods.launch(order()), await pods.launch(order())
    runpod.pods[stopped]["status"] = "EXITED"
    runpod.pods[terminated]["status"] = "TERMINATED"
    assert [machine.provider_id for machine in await pods.machines()] == [stopped]


async def test_a_wrong_key_is_an_error_that_launches_nothing(runpod: RunPodApi) -> None:
    driver = driver_of(runpod_settings(runpod, key="wrong"))
    try:
        with pytest.raises(ProviderError, match="401"):
            await driver.machines()
        with pytest.raises(FleetError, match="401"):
            await driver.launch(order())
        assert runpod.pods == {}
    finally:
        await driver.close()


async def test_runpod_has_no_spot_pods(runpod: RunPodApi) -> None:
    with pytest.raises(FleetError, match="spot"):
        driver_of(runpod_settings(runpod), tier="spot")


# --- SkyPilot ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SkyPilotRig:
    monkeypatch.setenv("FAKE_SKYPILOT_STATE", str(tmp_path / "clusters.json"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("fake_skypilot")))
    return SkyPilotRig(tmp_path)


@pytest.mark.parametrize(("tier", "use_spot"), [("spot", True), ("on-demand", False), ("reserved", False)])
async def test_a_cluster_is_what_task_and_order_say(
    sky: SkyPilotRig, tmp_path: Path, tier: str, use_spot: bool
) -> None:
    task = {
        "envs": {"MODEL": "small"},
        "resources": {"cloud": "aws", "region": "us-east-1", "accelerators": "L4:1", "labels": {"team": "ml"}},
        "run": "spillway worker",
    }
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(task))
    settings = SkyPilotSettings(kind="skypilot", task=str(path), python=sys.executable, infra=("gcp/us-central1",))
    driver = driver_of(settings, tier)
    try:
        wanted = order("gcp/us-central1", SPILLWAY_POOL=POOL)
        name = await driver.launch(wanted)
        await driver.launch(wanted)
    finally:
        await driver.close()
    assert sky.clusters[name] == {
        "status": "INIT",
        "jobs": 1,
        "envs": {"MODEL": "small", "SPILLWAY_POOL": POOL},
        "cloud": None,
        "region": None,
        "zone": None,
        "infra": "gcp/us-central1",
        "accelerators": "L4:1",
        "use_spot": use_spot,
        "labels": {"team": "ml", **wanted.labels},
    }


async def test_what_no_cloud_offers_is_refused_not_without_capacity(sky: SkyPilotRig) -> None:
    driver = sky.driver()
    try:
        sky.refuse(NoCapacity)
        with pytest.raises(NoCapacity, match="Failed to provision"):
            await driver.launch(order())
        sky._change(refuses="NothingFits")
        with pytest.raises(LaunchRefused) as raised:
            await driver.launch(order())
        assert raised.type is LaunchRefused
    finally:
        await driver.close()


async def test_a_cluster_that_could_not_be_set_up_is_listed_until_it_is_ended(sky: SkyPilotRig) -> None:
    driver = sky.driver()
    try:
        sky._change(refuses="SetupFails")
        wanted = order()
        with pytest.raises(ProviderError, match="setup commands"):
            await driver.launch(wanted)
        [machine] = await driver.machines()
        assert machine.machine_id == wanted.machine_id
        await driver.end(machine.provider_id)
        assert sky.clusters == {}
    finally:
        await driver.close()


async def test_a_task_file_that_is_missing_is_refused(sky: SkyPilotRig, tmp_path: Path) -> None:
    settings = SkyPilotSettings(kind="skypilot", task=str(tmp_path / "none.yaml"), python=sys.executable)
    driver = driver_of(settings)
    try:
        with pytest.raises(LaunchRefused, match="FileNotFoundError"):
            await driver.launch(order())
    finally:
        await driver.close()


async def test_calls_at_once_get_their_own_answers(sky: SkyPilotRig) -> None:
    driver = sky.driver()
    try:
        orders = [order() for _ in range(8)]
        names = await asyncio.gather(*(driver.launch(one) for one in orders), driver.machines())
        assert [name.rsplit(".", 1)[-1] for name in names[:-1] if isinstance(name, str)] == [
            one.machine_id for one in orders
        ]
    finally:
        await driver.close()


async def test_a_process_that_dies_fails_who_waits_and_is_started_again(sky: SkyPilotRig) -> None:
    driver = sky.driver()
    try:
        sky.lose_answer()
        with pytest.raises(ProviderError, match="process ended with exit code 1"):
            await driver.launch(order())
        listed: list[ProviderMachine] = []

        async def is_listed() -> bool:
            listed[:] = await driver.machines()
            return bool(listed)

        await until(is_listed)
        assert {machine.provider_id for machine in listed} == set(sky.clusters)
    finally:
        await driver.close()


async def test_an_autostopping_cluster_is_on_its_way_out(sky: SkyPilotRig) -> None:
    driver = sky.driver()
    try:
        wanted = order()
        name = await driver.launch(wanted)
        sky._change(clusters={name: {"status": "AUTOSTOPPING"}})
        assert await driver.machines() == [ProviderMachine(name, dict(wanted.labels), is_ending=True)]
    finally:
        await driver.close()


async def test_python_without_skypilot_says_so(tmp_path: Path) -> None:
    driver = driver_of(SkyPilotSettings(kind="skypilot", task="task.yaml", python=sys.executable))
    try:
        with pytest.raises(ProviderError, match="process ended with exit code 1"):
            await driver.machines()
    finally:
        await driver.close()


# --- the others -------------------------------------------------------------------------------------------------------


async def test_static_launches_nothing() -> None:
    driver = driver_of(StaticSettings())
    assert list(driver.places) == []
    with pytest.raises(LaunchRefused, match="the controller does not start its machines"):
        await driver.launch(order())
    assert await driver.machines() == []


async def test_no_kubeconfig_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    for context in (None, "staging"):
        with pytest.raises(FleetError, match="kubeconfig"):
            driver_of(KubernetesSettings(kind="kubernetes", deployment="workers", context=context))
