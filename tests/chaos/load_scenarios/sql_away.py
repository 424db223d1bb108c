"""SQL is away under a steady load: no caller may notice, no row may be missing, nothing may pile up in the gateway.

Half of the requests come with a key that has limits of every kind and a budget. ``plan.seconds`` is how long SQL is
away, ``plan.count`` how many requests come a second.
"""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
from sqlalchemy import func, select

from db.accounts.principal import Policy
from db.tables import RequestRow
from gateway.limits.account import AccountStore
from ledger.check import check_rollups
from protocol import subjects
from tests.chaos.ledger import settled_rows
from tests.chaos.load_scenarios.callers import Asked, ttfts_ms
from tests.chaos.load_scenarios.plan import Stage, expect
from tests.chaos.report import percentile
from tests.chaos.system import Shape, System

LIMITED = "limited"
TOKENS = 3
NANO_USD_PER_TOKEN = 1_000
WARM_UP_S = 5.0  # libraries, pools and buffers of the gateway find their size
CALM_SHARE = 3  # the load goes on for so many times less before and after SQL was away
SAMPLE_PERIOD_S = 0.25
CATCH_UP_LIMIT_S = 60.0
SETTLE_LIMIT_S = 10.0  # until the budget's account has heard of the last answer
# At 200 requests a second for a minute, what a gateway would keep of each request is more than this from 350 bytes on.
GROWTH_LIMIT_MIB = 4.0
LATE_MS = 25.0  # beside half as much again as before
SQLITE_SHAPE = Shape(
    workers=2,
    inter_token_s=0.01,
    limited={LIMITED: Policy(10**6, 10**8, 400, 10**15, "month")},
    price={"completion": NANO_USD_PER_TOKEN / 1000},
)
POSTGRES_SHAPE = replace(SQLITE_SHAPE, postgres=True)

