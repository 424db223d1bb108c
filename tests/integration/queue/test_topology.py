"""The topology is made by whoever comes first, on one server and on a cluster, and made again where it must be."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from protocol import subjects
from protocol.errors import ApiError, BusError, BusTimeout
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.nats.topology import MIB, QueueBounds
from tests.nats_server import NatsCluster, NatsServer
from tests.waiting import HANGS_S, until

MODEL = "m"
CONSUMER = subjects.job_consumer(MODEL, subjects.HIGH_LANES[0])
STREAM = subjects.INTERACTIVE_STREAM


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="test")
    yield bus
    await bus.close()


async def consumer_config(bus: Bus) -> dict[str, Any]:
    return dict((await bus.api(f"CONSUMER.INFO.{STREAM}.{CONSUMER}"))["config"])


@pytest.mark.parametrize(
    "older",
    [
        {"priority_policy": "overflow"},
        {"filter_subject": "rq.m.elsewhere"},
        {"ack_wait": 30 * topology.NS},
        {"mem_storage": False},  # the server changes the ones above, and refuses to change these
        {"max_waiting": 7},
    ],
)
async def test_a_consumer_of_an_older_version_becomes_as_it_should_be(bus: Bus, older: dict[str, Any]) -> None:
    await topology.apply(bus, [], QueueBounds(), limit_s=HANGS_S)
    wanted = topology.job_consumer_config(MODEL, subjects.HIGH_LANES[0])
    body = {"stream_name": STREAM, "config": {**wanted, **older}}
    await bus.api(f"CONSUMER.DURABLE.CREATE.{STREAM}.{CONSUMER}", body)
    await bus.publish_durable("rq.m.h0", b"job", message_id="job")
    await topology.apply(bus, [MODEL], QueueBounds(), limit_s=HANGS_S)
    found = await consumer_config(bus)
    assert {key: found.get(key) for key in wanted} == wanted

    async def has_the_job() -> bool:
        return bool((await bus.api(f"CONSUMER.INFO.{STREAM}.{CONSUMER}"))["num_pending"] == 1)

    await until(has_the_job)  # the server acknowledges a message before its consumers know of it


@pytest.mark.parametrize(
    ("bounds", "server", "said"),
    [
        (
            QueueBounds(max_usage_bytes=64 * MIB),
            "max_file_store: 8MB, max_memory_store: 1GB",
            ["stream USAGE, which needs 64 MiB", "jetstream.max_file_store", "nats.queue.usage_max_mib"],
        ),
        (
            QueueBounds(max_bytes=64 * MIB),
            "max_file_store: 64GB, max_memory_store: 8MB",
            ["stream RQ, which needs 64 MiB", "jetstream.max_memory_store", "nats.queue.max_mib"],
        ),
    ],
)
async def test_too_little_room_names_the_stream_its_need_and_both_settings(
    tmp_path: Path, bounds: QueueBounds, server: str, said: list[str]
) -> None:
    nats = NatsServer(tmp_path, f'\njetstream {{ store_dir: "{tmp_path}", {server} }}\n')
    nats.start()
    bus = await Bus.connect(nats.url, name="test")
    try:
        with pytest.raises(BusError) as refused:
            await topology.apply(bus, [], bounds)
        assert all(part in str(refused.value) for part in said), refused.value
        # Also where a smaller one is there.
        name = said[0].split()[1].rstrip(",")
        (wanted,) = [config for config in topology.streams(bounds) if config["name"] == name]
        await bus.api(f"STREAM.CREATE.{name}", {**wanted, "max_bytes": MIB})
        with pytest.raises(BusError, match="needs 64 MiB"):
            await topology.apply(bus, [], bounds)
    finally:
        await bus.close()
        nats.stop()


async def test_a_stream_that_cannot_be_changed_is_left_and_the_error_says_why(bus: Bus) -> None:
    await bus.api(f"STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": ["rq.>"], "storage": "file"})
    with pytest.raises(ApiError, match="storage type"):
        await topology.apply(bus, [MODEL], QueueBounds())


async def test_two_gateways_may_make_the_topology_at_once_while_a_cluster_comes_up(tmp_path: Path) -> None:
    cluster = NatsCluster(tmp_path)
    try:
        cluster.start(0)
        cluster.start(1)
        await make_at_once(cluster)
    finally:
        cluster.stop_all()


async def make_at_once(cluster: NatsCluster) -> None:
    first, second = [await Bus.connect(cluster.urls[:2], name="test") for _ in range(2)]
    bounds = QueueBounds(replicas=3)
    with pytest.raises((ApiError, BusTimeout)):
        await topology.apply(first, [MODEL], bounds)
    making = asyncio.gather(
        topology.apply(first, [MODEL], bounds, limit_s=topology.FIRST_APPLY_LIMIT_S),
        topology.apply(second, [MODEL, "n"], bounds, limit_s=topology.FIRST_APPLY_LIMIT_S),
    )
    await asyncio.sleep(0)  # both have begun
    cluster.start(2)
    await making
    for config in topology.streams(bounds):
        found = await first.api(f"STREAM.INFO.{config['name']}")
        assert found["config"]["num_replicas"] == 3
        assert len(found["cluster"]["replicas"]) == 2
    await topology.apply(second, [MODEL], QueueBounds(replicas=3, max_jobs=7), limit_s=HANGS_S)
    assert (await first.api(f"STREAM.INFO.{STREAM}"))["config"]["max_msgs"] == 7
    names = (await first.api(f"CONSUMER.NAMES.{STREAM}"))["consumers"]
    assert sorted(names) == sorted(
        subjects.job_consumer(model, lane) for model in (MODEL, "n") for lane in subjects.LANES
    )
    await first.close()
    await second.close()
