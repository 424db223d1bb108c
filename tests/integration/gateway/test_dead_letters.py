"""Requests that were given up: in a stream, and listed by the command."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.dispatch.records import DeadLetters, newest_dead_letters
from protocol.job import PROTOCOL_VERSION, Sampling
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.usage import AttemptFailure, DeadLetter
from spillway.cli import app


def letter(number: int) -> DeadLetter:
    failures = (AttemptFailure(1, None, "job_vanished", "gone", 0), AttemptFailure(2, "w", "engine_error", "boom", 7))
    sampling = Sampling(max_tokens=9)
    return DeadLetter(PROTOCOL_VERSION, f"req_{number}", "g", "a/b", "team", "key", 3, sampling, 1, 2000, failures)


@pytest.fixture
def config_path(tmp_path: Path, nats_url: str) -> Path:
    path = tmp_path / "spillway.toml"
    path.write_text(f'data_dir = "{tmp_path / "data"}"\n[models.demo]\n[nats]\nurls = ["{nats_url}"]\n')
    return path


async def put_letters(nats_url: str, count: int) -> list[DeadLetter]:
    bus = await Bus.connect(nats_url, name="test")
    await topology.apply(bus, [], topology.QueueBounds())
    box = DeadLetters(bus)
    for number in range(count):
        await box.publish(letter(number))
        await box.publish(letter(number))  # its answer got lost: the stream keeps one
    found = await newest_dead_letters(bus, limit=2)
    await bus.close()
    return found


async def test_the_newest_come_first(nats_url: str) -> None:
    assert await put_letters(nats_url, 3) == [letter(2), letter(1)]


async def test_before_any_gateway_there_is_no_stream_and_no_letter(nats_url: str) -> None:
    bus = await Bus.connect(nats_url, name="test")
    assert await newest_dead_letters(bus, limit=2) == []
    await bus.close()


def test_the_command_lists_them(nats_url: str, config_path: Path) -> None:
    asyncio.run(put_letters(nats_url, 2))
    table = CliRunner().invoke(app, ["dead-letters", "--config", str(config_path)])
    assert table.exit_code == 0, table.output
    assert "1970-01-01 00:00:02" in table.output
    assert "job_vanished, engine_error" in table.output
    printed = CliRunner().invoke(app, ["dead-letters", "--config", str(config_path), "--json", "-n", "1"])
    [found] = json.loads(printed.output)
    assert (found["request_id"], found["tenant"]) == ("req_1", "team")
    assert found["failures"][0]["worker_id"] is None
    assert found["failures"][1] == {
        "attempt": 2,
        "worker_id": "w",
        "code": "engine_error",
        "reason": "boom",
        "completion_tokens": 7,
    }


async def test_a_stream_that_has_never_had_one_has_none(nats_url: str) -> None:
    bus = await Bus.connect(nats_url, name="test")
    await topology.apply(bus, [], topology.QueueBounds())
    assert await newest_dead_letters(bus, 5) == []
    await bus.close()
