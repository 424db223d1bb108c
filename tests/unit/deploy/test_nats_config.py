"""deploy/nats/nats-server.conf, read by the real nats-server."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from protocol import subjects
from protocol.errors import BusError
from protocol.nats.bus import Bus
from protocol.nats.topology import QueueBounds, apply, streams
from spillway.config import load_config
from tests.shipped import CLUSTER_CONFIG, LEAF_CONFIG, NATS_CONFIG, ShippedNats, nats_environment, with_ours
from tests.unit.deploy.description import ENVIRONMENT, ROOT, services, tool


def test_server_accepts_the_configuration() -> None:
    command = [tool("nats-server"), "-t", "-c", str(NATS_CONFIG)]
    done = subprocess.run(command, env=nats_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_server_accepts_the_configuration_of_one_of_three() -> None:
    of_this_one = {
        "NATS_NODE": "a",
        "NATS_CLUSTER_PASSWORD": '"44"',
        "NATS_ROUTES": "[nats://cluster:44@b:6222, nats://cluster:44@c:6222]",
    }
    command = [tool("nats-server"), "-t", "-c", str(CLUSTER_CONFIG)]
    done = subprocess.run(
        command, env={**nats_environment(), **of_this_one}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_server_accepts_the_configuration_of_another_region() -> None:
    command = [tool("nats-server"), "-t", "-c", str(LEAF_CONFIG)]
    done = subprocess.run(command, env=nats_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_clients_password_opens_the_cluster() -> None:
    cluster = CLUSTER_CONFIG.read_text().partition("cluster {")[2]
    assert "authorization { user: cluster, password: $NATS_CLUSTER_PASSWORD }" in cluster
    assert "$NATS_PASSWORD" not in cluster


def test_a_password_of_digits_needs_the_quotes_that_the_compose_file_puts_around_it() -> None:
    bare = {**nats_environment(), "NATS_PASSWORD": ENVIRONMENT["NATS_PASSWORD"][:8]}
    done = subprocess.run(
        [tool("nats-server"), "-t", "-c", str(NATS_CONFIG)], env=bare, capture_output=True, check=False
    )
    assert done.returncode != 0
    assert services()["nats"]["environment"]["NATS_PASSWORD"] == f'"{ENVIRONMENT["NATS_PASSWORD"]}"'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ShippedNats]:
    """A server with this very configuration, but on loopback and in a folder of the test's own."""
    server = ShippedNats(tmp_path)
    server.start()
    yield server
    server.stop()


class TightNats(ShippedNats):
    """With room for one set of our streams in memory, and not for a second."""

    def _write_config(self) -> Path:
        config = super()._write_config()
        config.write_text(with_ours(config.read_text(), {"max_memory_store: 2GB": "max_memory_store: 900MB"}))
        return config


async def test_what_is_there_is_not_reserved_again(tmp_path: Path) -> None:
    """The server asks for a stream's memory before it sees that the stream is there."""
    server = TightNats(tmp_path)
    server.start()
    bus = await Bus.connect(server.url, name="test")
    try:
        for bounds in (QueueBounds(), QueueBounds(), QueueBounds(max_jobs=7)):
            await apply(bus, ["spillway-demo"], bounds)
        assert (await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}"))["config"]["max_msgs"] == 7
        with pytest.raises(BusError, match="insufficient memory"):  # it does not fit twice
            await apply(bus, ["spillway-demo"], QueueBounds(max_bytes=2 * QueueBounds().max_bytes))
    finally:
        await bus.close()
        server.stop()


async def test_configured_streams_fit_and_strangers_are_refused(server: ShippedNats) -> None:
    queue = load_config(ROOT / "deploy/compose/spillway.toml", env={}).nats.queue
    mib = 1024 * 1024
    bounds = QueueBounds(
        max_jobs=queue.max_jobs, max_bytes=queue.max_mib * mib, max_usage_bytes=queue.usage_max_mib * mib
    )
    bus = await Bus.connect(server.url, name="test")
    try:
        await apply(bus, ["spillway-demo"], bounds)
        listed = await bus.api("STREAM.NAMES")
        assert set(listed["streams"]) == {config["name"] for config in streams(bounds)}
    finally:
        await bus.close()
    stranger = Client()
    with pytest.raises(NatsError, match="Authorization Violation"):
        await stranger.connect(f"nats://spillway:wrong@127.0.0.1:{server.port}", allow_reconnect=False)
    await stranger.close()
