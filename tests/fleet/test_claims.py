"""What a stolen worker says moves the fleet no further than the queue and the ledger bear out."""

import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet
from typing import Any

import pytest
from sqlalchemy import insert

from db.engine import create_engine
from db.tables import RollupRow, SliceRow
from fleet.claims import CREDIT_JOBS, MOST_TIMES, TOLD_S, Claims
from fleet.history import tokens_per_request
from fleet.monitor import HALF_LIFE_S, Monitor, MonitoredGroup
from fleet.policy.decide import Decider
from fleet.policy.forecast import SLOT_S
from fleet.policy.view import PlaceView, PoolView
from protocol import subjects
from protocol.job import PROTOCOL_VERSION, Heartbeat
from protocol.nats import topology
from protocol.nats.bus import Bus
from tests.waiting import HANGS_S

QUEUES = frozenset({"m"})
LARGEST = 2**53  # that a message may hold
JOB_TOKENS = 100
PERIOD_S = 5.0
JOBS = 10  # in a period
PERIODS = 40
MAX_WORKERS = 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A period passes at each call."""
    periods = [0]
    monkeypatch.setattr("fleet.monitor.time.monotonic", lambda: PERIOD_S * periods[0])
    monkeypatch.setattr("fleet.monitor.time.time", lambda: 1_800_000_000 + PERIOD_S * periods[0])

    def passes() -> None:
        periods[0] += 1

    return passes


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(nats_url, name="fleet")
    await topology.apply(bus, ["m"], topology.QueueBounds(), limit_s=HANGS_S)
    yield bus
    await bus.close()


async def tokens_of_a_request(_queues: AbstractSet[str]) -> float:
    return JOB_TOKENS


def beat(worker_id: str, jobs_taken: int, **rest: Any) -> Heartbeat:
    names = (worker_id, "spot", "x", "x", "spot", "scripted", ("m",))
    rest = {"tokens_made": JOB_TOKENS * jobs_taken} | rest
    return Heartbeat(PROTOCOL_VERSION, *names, 0.0, 4, 4, 4, 4, 0, 0, 0, jobs_taken=jobs_taken, **rest)


LIES: dict[str, dict[str, int]] = {
    "tokens": {"jobs_taken": 0, "tokens_made": LARGEST},
    "jobs": {"jobs_taken": LARGEST, "tokens_made": 0},
    "both": {"jobs_taken": LARGEST, "tokens_made": LARGEST},
    "batch": {"jobs_taken": LARGEST, "tokens_made": LARGEST, "batch_jobs_taken": LARGEST},
    "more batch": {"jobs_taken": 0, "batch_jobs_taken": LARGEST},
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_moves_the_fleet_no_further_than_work_can(bus: Bus, clock: Callable[[], None], lie: str) -> None:
    """One heartbeat drove it to its maximum, where it stayed for weeks of forecasts."""
    taken, waiting = (subjects.job_subject("m", lane) for lane in subjects.HIGH_LANES[:2])
    monitor = Monitor(bus, [MonitoredGroup(QUEUES, 60.0, 600.0)], tokens_of_a_request)
    decider = Decider(max_wait_s=10.0, idle_s=600.0)
    sizes, rates = [], []
    await bus.publish_durable(waiting, b"x", message_id="waits, so that speed is measured")
    for period in range(PERIODS):
        for number in range(JOBS):
            await bus.publish_durable(taken, b"x", message_id=f"{period} {number}")
        await bus.api(f"STREAM.PURGE.{subjects.INTERACTIVE_STREAM}", {"filter": taken})
        monitor.receive(beat("honest", JOBS * period))
        if period < PERIODS // 2:
            monitor.receive(beat("stolen", **{name: count // PERIODS * period for name, count in LIES[lie].items()}))
        await monitor.look()
        pool = PoolView("spot", "spot", 1.0, JOB_TOKENS, 60.0, 0, MAX_WORKERS, (PlaceView("", 1),))
        rates.append(monitor.demand(QUEUES).tokens_per_s / JOB_TOKENS)
        sizes.append(decider.decide([pool], monitor.demand(QUEUES), PERIOD_S * period)[0].size)
        clock()
    honest = JOBS / PERIOD_S  # workers, each of which does one job in a second
    assert rates[-1] <= MOST_TIMES * honest
    assert honest / 2 <= min(rates[PERIODS // 4 :])  # nor does a lie hide the work of others
    speed = monitor.tokens_per_s("spot")
    assert speed is not None
    assert speed <= MOST_TIMES * JOB_TOKENS * (CREDIT_JOBS + JOBS * PERIODS) / HALF_LIFE_S
    assert honest <= max(sizes) <= 3 * MOST_TIMES * honest  # with what is kept for surges


def test_no_more_jobs_are_taken_than_have_left_the_queue() -> None:
    claims = Claims(JOB_TOKENS)
    claims.note_left(10, 0.0)
    assert claims.take_jobs(LARGEST, 0) == (10, 0)
    assert claims.take_jobs(1, 0) == (0, 0)
    claims.note_left(10, 1.0)
    assert claims.take_jobs(4 + LARGEST, LARGEST) == (10, 6)  # interactive ones are believed first
    claims.note_left(10, 2.0)
    claims.note_left(3, 2.0 + TOLD_S)
    assert claims.take_jobs(20, 0) == (3, 0)  # who has taken the ten would have said so


def test_late_heartbeats_are_believed() -> None:
    claims = Claims(JOB_TOKENS)
    for period in range(10):
        claims.note_left(10, PERIOD_S * period)
    assert claims.take_jobs(100, 0) == (100, 0)


def test_no_more_tokens_are_made_than_jobs_may_take() -> None:
    claims = Claims(JOB_TOKENS)
    most = MOST_TIMES * JOB_TOKENS
    assert claims.take_tokens(10, 10 * JOB_TOKENS) == 1.0
    assert claims.take_tokens(0, LARGEST) == CREDIT_JOBS * most / LARGEST
    assert claims.take_tokens(0, 1) == 0.0
    assert claims.take_tokens(10, LARGEST) == 10 * most / LARGEST
    assert claims.bounded(LARGEST) == most
    claims.expect(10 * JOB_TOKENS)
    assert claims.bounded(LARGEST) == 10 * most


@pytest.mark.parametrize(("queues", "tokens"), [({"m"}, 50.0), ({"m@trusted"}, 900.0), ({"n"}, None)])
async def test_what_a_request_takes(sqlite_url: str, queues: AbstractSet[str], tokens: float | None) -> None:
    """Of the last quarters of an hour, and of those that were answered."""
    engine = create_engine(sqlite_url)
    slice_ = dict.fromkeys(("provider", "region", "tier", "team_id", "key_id", "endpoint"), "")
    zeros = dict.fromkeys(("attempts", "failovers", "retried", "cached_tokens", "charge_nano_usd", "total_ms"), 0)
    now_ms = int(time.time() // SLOT_S) * int(SLOT_S) * 1000
    async with engine.begin() as connection:
        rows = [("spot", "ok", 0, 4), ("spot", "error", 0, 96), ("spot", "ok", 9, 1), ("vault", "ok", 0, 1)]
        for number, (pool, outcome, age, requests) in enumerate(rows):
            await connection.execute(
                insert(SliceRow).values(id=number, model="m", pool=pool, outcome=outcome, **slice_)
            )
            sums = {"requests": requests, "prompt_tokens": 100, "completion_tokens": 800 if pool == "vault" else 100}
            key = {"width_s": int(SLOT_S), "bucket_unix_ms": now_ms - age * int(SLOT_S) * 1000, "slice_id": number}
            await connection.execute(insert(RollupRow).values(**key, **sums, **zeros))
    assert await tokens_per_request(engine, frozenset({"vault"}), queues) == tokens
    await engine.dispose()
