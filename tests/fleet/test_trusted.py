"""Pools of a trusted group are sized by the work that demands them, and the others by the rest."""

import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from db.engine import create_engine
from db.tables import RollupRow, SliceRow
from fleet.history import learn
from fleet.main import groups_of
from fleet.monitor import Monitor, MonitoredGroup
from fleet.policy.forecast import SLOT_S, Forecast
from protocol import subjects
from protocol.job import PROTOCOL_VERSION, Heartbeat
from protocol.nats import topology
from protocol.nats.bus import Bus
from spillway.config import load_config
from spillway.fleet_config import controller_settings
from tests.waiting import HANGS_S

ORDINARY, TRUSTED = frozenset({"m"}), frozenset({"m@trusted"})
POOL = """
[pools.{name}]
models = ["m"]
trusted = {trusted}
engine = {{ kind = "scripted" }}
fleet = {{ driver = {{ kind = "static" }} }}
"""


def test_trusted_pools_are_a_group_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "spillway.toml"
    pools = {"spot": "false", "reserve": "false", "vault": "true"}
    path.write_text("[models.m]\n" + "".join(POOL.format(name=name, trusted=flag) for name, flag in pools.items()))
    config = load_config(path, {"SPILLWAY_NATS__URLS": '["nats://127.0.0.1:1"]'})
    settings = controller_settings(config, {})
    assert groups_of(settings.pools) == [frozenset({"reserve", "spot"}), frozenset({"vault"})]
    assert (settings.pools["spot"].queues, settings.pools["vault"].queues) == (ORDINARY, TRUSTED)
    assert settings.trusted_pools == {"vault"}


def beat(pool: str, jobs_taken: int, **rest: Any) -> Heartbeat:
    names = (pool, pool, "x", "x", "spot", "scripted", ("m",))
    return Heartbeat(PROTOCOL_VERSION, *names, 0.0, 4, 4, 4, 4, 0, 0, 0, jobs_taken=jobs_taken, **rest)


async def test_each_group_sees_its_own_work(nats_url: str) -> None:
    bus = await Bus.connect(nats_url, name="fleet")
    await topology.apply(bus, ["m", "m@trusted"], topology.QueueBounds(), limit_s=HANGS_S)
    monitor = Monitor(bus, [MonitoredGroup(queues, 60.0, 600.0) for queues in (ORDINARY, TRUSTED)])
    for number, (queue, lane) in enumerate([("m", "h0"), ("m@trusted", "h1"), ("m@trusted", "resume")]):
        await bus.publish_durable(subjects.job_subject(queue, lane), b"x", message_id=str(number))
    await monitor.look()
    waiting = [monitor.demand(queues).queued_tokens for queues in (ORDINARY, TRUSTED)]
    assert waiting[1] == 2 * waiting[0] > 0
    for taken in (0, 1):
        monitor.receive(beat("vault", taken, trusted=True))
        monitor.receive(beat("spot", 0))
    await bus.api(
        f"STREAM.PURGE.{subjects.INTERACTIVE_STREAM}", {"filter": subjects.job_subject("m@trusted", "resume")}
    )
    await bus.publish_durable(subjects.job_subject("m@trusted", "h1"), b"x", message_id="later")
    await monitor.look()
    arrived = [monitor.demand(queues).tokens_per_s for queues in (ORDINARY, TRUSTED)]
    assert arrived[0] == 0 < arrived[1]
    await bus.close()


@pytest.mark.parametrize(("queues", "tokens"), [(ORDINARY, 100), (TRUSTED, 9000)])
async def test_each_group_learns_its_own_past(sqlite_url: str, queues: frozenset[str], tokens: int) -> None:
    engine = create_engine(sqlite_url)
    slice_ = dict.fromkeys(("provider", "region", "tier", "team_id", "key_id", "endpoint", "outcome"), "")
    sums = dict.fromkeys(("requests", "attempts", "failovers", "retried", "cached_tokens", "completion_tokens"), 0)
    sums |= {"charge_nano_usd": 0, "total_ms": 0}
    learnt = _Learnt()
    bucket_ms = int(time.time() // SLOT_S - 4) * int(SLOT_S) * 1000
    async with engine.begin() as connection:
        for number, (pool, made) in enumerate([("spot", 60), ("", 40), ("vault", 9000)]):
            await connection.execute(insert(SliceRow).values(id=number, model="m", pool=pool, **slice_))
            key = {"width_s": int(SLOT_S), "bucket_unix_ms": bucket_ms, "slice_id": number}
            await connection.execute(insert(RollupRow).values(**key, **sums, prompt_tokens=made))
    await learn(learnt, engine, queues, {"vault"})
    await engine.dispose()
    assert learnt.tokens == tokens


class _Learnt(Forecast):
    """Adds up what it is taught."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0.0

    def learn(self, slot_start_s: float, tokens_per_s: float) -> None:
        self.tokens += round(tokens_per_s * SLOT_S)
