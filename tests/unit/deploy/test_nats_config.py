"""deploy/nats/nats-server.conf, read by the real nats-server."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from protocol.bus import Bus
from protocol.topology import QueueBounds, apply, streams
from spillway.config import load_config
from tests.nats_server import free_port
from tests.unit.deploy.description import ENVIRONMENT, ROOT, services, tool

CONFIG = ROOT / "deploy/nats/nats-server.conf"
START_LIMIT_S = 15.0


def environment() -> dict[str, str]:
    """This process's own, and what the compose file gives to nats-server."""
    given = {name: str(value) for name, value in services()["nats"]["environment"].items()}
    return {**os.environ, **given}


def test_server_accepts_the_configuration() -> None:
    command = [tool("nats-server"), "-t", "-c", str(CONFIG)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_server_accepts_the_configuration_of_one_of_three() -> None:
    of_this_one = {"NATS_NODE": "a", "NATS_ROUTES": "[nats://cluster:22@b:6222, nats://cluster:22@c:6222]"}
    command = [tool("nats-server"), "-t", "-c", str(ROOT / "deploy/nats/cluster.conf")]
    done = subprocess.run(command, env={**environment(), **of_this_one}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_password_of_digits_needs_the_quotes_that_the_compose_file_puts_around_it() -> None:
    bare = {**environment(), "NATS_PASSWORD": ENVIRONMENT["NATS_PASSWORD"][:8]}
    done = subprocess.run([tool("nats-server"), "-t", "-c", str(CONFIG)], env=bare, capture_output=True, check=False)
    assert done.returncode != 0
    assert services()["nats"]["environment"]["NATS_PASSWORD"] == f'"{ENVIRONMENT["NATS_PASSWORD"]}"'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """The port of a server with this very configuration, but on loopback and in a folder of the test's own."""
    port, log = free_port(), tmp_path / "nats.log"
    config = tmp_path / "nats-server.conf"
    text = CONFIG.read_text()
    for theirs, ours in (
        ("host: 0.0.0.0\nport: 4222", f"host: 127.0.0.1\nport: {port}"),
        ('http: "0.0.0.0:8222"', f'http: "127.0.0.1:{free_port()}"'),
        ('store_dir: "/var/lib/nats"', f'store_dir: "{tmp_path / "store"}"'),
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    config.write_text(text)
    process = subprocess.Popen([tool("nats-server"), "-c", str(config), "-l", str(log)], env=environment())
    deadline = time.monotonic() + START_LIMIT_S
    while "Server is ready" not in (log.read_text() if log.exists() else ""):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    yield port
    process.terminate()
    process.wait(timeout=15)


async def test_configured_streams_fit_and_strangers_are_refused(server: int) -> None:
    queue = load_config(ROOT / "deploy/compose/spillway.toml", env={}).nats.queue
    mib = 1024 * 1024
    bounds = QueueBounds(
        max_jobs=queue.max_jobs, max_bytes=queue.max_mib * mib, max_usage_bytes=queue.usage_max_mib * mib
    )
    bus = await Bus.connect(f"nats://spillway:{ENVIRONMENT['NATS_PASSWORD']}@127.0.0.1:{server}", name="test")
    try:
        await apply(bus, ["spillway-demo"], bounds)
        listed = await bus.api("STREAM.NAMES")
        assert set(listed["streams"]) == {config["name"] for config in streams(bounds)}
    finally:
        await bus.close()
    stranger = Client()
    with pytest.raises(NatsError, match="Authorization Violation"):
        await stranger.connect(f"nats://spillway:wrong@127.0.0.1:{server}", allow_reconnect=False)
    await stranger.close()
