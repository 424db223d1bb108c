"""Groups of replicas: which of them goes, what the provider replaces by itself, and changes that do not come about."""

import asyncio
import json
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from fleet.drivers.replicas import ReplicaDriver
from fleet.drivers.salad import SaladApi
from fleet.errors import OverQuota, ProviderError
from fleet.machine import Order, labels_of, new_machine_id
from fleet.settings import KubernetesSettings, SaladSettings
from tests.fleet import kubernetes_api, salad_api
from tests.fleet.rigs import FLEET, POOL, driver_of, write_kubeconfig
from tests.unit.deploy.chart import rendered

SHORT_S = 1.0  # of waiting for what never comes


def order() -> Order:
    machine_id = new_machine_id()
    return Order(machine_id, POOL, "", labels_of(FLEET, machine_id, POOL), {})


# --- Kubernetes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kubernetes_api.KubernetesApi]:
    with kubernetes_api.KubernetesApi() as api:
        write_kubeconfig(tmp_path / "kubeconfig", api.url, monkeypatch)
        yield api


@pytest.fixture
async def deployment(cluster: kubernetes_api.KubernetesApi) -> AsyncIterator[ReplicaDriver]:
    driver = driver_of(KubernetesSettings(kind="kubernetes", namespace="llm", deployment="workers"))
    assert isinstance(driver, ReplicaDriver)
    yield driver
    await driver.close()


def remaining(cluster: kubernetes_api.KubernetesApi) -> set[str]:
    return {name for name, pod in cluster.pods.items() if "deletionTimestamp" not in pod["metadata"]}


async def test_the_annotation_chooses_the_pod_that_goes(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver
) -> None:
    first, second = [await deployment.launch(order()) for _ in range(2)]
    await deployment.end(first)  # the latest would go by itself
    assert remaining(cluster) == {second}
    assert not [call for call in cluster.calls if call.method == "DELETE"]


async def test_a_pod_that_is_starting_does_not_go_in_place_of_the_one_that_is_ended(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver
) -> None:
    """Pods that do not run yet go first, whatever the annotation says."""
    running = await deployment.launch(order())
    cluster.nodes = 1
    starting = await deployment.launch(order())
    assert cluster.pods[starting]["status"]["phase"] == "Pending"
    await deployment.end(running)
    assert remaining(cluster) == {starting}
    assert cluster.replicas == 1


async def test_a_pod_that_is_starting_is_ended_itself(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver
) -> None:
    cluster.nodes = 1
    running, first, second = [await deployment.launch(order()) for _ in range(3)]
    await deployment.end(first)
    assert remaining(cluster) == {running, second}


async def test_a_pod_that_kubernetes_has_replaced_serves_the_next_launch(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver
) -> None:
    lost = await deployment.launch(order())
    cluster.lose_node()
    wanted = order()
    replacement = await deployment.launch(wanted)
    assert remaining(cluster) == {replacement} != {lost}
    assert cluster.replicas == 1
    [machine] = await deployment.machines()
    assert machine.machine_id == wanted.machine_id


async def test_what_the_quota_keeps_from_being_made_does_not_come_once_there_is_room(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver
) -> None:
    kept = await deployment.launch(order())
    cluster.pod_quota = 1
    with pytest.raises(OverQuota, match="exceeded quota"):
        await deployment.launch(order())
    cluster.pod_quota = 100
    assert [machine.provider_id for machine in await deployment.machines()] == [kept]
    assert cluster.replicas == 1


async def test_a_pod_that_is_about_to_go_is_not_kept_by_the_next_launch(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver
) -> None:
    """A controller died between its change of size and what comes of it."""
    going = await deployment.launch(order())
    cluster.replicas = 0
    cluster._act_in = 3
    launched = await deployment.launch(order())
    assert remaining(cluster) == {launched} != {going}
    assert cluster.replicas == 1


