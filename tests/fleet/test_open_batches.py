"""The controller knows what open batches need: their deadlines, what is left, and whose pools may do it."""

import json
import time
from typing import Any

from sqlalchemy import insert

from db.engine import create_engine
from db.tables import ApiKeyRow, BatchRow, TeamRow
from fleet.machine_store import MachineStore
from fleet.monitor import BATCH_DUE_S, Monitor, MonitoredGroup
from fleet.open_batches import OpenBatch
from protocol import subjects
from protocol.job import PROTOCOL_VERSION, Heartbeat
from protocol.nats import topology
from protocol.nats.bus import Bus
from tests.waiting import HANGS_S

HOUR_MS = 3_600_000
ROUNDING_S = 0.001  # of floating-point Unix times
QUEUES = frozenset({"m"})


def batch(name: str, *, due_ms: int, models: dict[str, tuple[int, int]] | None, **rest: Any) -> dict[str, Any]:
    total = 0 if models is None else sum(lines for lines, _ in models.values())
    row: dict[str, Any] = {column.name: None if column.nullable else 0 for column in BatchRow.__table__.columns}
    row |= {
        "id": name, "surface": "openai", "tenant": "t", "team_id": "t", "key_id": "k", "key_name": "k",
        "endpoint": "/v1/chat/completions", "input_file_id": "file-1", "completion_window": "24h",
        "status": "in_progress", "created_unix_ms": 0, "expires_unix_ms": due_ms, "total": total,
        "models": None if models is None else json.dumps(models),
    }  # fmt: skip
    return row | rest


async def test_what_is_left_of_each_batch_by_queue(database_url: str) -> None:
    engine = create_engine(database_url)
    batches = [
        batch("half", due_ms=2, models={"m": (80, 8000), "n": (20, 2000)}, completed=40, failed=10, prompt_tokens=6000,
              completion_tokens=2000),
        batch("fresh", due_ms=1, models={"m": (10, 5000)}),
        batch("confidential", due_ms=3, models={"m": (10, 700)}, key_id="vault"),
        batch("done", due_ms=4, models={"m": (10, 700)}, completed=10),
        batch("uncounted", due_ms=5, models=None, status="validating"),
        batch("over", due_ms=6, models={"m": (10, 700)}, status="completed"),
    ]  # fmt: skip
    try:
        async with engine.begin() as connection:
            team = {"organisation_id": "o", "created_unix_ms": 0}
            await connection.execute(insert(TeamRow).values(id="t", name="t", **team))
            await connection.execute(insert(TeamRow).values(id="legal", name="legal", trusted_only=True, **team))
            for key, of_team in (("k", "t"), ("vault", "legal")):
                values = {"token_hmac": key, "last_four": "", "created_unix_ms": 0, "scopes": "inference"}
                await connection.execute(insert(ApiKeyRow).values(id=key, name=key, team_id=of_team, **values))
            await connection.execute(insert(BatchRow), batches)
        found = await MachineStore(engine).batches()
    finally:
        await engine.dispose()
    assert found == {
        # Half of its lines are left; those that are done took 200 tokens each, and not the 100 of the estimate.
        "m": [OpenBatch(1, 10, 5000.0), OpenBatch(2, 40, 8000.0)],
        "n": [OpenBatch(2, 10, 2000.0)],
        "m@trusted": [OpenBatch(3, 10, 700.0)],
    }


async def taken(bus: Bus, lane: str, jobs: int) -> None:
    """Put jobs into a queue, and let them be taken out of it."""
    subject = subjects.job_subject("m", lane)
    for number in range(jobs):
        await bus.publish_durable(subject, b"x", message_id=f"{lane} {number}")
    await bus.api(f"STREAM.PURGE.{subjects.INTERACTIVE_STREAM}", {"filter": subject})


def beat(jobs_taken: int, batch_jobs_taken: int) -> Heartbeat:
    names = ("w", "spot", "x", "x", "spot", "scripted", ("m",))
    counts: dict[str, Any] = {"jobs_taken": jobs_taken, "batch_jobs_taken": batch_jobs_taken}
    counts["tokens_made"] = 100 * jobs_taken
    return Heartbeat(PROTOCOL_VERSION, *names, 0.0, 4, 4, 4, 4, 0, 0, 0, **counts)


async def test_batches_are_due_when_they_say_and_are_no_interactive_work(nats_url: str) -> None:
    bus = await Bus.connect(nats_url, name="fleet")
    await topology.apply(bus, ["m"], topology.QueueBounds(), limit_s=HANGS_S)
    monitor = Monitor(bus, [MonitoredGroup(QUEUES, 60.0, 600.0)])
    monitor.receive(beat(0, 0))
    await monitor.look()
    await taken(bus, subjects.LOW_LANE, 50)
    monitor.receive(beat(50, 50))
    await monitor.look()
    assert monitor.demand(QUEUES).tokens_per_s == 0.0
    await taken(bus, subjects.HIGH_LANES[0], 50)
    monitor.receive(beat(100, 50))
    await monitor.look()
    assert monitor.demand(QUEUES).tokens_per_s > 0.0

    for number in range(3):
        subject = subjects.job_subject("m", subjects.LOW_LANE)
        await bus.publish_durable(subject, b"x", message_id=str(number))
    due_ms = (round(time.time() * 1000) + 24 * HOUR_MS) // HOUR_MS * HOUR_MS
    later, also, soon = due_ms + 1000, due_ms + 2000, due_ms - 10 * HOUR_MS
    monitor.take_batches({"m": [OpenBatch(soon, 1, 10.0), OpenBatch(later, 1, 20.0), OpenBatch(also, 0, 30.0)]})
    await monitor.look()
    before_s = time.time()
    work = monitor.demand(QUEUES).batch
    after_s = time.time()
    assert [one.tokens for one in work] == [100.0, 10.0, 50.0]  # one job waits that is of no batch
    assert work[0].due_in_s == BATCH_DUE_S
    for one, due_ms in zip(work[1:], (soon, later), strict=True):
        assert due_ms / 1000 - after_s - ROUNDING_S <= one.due_in_s <= due_ms / 1000 - before_s + ROUNDING_S
    await bus.close()
