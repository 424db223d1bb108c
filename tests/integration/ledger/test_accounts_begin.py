"""An account that begins while records are on their way into SQL counts them, whichever writer has them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.principal import Limits, Policy
from db.engine import create_engine
from db.money import CLIENTS, Price
from db.prices import add_price
from gateway.limits.leases import Quotas, Unavailable
from gateway.limits.prices import POOL, cap_account
from gateway.limits.seeds import LEDGER_LIMIT_S, RollupLedger
from ledger import writer as writer_module
from ledger.settings import LedgerSettings
from ledger.store import store_records
from ledger.writer import LedgerWriter
from protocol import subjects
from protocol.gateways import Account
from protocol.nats.bus import Bus
from protocol.usage import UsageRecord
from tests.integration.gateway.test_lost_accounts import ONE
from tests.integration.gateway.test_quotas import principal, the_account
from tests.integration.ledger.conftest import Ledger
from tests.integration.ledger.test_writer_outages import RunningWriter
from tests.usage_records import attempt_record, request_intent, request_record
from tests.waiting import HANGS_S, until

KEY = principal(Policy(budget_nano_usd=1_000_000, budget_period="month"))
CAP = cap_account("api", "month")
CAP_TERMS = Limits((None, None, None, 1_000_000), "month")
NEVER_S = 600.0  # longer than a test may take
WHOSE = pytest.mark.parametrize("whose", ["key", POOL])


@pytest.fixture(autouse=True)
async def prices(database_url: str) -> None:
    engine = create_engine(database_url)
    async with engine.begin() as connection:
        price = Price(prompt_nano_usd=0, completion_nano_usd=10**9)
        for whom in (CLIENTS, "api"):
            await add_price(connection, "demo", whom, price, from_unix_ms=0, source="test")
    await engine.dispose()


def spent_now(requests: int = 7) -> list[UsageRecord]:
    """Records of so many requests of key_1 at the pool, each of 100,000 nano-USD for both."""
    now_ms = int(time.time() * 1000)
    records: list[UsageRecord] = []
    for number in range(requests):
        name, tokens = f"spent{number}", {"completion_tokens": 100, "received_unix_ms": now_ms}
        records.append(request_record(name, key_id="key_1", team_id="team_1", **tokens))
        records.append(attempt_record(name, pool="api", started_unix_ms=now_ms, **tokens))
    return records


class Hindered:
    """Writers whose commits do not come about, as on a slow SQL server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engines: list[AsyncEngine] = []
        self._changed = asyncio.Event()
        monkeypatch.setattr(writer_module, "store_records", self._store)

    def hinder(self, writer: RunningWriter) -> RunningWriter:
        self._engines.append(writer._engine)
        return writer

    def let_go(self) -> None:
        self._engines.clear()
        self._changed.set()

    async def _store(self, engine: AsyncEngine, records: Sequence[UsageRecord]) -> None:
        while engine in self._engines:
            await self._changed.wait()
        await store_records(engine, records)


@contextlib.asynccontextmanager
async def gateway(nats_url: str, database_url: str) -> AsyncIterator[Quotas]:
    bus = await Bus.connect(nats_url, name="gateway")
    engine = create_engine(database_url)
    quotas = Quotas(bus, "g0", RollupLedger(engine))
    await quotas.start()
    task = asyncio.create_task(quotas.run())
    yield quotas
    task.cancel()
    await quotas.close()
    await bus.close()
    await engine.dispose()


async def ask(quotas: Quotas, whose: str) -> None:
    """Reserve 100,000 nano-USD. Raises Unavailable."""
    if whose == POOL:
        await quotas.reserve_money([(CAP, CAP_TERMS)], 100_000, None)
    else:
        await quotas.reserve(KEY, [ONE])


async def begun(quotas: Quotas, ledger: Ledger, whose: str) -> Account:
    """Ask as a client does that tries again; the account as it begins."""
    async with asyncio.timeout(HANGS_S):
        while True:
            try:
                await ask(quotas, whose)
            except Unavailable:
                await asyncio.sleep(0.05)
            else:
                return await the_account(ledger.bus, CAP if whose == POOL else "key_1")


