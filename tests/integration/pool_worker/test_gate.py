"""The gate of an expensive pool, with real queues and workers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg

from pool_worker.consumer import Gate, is_behind
from pool_worker.settings import GateSettings, WorkerSettings
from protocol import job as m
from protocol import subjects
from protocol.nats.bus import Bus
from tests.integration.pool_worker.playing_gateway import (
    MODEL,
    Attempt,
    PlayingGateway,
    running_worker,
    settings_for,
)
from tests.integration.pool_worker.worker_process import start_process
from tests.waiting import HANGS_S, until


async def test_one_job_above_the_limit_is_a_backlog(gateway: PlayingGateway) -> None:
    gate = GateSettings(backlog_jobs=2)
    for lane in ("low", "low", "low", "h0", "resume"):
        await gateway.publish(gateway.job(), lane=lane)
    assert not await is_behind(gateway.bus, MODEL, gate)
    await gateway.publish(gateway.job(), lane="h6")
    assert await is_behind(gateway.bus, MODEL, gate)
    assert not await is_behind(gateway.bus, "another", gate)


async def test_a_job_that_waits_too_long_counts_in_any_lane_except_batch(gateway: PlayingGateway) -> None:
    gate = GateSettings(oldest_s=0.1)
    await gateway.publish(gateway.job(), lane="low")
    await asyncio.sleep(0.15)
    assert not await is_behind(gateway.bus, MODEL, gate)
    await gateway.publish(gateway.job(), lane="h6")
    assert not await is_behind(gateway.bus, MODEL, GateSettings(oldest_s=HANGS_S))
    async with asyncio.timeout(HANGS_S):
        while not await is_behind(gateway.bus, MODEL, gate):
            await asyncio.sleep(0.01)


class Playing:
    """A gate with scripted peers."""

    def __init__(self, bus: Bus, settings: GateSettings | None) -> None:
        self.changed: Callable[[], None] = lambda: None
        self.is_cheap_there = True
        self.peers = SimpleNamespace(is_informed=True, cheaper_serving=lambda _model, _tier: self.is_cheap_there)
        self.peers.on_change = lambda callback: setattr(self, "changed", callback)
        self.opened = 0
        peers: Any = self.peers
        self.gate = Gate(settings, bus, peers, tier="on-demand", models=(MODEL,), on_open=self._on_open)

    def _on_open(self) -> None:
        self.opened += 1

    async def until_it_is(self, is_open: bool) -> None:
        async with asyncio.timeout(HANGS_S):
            while self.gate.is_open(MODEL) != is_open:
                await asyncio.sleep(0.005)


@pytest.fixture
async def playing(gateway: PlayingGateway) -> AsyncIterator[Playing]:
    playing = Playing(gateway.bus, GateSettings(backlog_jobs=0))
    running = asyncio.create_task(playing.gate.run())
    yield playing
    running.cancel()


async def test_the_gate_opens_when_the_cheaper_tier_leaves_and_closes_when_it_returns(playing: Playing) -> None:
    assert not playing.gate.is_open(MODEL)
    for is_cheap_there in (False, True, False):
        playing.is_cheap_there = is_cheap_there
        playing.changed()
        await playing.until_it_is(not is_cheap_there)
    assert playing.opened == 2


async def test_the_gate_opens_for_a_backlog_and_closes_afterwards(playing: Playing, gateway: PlayingGateway) -> None:
    await gateway.publish(gateway.job())
    await playing.until_it_is(True)
    await gateway.bus.api("STREAM.PURGE.RQ")
    await playing.until_it_is(False)


async def test_the_gate_stays_closed_until_all_heartbeats_have_arrived(playing: Playing) -> None:
    playing.is_cheap_there, playing.peers.is_informed = False, False
    for _ in range(3):
        playing.changed()
        await asyncio.sleep(0.01)
    assert not playing.gate.is_open(MODEL)
    playing.peers.is_informed = True
    await playing.until_it_is(True)


async def test_without_settings_there_is_no_gate(gateway: PlayingGateway) -> None:
    playing = Playing(gateway.bus, None)
    await playing.gate.run()
    assert playing.gate.is_open(MODEL)


# --- two tiers --------------------------------------------------------------------------------------------------------


def pool(url: str, worker_id: str, tier: str, gate: GateSettings | None = None, **engine: Any) -> WorkerSettings:
    settings = settings_for(url, worker_id=worker_id, drain_s=0.0, **engine)
    return settings.model_copy(update={"tier": tier, "gate": gate})


def worker_of(gateway: PlayingGateway, attempt: Attempt) -> str:
    accepted = gateway.frames[attempt][0]
    assert isinstance(accepted, m.Accepted)
    return accepted.worker_id


async def ask(gateway: PlayingGateway, jobs: int) -> set[str]:
    """Run some jobs one after another; return the worker of each."""
    attempts = [await gateway.ask(max_tokens=2) for _ in range(jobs)]
    await gateway.end_of_all(attempts)
    return {worker_of(gateway, attempt) for attempt in attempts}


async def test_an_expensive_pool_takes_over_from_a_killed_cheap_one_and_yields_again(
    gateway: PlayingGateway, nats_url: str
) -> None:
    process = start_process(pool(nats_url, "cheap", "spot"))
    try:
        await until(lambda: process.said("ready\n"))
        async with running_worker(pool(nats_url, "expensive", "on-demand", GateSettings(backlog_jobs=50))):
            assert await ask(gateway, 30) == {"cheap"}
            process.kill()
            assert await ask(gateway, 10) == {"expensive"}
            async with running_worker(pool(nats_url, "cheap2", "spot")):
                while await ask(gateway, 1) == {"expensive"}:
                    pass
                assert await ask(gateway, 30) == {"cheap2"}
    finally:
        process.kill()


async def test_an_expensive_pool_helps_with_a_backlog(gateway: PlayingGateway, nats_url: str) -> None:
    async with (
        running_worker(pool(nats_url, "cheap", "spot", max_sequences=1, inter_token_s=0.02)),
        running_worker(pool(nats_url, "expensive", "on-demand", GateSettings(backlog_jobs=3))),
    ):
        assert await ask(gateway, 1) == {"cheap"}
        long = [await gateway.ask(max_tokens=1000, ignore_eos=True)]
        await gateway.tokens_of(long[0], 1)
        few = [await gateway.ask(max_tokens=2) for _ in range(3)]
        assert await gateway.queued() == 3
        many = [await gateway.ask(max_tokens=2) for _ in range(5)]
        await gateway.end_of_all(few + many)
        assert {worker_of(gateway, attempt) for attempt in few + many} == {"expensive"}


async def test_a_resumed_job_bypasses_a_closed_gate_after_the_cheap_worker_failed(
    gateway: PlayingGateway, nats_url: str
) -> None:
    async with (
        running_worker(pool(nats_url, "cheap", "spot")),
        running_worker(pool(nats_url, "expensive", "on-demand", GateSettings(backlog_jobs=50))),
    ):
        assert await ask(gateway, 1) == {"cheap"}
        for number in range(10):
            job = gateway.job(attempt=2, request_id=f"resumed{number}", avoid=("cheap",), max_tokens=2)
            attempt = await gateway.publish(job, lane=subjects.RESUME_LANE)
            await gateway.end_of_all([attempt])
            assert worker_of(gateway, attempt) == "expensive"


async def test_a_closed_gate_offers_no_capacity(gateway: PlayingGateway, nats_url: str) -> None:
    """Otherwise gateways would admit callers who will not wait, for capacity that stays unused."""
    free: asyncio.Queue[int] = asyncio.Queue()

    async def note(message: Msg) -> None:
        if message.data:
            free.put_nowait(m.decode_heartbeat(message.data).free_sequences)

    async def until_free(places: int) -> None:
        async with asyncio.timeout(HANGS_S):
            while await free.get() != places:
                pass

    await gateway.bus.subscribe(subjects.heartbeat_subject("expensive"), note)
    async with running_worker(pool(nats_url, "expensive", "on-demand", GateSettings(backlog_jobs=50), max_sequences=7)):
        async with running_worker(pool(nats_url, "cheap", "spot")):
            await until_free(0)
        await until_free(7)
