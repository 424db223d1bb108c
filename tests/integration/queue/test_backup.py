"""``spillway queue backup`` and ``restore`` with real queue servers: what is copied comes back as it was."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from protocol import subjects
from protocol.nats import topology
from protocol.nats.backup import COPIED_STREAMS, DATA_NAME, META_NAME, WINDOW_BYTES
from protocol.nats.bus import Bus
from protocol.nats.topology import QueueBounds
from spillway.cli import app
from tests.nats_server import NatsCluster, NatsServer

TTL_S = 86_400
PART_BYTES = 300_000
SUBJECTS = {
    subjects.RESPONSES_STREAM: subjects.response_subject("team", "resp_1", "run"),
    subjects.PARKED_STREAM: subjects.PARKED_USAGE_SUBJECT,
    subjects.WEBHOOKS_STREAM: subjects.WEBHOOK_EVENT_SUBJECT,
    subjects.USAGE_STREAM: subjects.REQUEST_USAGE_SUBJECT,
    subjects.PAYLOADS_STREAM: subjects.PAYLOAD_SUBJECT,
    subjects.DEAD_LETTER_STREAM: subjects.dead_letter_subject("m"),
}
Messages = dict[str, list[dict[str, Any]]]


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """Another queue server, which has nothing."""
    (tmp_path / "empty").mkdir()
    server = NatsServer(tmp_path / "empty")
    server.start()
    yield server
    server.kill()


async def fill(bus: Bus, bounds: QueueBounds) -> None:
    """Messages in each stream, and in one of them more than is in flight at a time; one message is gone again."""
    await topology.apply(bus, [], bounds, limit_s=30.0)
    assert set(SUBJECTS) == set(COPIED_STREAMS)
    for stream, subject in SUBJECTS.items():
        ttl_s = TTL_S if stream == subjects.RESPONSES_STREAM else None
        count = 3 * WINDOW_BYTES // PART_BYTES if ttl_s else 3
        for number in range(count):
            payload = random.Random(number).randbytes(PART_BYTES if ttl_s else 100)
            await bus.publish_durable(subject, payload, message_id=f"{stream} {number}", ttl_s=ttl_s)
        await bus.delete_message(stream, 2)


async def messages(bus: Bus) -> Messages:
    found: Messages = {stream: [] for stream in COPIED_STREAMS}
    for stream, kept in found.items():
        sequence = 0
        while (message := await bus.get_message(stream, seq=sequence + 1, next_by_subj=">")) is not None:
            kept.append(message)
            sequence = int(message["seq"])
    return found


async def run(url: str, *arguments: str) -> Result:
    env = {"SPILLWAY_NATS__URLS": f'["{url}"]', "SPILLWAY_DATA_DIR": "/nonexistent"}
    return await asyncio.to_thread(CliRunner().invoke, app, ["queue", *arguments], env=env)


async def test_what_is_copied_is_restored_as_it_was(
    nats_server: NatsServer, empty: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "backups/2100"
    bus = await Bus.connect(nats_server.url, name="test")
    await fill(bus, QueueBounds())
    before = await messages(bus)
    done = await run(nats_server.url, "backup", str(copy))
    assert done.exit_code == 0, done.output
    await bus.publish_durable(SUBJECTS[subjects.PARKED_STREAM], b"later", message_id="later")
    await bus.close()
    nats_server.kill()
    assert list(copy.parent.iterdir()) == [copy]
    assert {path.name for path in copy.iterdir()} == set(COPIED_STREAMS)
    assert all({path.name for path in stream.iterdir()} == {DATA_NAME, META_NAME} for stream in copy.iterdir())

    done = await run(empty.url, "restore", str(copy))
    assert done.exit_code == 0, done.output
    bus = await Bus.connect(empty.url, name="test")
    try:
        assert await messages(bus) == before
        await topology.apply(bus, [], QueueBounds())  # as a gateway does
        assert await messages(bus) == before
        consumer = await bus.api(f"CONSUMER.INFO.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}")
        assert consumer["num_pending"] == 2
        again = await run(empty.url, "restore", str(copy))
        assert again.exit_code == 1
        assert "Stop the gateways" in again.output
        assert await messages(bus) == before
    finally:
        await bus.close()


async def test_a_clusters_streams_fit_one_server(nats_cluster: NatsCluster, empty: NatsServer, tmp_path: Path) -> None:
    bus = await Bus.connect(nats_cluster.urls, name="test")
    await nats_cluster.wait_until_ready(bus)
    await fill(bus, QueueBounds(replicas=3))
    before = await messages(bus)
    await bus.close()
    for command, url in (("backup", nats_cluster.urls[0]), ("restore", empty.url)):
        done = await run(url, command, str(tmp_path / "copy"))
        assert done.exit_code == 0, done.output
    bus = await Bus.connect(empty.url, name="test")
    assert await messages(bus) == before
    await bus.close()


async def test_a_backup_that_fails_leaves_nothing(nats_url: str, tmp_path: Path) -> None:
    done = await run(nats_url, "backup", str(tmp_path / "copies/2100"))  # no gateway has made the streams yet
    assert done.exit_code == 1
    assert "stream not found" in done.output
    assert list((tmp_path / "copies").iterdir()) == []


async def test_no_backup_is_overwritten_and_nothing_else_is_taken_for_one(nats_url: str, tmp_path: Path) -> None:
    done = await run(nats_url, "backup", str(tmp_path))
    assert (done.exit_code, "already exists" in done.output) == (1, True)
    done = await run(nats_url, "restore", str(tmp_path))
    assert (done.exit_code, "is not a backup" in done.output) == (1, True)