Outage = Callable[[System], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def stopped(system: System) -> AsyncIterator[None]:
    """PostgreSQL is killed, and started again: connections are cut, new ones refused."""
    assert system.postgres is not None
    await asyncio.to_thread(system.postgres.stop, crash=True)
    yield
    await asyncio.to_thread(system.postgres.start)


@asynccontextmanager
async def frozen(system: System) -> AsyncIterator[None]:
    """PostgreSQL holds its connections, takes new ones, and answers nobody: a lost host, a disk that hangs."""
    assert system.postgres is not None
    system.postgres.freeze()
    try:
        yield
    finally:  # also of a run that is interrupted: frozen, it could not be ended
        system.postgres.thaw()


@asynccontextmanager
async def locked(system: System) -> AsyncIterator[None]:
    """Somebody holds SQLite's write lock: a forgotten shell, a slow backup."""
    with closing(sqlite3.connect(str(system.database.url.database), isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


@dataclass
class Gauge:
    """The gateway's memory and the ledger stream's backlog over time."""

    system: System
    memory_mib: list[tuple[float, float]] = field(default_factory=list)  # (monotonic clock, resident)
    backlog: list[tuple[float, int]] = field(default_factory=list)  # (monotonic clock, messages not written yet)

    async def run(self) -> None:
        """Sample for ever."""
        process = psutil.Process(self.system.gateways[0].pid)
        while True:
            self.memory_mib.append((time.monotonic(), process.memory_info().rss / 2**20))
            self.backlog.append((time.monotonic(), await self._unwritten()))
            await asyncio.sleep(SAMPLE_PERIOD_S)

    async def _unwritten(self) -> int:
        info = await self.system.bus.api(f"CONSUMER.INFO.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}")
        return int(info["num_pending"]) + int(info["num_ack_pending"])

    def peak_mib(self, from_s: float, until_s: float) -> float:
        """Of a time that has been sampled."""
        return max(mib for at_s, mib in self.memory_mib if from_s <= at_s < until_s)

    async def caught_up_s(self, from_s: float, usual: int, limit_s: float) -> float | None:
        """Return the seconds after a moment until no more messages than usual waited; None: not within the limit."""
        while time.monotonic() < from_s + limit_s:
            for at_s, waiting in self.backlog:
                if at_s >= from_s and waiting <= usual:
                    return at_s - from_s
            await asyncio.sleep(SAMPLE_PERIOD_S)
        return None


@dataclass(frozen=True)
class Phase:
    """A part of the run."""

    name: str
    from_s: float
    until_s: float

    def asked(self, everything: Sequence[Asked]) -> list[Asked]:
        """Return the requests due in this phase."""
        return [one for one in everything if self.from_s <= one.record.due_s < self.until_s]


def play(outage: Outage) -> Callable[[Stage], Coroutine[Any, Any, None]]:
    """The scenario in which SQL is away in this way."""

    async def play_it(stage: Stage) -> None:
        plan, gauge = stage.plan, Gauge(stage.system)
        calm_s = plan.seconds / CALM_SHARE
        await _offer(stage, min(WARM_UP_S, plan.seconds))
        sampling = asyncio.create_task(gauge.run())
        began_s = time.monotonic()
        offered = asyncio.create_task(_offer(stage, calm_s + plan.seconds + calm_s))
        await asyncio.sleep(calm_s)
        psutil.cpu_percent()
        away_s = time.monotonic()
        async with outage(stage.system):
            await asyncio.sleep(plan.seconds)
        back_s = time.monotonic()
        stage.report.faults += 1
        stage.report.extras["machine_busy_percent"] = psutil.cpu_percent()
        usual = max(waiting for at_s, waiting in gauge.backlog if began_s <= at_s < away_s)
        caught_up_s = await gauge.caught_up_s(back_s, usual, CATCH_UP_LIMIT_S)
        await offered
        ended_s = time.monotonic()
        sampling.cancel()
        phases = [Phase("before", began_s, away_s), Phase("during", away_s, back_s), Phase("after", back_s, ended_s)]
        stage.report.extras["away_s"] = round(back_s - away_s, 1)
        expect(stage.report, "caught_up_s", caught_up_s, at_most=CATCH_UP_LIMIT_S)
        _judge_backlog(stage, gauge, phases)
        _judge_memory(stage, gauge, phases)
        _judge_latency(stage, phases)
        await _judge_money(stage)

    return play_it


async def _offer(stage: Stage, seconds: float) -> None:
    """Half of the requests under each key."""
    offers = [stage.callers.offer(stage.plan.count / 2, seconds, tokens=TOKENS, tenant=who) for who in ("", LIMITED)]
    await asyncio.gather(*offers)


def _judge_backlog(stage: Stage, gauge: Gauge, phases: Sequence[Phase]) -> None:
    """Check that records waited in the stream while SQL was unavailable; otherwise it never was."""
    for phase in phases:
        most = max((waiting for at_s, waiting in gauge.backlog if phase.from_s <= at_s < phase.until_s), default=0)
        stage.report.extras[f"backlog_messages_{phase.name}"] = most
    before, during = (stage.report.extras[f"backlog_messages_{name}"] for name in ("before", "during"))
    if during <= before:
        stage.report.offend("nothing had to wait for SQL")


def _judge_memory(stage: Stage, gauge: Gauge, phases: Sequence[Phase]) -> None:
    peaks_mib = {phase.name: gauge.peak_mib(phase.from_s, phase.until_s) for phase in phases}
    stage.report.extras |= {f"gateway_mib_{name}": round(mib, 1) for name, mib in peaks_mib.items()}
    grown_mib = max(peaks_mib.values()) - peaks_mib["before"]
    expect(stage.report, "gateway_grown_mib", grown_mib, at_most=GROWTH_LIMIT_MIB * stage.plan.slack)


def _judge_latency(stage: Stage, phases: Sequence[Phase]) -> None:
    extras = stage.report.extras
    for phase in phases:
        asked = phase.asked(stage.callers.asked)
        latencies_ms = [one.record.latency_s * 1000 for one in asked]
        extras[f"requests_{phase.name}"] = len(asked)
        for per_cent in (50, 99, 100):
            extras[f"latency_ms_p{per_cent}_{phase.name}"] = percentile(latencies_ms, per_cent)
            extras[f"ttft_ms_p{per_cent}_{phase.name}"] = percentile(ttfts_ms(asked), per_cent)
    bound_ms = stage.plan.slack * (1.5 * extras["latency_ms_p99_before"] + LATE_MS)
    expect(stage.report, "late_ms_p99", extras["latency_ms_p99_during"], at_most=bound_ms)


async def _judge_money(stage: Stage) -> None:
    """The budget's account, the ledger and its rollups say the same, and nothing stays reserved."""
    system = stage.system
    limited = [one for one in stage.callers.asked if one.tenant == LIMITED]
    owed = sum(one.answer.completion_tokens or 0 for one in limited) * NANO_USD_PER_TOKEN
    await settled_rows(system.database, {one.request_id or "" for one in limited if one.record.status == 200})
    async with system.database.connect() as connection:
        is_its = RequestRow.key_id == system.key_ids[LIMITED]
        charged = await connection.scalar(select(func.sum(RequestRow.charge_nano_usd)).where(is_its))
    spent = await _spent(AccountStore(system.bus), system.key_ids[LIMITED], owed)
    stage.report.extras |= {"owed_nano_usd": owed, "charged_nano_usd": int(charged or 0), "spent_nano_usd": spent}
    if not owed == charged == spent:
        stage.report.offend(f"{owed} nano-USD are owed, {charged} charged, and the budget says {spent}")
    if wrong := sum(day.wrong for day in await check_rollups(system.database)):
        stage.report.offend(f"{wrong} rollups are not what the rows add up to")


async def _spent(account_store: AccountStore, key_id: str, owed: int) -> int:
    """By the budget's account, once it has heard of everything, or ``SETTLE_LIMIT_S`` later."""
    deadline_s = time.monotonic() + SETTLE_LIMIT_S
    while True:
        found = await account_store.load(key_id)
        spent = 0 if found is None else found[0].spent_nano_usd
        if spent == owed or time.monotonic() > deadline_s:
            return spent
        await asyncio.sleep(SAMPLE_PERIOD_S)