async def all_are_delivered(ledger: Ledger) -> bool:
    info = await ledger.bus.api(f"CONSUMER.INFO.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}")
    state = (await ledger.bus.api(f"STREAM.INFO.{subjects.USAGE_STREAM}"))["state"]
    return bool(info["delivered"]["stream_seq"] == state["last_seq"] and info["num_ack_pending"])


@WHOSE
async def test_it_counts_what_a_writer_holds(
    ledger: Ledger, nats_url: str, database_url: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A cap of 0.15 USD was passed: what was delivered counted as written.
    await ledger.apply_topology(ack_wait_s=NEVER_S)
    hindered = Hindered(monkeypatch)
    await ledger.publish([*spent_now(), request_intent("runs")])
    writer = hindered.hinder(RunningWriter(ledger, database_url, hold_intents_s=NEVER_S))
    await until(lambda: all_are_delivered(ledger))
    async with gateway(nats_url, database_url) as quotas:
        with pytest.raises(Unavailable):
            await ask(quotas, whose)
        hindered.let_go()
        assert (await begun(quotas, ledger, whose)).spent_nano_usd == 700_000
    await writer.stop()


@WHOSE
async def test_it_counts_what_a_writer_held_that_died(
    ledger: Ledger, nats_url: str, database_url: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.apply_topology()
    hindered = Hindered(monkeypatch)
    await ledger.publish(spent_now())
    first = hindered.hinder(RunningWriter(ledger, database_url))
    await until(lambda: all_are_delivered(ledger))
    await first.die()
    second = RunningWriter(ledger, database_url)
    await ledger.publish([request_record("other")])
    async with gateway(nats_url, database_url) as quotas:
        assert (await begun(quotas, ledger, whose)).spent_nano_usd == 700_000
    await second.stop()


async def test_what_is_held_back_of_running_requests_keeps_it_from_nothing(
    ledger: Ledger, nats_url: str, database_url: str
) -> None:
    await ledger.apply_topology(ack_wait_s=NEVER_S)
    writers = [RunningWriter(ledger, database_url, hold_intents_s=NEVER_S) for _ in range(2)]
    intents = [request_intent(f"runs{number}") for number in range(5)]
    await ledger.publish([*intents, *spent_now(), *intents])

    async def only_intents_are_held() -> bool:
        return await ledger.has(7, 7) and await ledger.unfinished() == len(2 * intents)

    await until(only_intents_are_held)
    async with gateway(nats_url, database_url) as quotas:
        assert (await begun(quotas, ledger, "key")).spent_nano_usd == 700_000
        await ledger.publish([request_intent("later")])

        async def only_that_is_held() -> bool:
            return await ledger.unfinished() == 1

        await until(only_that_is_held)
    for writer in writers:
        await writer.stop()


async def test_it_begins_beside_writers_of_an_older_release(
    ledger: Ledger, nats_url: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold intents back for their usual time, whatever they are asked for, and a gateway waits for longer."""
    held_s = LedgerSettings.model_fields["hold_intents_s"].default
    assert held_s + 1 < LEDGER_LIMIT_S

    def deaf(*_: Any) -> None:
        pass

    monkeypatch.setattr(LedgerWriter, "_on_wanted", deaf, raising=False)
    await ledger.apply_topology(ack_wait_s=NEVER_S)
    writer = RunningWriter(ledger, database_url, hold_intents_s=0.2)
    await ledger.publish([request_intent("runs"), *spent_now()])
    async with gateway(nats_url, database_url) as quotas:
        assert (await begun(quotas, ledger, "key")).spent_nano_usd == 700_000
    await writer.stop()


async def test_a_wish_that_nobody_can_read_ends_no_writer(ledger: Ledger, database_url: str) -> None:
    await ledger.apply_topology(ack_wait_s=NEVER_S)
    writer = RunningWriter(ledger, database_url)
    for payload in (b"", b"\xff", b"-1", b"9" * 5000, b"NaN"):
        await ledger.bus.publish(subjects.LEDGER_WANTED, payload)
    await ledger.publish(spent_now())
    await until(lambda: ledger.has(7, 7))
    await writer.stop()