async def test_the_role_of_the_chart_allows_what_is_asked_and_nothing_else(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver
) -> None:
    cluster.nodes = 1
    running, _ = [await deployment.launch(order()) for _ in range(2)]
    await deployment.end(running)  # deletes it, because the other one would go first
    verbs = {"GET": "get", "PATCH": "patch", "DELETE": "delete"}
    resources = {kubernetes_api.DEPLOYMENT: "deployments", f"{kubernetes_api.DEPLOYMENT}/scale": "deployments/scale"}
    asked = {
        ("list" if call.path == kubernetes_api.PODS else verbs[call.method], resources.get(call.path, "pods"))
        for call in cluster.calls
    }
    [role] = [one for one in rendered("fleet") if one["kind"] == "Role"]
    assert asked == {(verb, of) for rule in role["rules"] for of in rule["resources"] for verb in rule["verbs"]}


async def test_two_that_are_about_to_go_are_not_kept_by_the_next_end(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver
) -> None:
    pods = [await deployment.launch(order()) for _ in range(3)]
    cluster.replicas = 1
    cluster._act_in = 3
    await deployment.end(pods[0])
    assert cluster.replicas == 1
    assert pods[0] not in remaining(cluster)


async def test_two_that_are_about_to_come_are_not_given_up_by_the_next_launch(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver
) -> None:
    cluster.replicas = 2
    cluster._act_in = 3
    await deployment.launch(order())
    assert cluster.replicas == 2


async def test_nobody_s_change_of_size_is_overwritten(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deployment.launch(order())
    group = await deployment._api.look()
    cluster.replicas = 5  # by an autoscaler, between our look and our change
    with pytest.raises(ProviderError):
        await deployment._api.scale(2, group)
    assert cluster.replicas == 5


async def test_pods_that_have_failed_are_not_listed(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver
) -> None:
    evicted = await deployment.launch(order())
    cluster.pods[evicted]["status"]["phase"] = "Failed"
    assert await deployment.machines() == []


@pytest.mark.parametrize(
    "selector", [{}, {"matchLabels": {"app": "workers"}, "matchExpressions": [{"key": "tier", "operator": "Exists"}]}]
)
async def test_a_selector_that_would_take_pods_of_others_is_not_used(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver, selector: dict[str, Any]
) -> None:
    cluster.selector = selector
    cluster.add("database")
    with pytest.raises(ProviderError, match="matchLabels"):
        await deployment.machines()


async def test_the_context_of_the_settings_is_used(
    cluster: kubernetes_api.KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", cluster.url, monkeypatch)
    settings = KubernetesSettings(kind="kubernetes", namespace="llm", deployment="workers", context="test")
    driver = driver_of(settings)
    try:
        assert await driver.machines() == []
    finally:
        await driver.close()
    with pytest.raises(ProviderError, match="staging"):
        driver_of(settings.model_copy(update={"context": "staging"}))


@pytest.mark.servers
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
async def test_kubectl_understands_the_mock_as_the_driver_does(
    cluster: kubernetes_api.KubernetesApi, deployment: ReplicaDriver
) -> None:
    """A client that was not written for the mock, beside the driver: it is no more than that."""
    launched = await deployment.launch(order())
    assert await kubectl("get", "pods", "-o", "name") == [f"pod/{launched}"]
    await kubectl("scale", "deployment/workers", "--replicas=3")
    assert len(await deployment.machines()) == 3
    cost = json.dumps({"metadata": {"annotations": {kubernetes_api.COST: "9"}}})
    await kubectl("patch", f"pod/{launched}", "--type=merge", f"--patch={cost}")
    assert cluster.pods[launched]["metadata"]["annotations"] == {kubernetes_api.COST: "9"}
    await kubectl("delete", f"pod/{launched}", "--wait=false")
    assert launched not in remaining(cluster)
    assert cluster.replicas == 3 == len(remaining(cluster))


async def kubectl(*arguments: str) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        "kubectl", "--namespace=llm", "--cache-dir=/nonexistent", *arguments, stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode().split()


# --- SaladCloud -------------------------------------------------------------------------------------------------------


@pytest.fixture
def salad() -> Iterator[salad_api.SaladApi]:
    with salad_api.SaladApi() as api:
        yield api


def salad_settings(salad: salad_api.SaladApi) -> SaladSettings:
    return SaladSettings(
        kind="salad",
        api_key=SecretStr(salad_api.KEY),
        organization="acme-corp",
        project="llm",
        container_group="workers",
        url=salad.url,
    )


@pytest.fixture
async def group(salad: salad_api.SaladApi) -> AsyncIterator[ReplicaDriver]:
    driver = ReplicaDriver(SaladApi(salad_settings(salad)), {})
    yield driver
    await driver.close()


@pytest.fixture
async def impatient(salad: salad_api.SaladApi) -> AsyncIterator[ReplicaDriver]:
    driver = ReplicaDriver(SaladApi(salad_settings(salad)), {}, settle_limit_s=SHORT_S)
    yield driver
    await driver.close()


def staying(salad: salad_api.SaladApi) -> set[str]:
    return {one["id"] for one in salad.instances.values() if one["state"] != "stopping"}


async def test_the_costs_leave_no_choice_but_the_one_that_is_ended(
    salad: salad_api.SaladApi, group: ReplicaDriver
) -> None:
    idle, ended, busy = [await group.launch(order()) for _ in range(3)]
    salad.run_all()
    salad.instances[busy]["deletion_cost"] = 7  # as its worker sets it
    salad.instances[ended]["deletion_cost"] = 3  # silent: its worker has not set it back
    await group.end(ended)
    assert staying(salad) == {idle, busy}
    assert salad.instances[busy]["deletion_cost"] == 7


async def test_an_instance_that_takes_long_to_stop_is_listed_as_ending(
    salad: salad_api.SaladApi, group: ReplicaDriver
) -> None:
    launched = await group.launch(order())
    salad.slow = 1000
    await group.end(launched)
    await group.end(launched)
    assert [(machine.provider_id, machine.is_ending) for machine in await group.machines()] == [(launched, True)]


async def test_a_provider_that_ends_another_one_is_found_out(
    salad: salad_api.SaladApi, group: ReplicaDriver, impatient: ReplicaDriver
) -> None:
    _, ended = [await group.launch(order()) for _ in range(2)]
    salad.ignores_costs = True
    with pytest.raises(ProviderError, match="still exists"):
        await impatient.end(ended)
    assert staying(salad) == {ended}
    await group.end(ended)
    assert staying(salad) == set()


async def test_an_instance_that_salad_has_replaced_is_listed_under_an_id_of_its_own(
    salad: salad_api.SaladApi, group: ReplicaDriver
) -> None:
    await group.launch(order())
    gone = salad.lose_node()
    [machine] = await group.machines()
    assert machine.provider_id != gone
    assert machine.machine_id is None
    await group.end(machine.provider_id)  # as nobody's
    assert salad.replicas == 0


async def test_a_launch_that_is_not_listed_in_time_is_not_launched_twice(
    salad: salad_api.SaladApi, impatient: ReplicaDriver
) -> None:
    salad.slow = 1000
    with pytest.raises(ProviderError, match="not there yet"):
        await impatient.launch(order())
    assert salad.replicas == 1
    salad._due.clear()  # now it is listed
    assert len(await impatient.machines()) == 1


async def test_a_replica_that_was_ordered_before_is_not_ordered_again(
    salad: salad_api.SaladApi, group: ReplicaDriver
) -> None:
    """A controller died between its change of size and the new instance."""
    salad.slow = 1
    salad.replicas = 1
    salad._settle()
    launched = await group.launch(order())
    assert salad.replicas == 1
    assert staying(salad) == {launched}
