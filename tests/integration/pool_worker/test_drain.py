"""A drain: jobs that fit end here, the rest go to other workers, at once or at the last moment."""

import asyncio
import signal
from typing import Any

import pytest
from nats.aio.msg import Msg

from pool_worker.drain import HAND_BACK_MARGIN_S
from pool_worker.worker import FORCED_FLUSH_LIMIT_S
from protocol import job as m
from protocol import subjects
from protocol.errors import ErrorCode
from protocol.nats.bus import Bus
from tests.integration.pool_worker.playing_gateway import Attempt, PlayingGateway, running_worker, settings_for
from tests.integration.pool_worker.worker_process import finish, start_process
from tests.nats_server import NatsServer
from tests.waiting import HANGS_S

SLOW: dict[str, Any] = {"inter_token_s": 0.01}
LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}


async def heartbeat_of(gateway: PlayingGateway, worker_id: str, *, draining: bool) -> asyncio.Event:
    """Return an event that is set by the next such heartbeat."""
    seen = asyncio.Event()

    async def look(message: Msg) -> None:
        if message.data and m.decode_heartbeat(message.data).draining == draining:
            seen.set()

    await gateway.bus.subscribe(subjects.heartbeat_subject(worker_id), look)
    await gateway.bus.client.flush()
    return seen


def is_handed_back(frame: m.Frame) -> bool:
    return isinstance(frame, m.Failed) and frame.code == ErrorCode.WORKER_DRAINING and frame.retryable


async def test_jobs_that_fit_end_here_and_others_go_to_another_worker_at_once(
    gateway: PlayingGateway, nats_url: str
) -> None:
    async with running_worker(settings_for(nats_url, drain_s=10.0, **SLOW)) as stop:
        short, long = await gateway.ask(max_tokens=60, ignore_eos=True), await gateway.ask("another", **LONG)
        for attempt in (short, long):
            await gateway.tokens_of(attempt, 3)
        async with running_worker(settings_for(nats_url, worker_id="w2", **SLOW)):
            stop.request()
            assert is_handed_back(await gateway.end_of(long))
            assert not gateway.is_over(short)
            assert isinstance(await gateway.end_of(short), m.Finished)
    await gateway.wait(lambda: bool(gateway.records))
    assert {record.worker_id for record in gateway.records} == {"w1"}


async def test_without_another_worker_jobs_run_until_near_the_limit(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, drain_s=10.0, **SLOW)) as stop:
        attempt = await gateway.ask(**LONG)
        await gateway.tokens_of(attempt, 3)
        draining = await heartbeat_of(gateway, "w1", draining=True)
        stop.request()
        await asyncio.wait_for(draining.wait(), HANGS_S)
        await gateway.tokens_of(attempt, len(gateway.token_ids(attempt)) + 5)
        assert not gateway.is_over(attempt)
        stop.request(HAND_BACK_MARGIN_S + 0.1)
        failed = await gateway.end_of(attempt)
    assert is_handed_back(failed)
    assert isinstance(failed, m.Failed)
    assert failed.completion_tokens == len(gateway.token_ids(attempt))


async def test_a_worker_that_joins_during_a_drain_gets_the_jobs(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, drain_s=30.0, **SLOW)) as stop:
        attempt = await gateway.ask(**LONG)
        await gateway.tokens_of(attempt, 3)
        draining = await heartbeat_of(gateway, "w1", draining=True)
        stop.request()
        await asyncio.wait_for(draining.wait(), HANGS_S)
        async with running_worker(settings_for(nats_url, worker_id="w2", **SLOW)):
            assert is_handed_back(await gateway.end_of(attempt))


async def test_jobs_without_a_token_are_handed_back_at_once(gateway: PlayingGateway, nats_url: str) -> None:
    """Neither a job that waits for room nor, if another worker serves the model, one without a first token."""
    slow_start = {"ttft_s": 30.0, **SLOW}
    async with (
        running_worker(settings_for(nats_url, worker_id="w1", max_sequences=4, **slow_start)) as stop,
        running_worker(settings_for(nats_url, worker_id="w2", max_sequences=4, **slow_start)) as other_stop,
    ):
        attempts = [await gateway.ask(f"p{i}", n=3) for i in range(4)]
        for attempt in attempts:
            await gateway.wait(lambda attempt=attempt: attempt in gateway.frames)  # type: ignore[misc]
        workers = {attempt: gateway.frames[attempt][0].worker_id for attempt in attempts}  # type: ignore[union-attr]
        stop.request()
        for attempt in [attempt for attempt in attempts if workers[attempt] == "w1"]:
            assert is_handed_back(await gateway.end_of(attempt))
        assert not any(gateway.is_over(attempt) for attempt in attempts if workers[attempt] == "w2")
        other_stop.request(0.0)


async def test_a_second_signal_hands_everything_back_at_once(gateway: PlayingGateway, nats_url: str) -> None:
    process = start_process(settings_for(nats_url, drain_s=50.0, **SLOW))
    try:
        attempts: list[Attempt] = [await gateway.ask(f"p{i}", **LONG) for i in range(8)]
        for attempt in attempts:
            await gateway.tokens_of(attempt, 3)
        draining = await heartbeat_of(gateway, "w1", draining=True)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(draining.wait(), HANGS_S)
        assert not any(map(gateway.is_over, attempts))
        process.send_signal(signal.SIGTERM)
        ends = [await gateway.end_of(attempt) for attempt in attempts]
        code, log = await finish(process)
    finally:
        process.kill()
    assert code == 0, log
    assert all(map(is_handed_back, ends))
    assert await gateway.stored_attempts() == 8


async def test_a_second_signal_does_not_wait_for_the_queue_server(
    gateway: PlayingGateway, nats_server: NatsServer
) -> None:
    process = start_process(settings_for(nats_server.url, drain_s=50.0, **SLOW))
    try:
        await gateway.tokens_of(await gateway.ask(**LONG), 3)
        draining = await heartbeat_of(gateway, "w1", draining=True)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(draining.wait(), HANGS_S)
        nats_server.kill()
        process.send_signal(signal.SIGTERM)
        code, log = await finish(process)
    finally:
        process.kill()
    assert code == 0, log
    assert f"not stored within {FORCED_FLUSH_LIMIT_S:g} s" in log
    assert "1 records" in log


async def test_all_last_frames_leave_before_the_connection_closes(gateway: PlayingGateway, nats_url: str) -> None:
    process = start_process(settings_for(nats_url, drain_s=0.0, inter_token_s=0.002))
    try:
        attempts = [await gateway.ask(f"p{i}", **LONG) for i in range(64)]
        for attempt in attempts:
            await gateway.tokens_of(attempt, 3)
        process.send_signal(signal.SIGTERM)
        ends = [await gateway.end_of(attempt) for attempt in attempts]
        code, log = await finish(process)
    finally:
        process.kill()
    assert code == 0, log
    for attempt, end in zip(attempts, ends, strict=True):
        assert isinstance(end, m.Failed)
        assert is_handed_back(end)
        assert end.completion_tokens == len(gateway.token_ids(attempt))
    assert gateway.gaps == 0


async def test_jobs_delivered_to_a_draining_worker_stay_in_the_queue(gateway: PlayingGateway, nats_url: str) -> None:
    """They keep all their attempts: another worker, present or later, takes the same message."""
    async with running_worker(settings_for(nats_url, drain_s=30.0, **SLOW)) as stop:
        running = await gateway.ask(**LONG)
        await gateway.tokens_of(running, 1)
        stop.request()  # its pulls are still parked at the server
        late = [await gateway.ask(f"p{i}", max_tokens=3) for i in range(5)]
        await gateway.control("w1", m.Cancel(*running))
        await gateway.end_of(running)
    assert not any(attempt in gateway.frames for attempt in late)
    async with running_worker(settings_for(nats_url, worker_id="w2")):
        for attempt in late:
            assert isinstance(await gateway.end_of(attempt), m.Finished)


# --- avoided workers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["on-demand", "spot"])
async def test_a_job_that_failed_here_goes_to_another_worker(gateway: PlayingGateway, nats_url: str, tier: str) -> None:
    """Even if this worker is cheaper and would be served first again and again."""
    async with (
        running_worker(settings_for(nats_url, worker_id="w1").model_copy(update={"tier": tier})),
        running_worker(settings_for(nats_url, worker_id="w2")),
    ):
        heard = await heartbeat_of(gateway, "w2", draining=False)
        await asyncio.wait_for(heard.wait(), HANGS_S)  # by now the first knows about the second
        attempts = [await gateway.ask(f"p{i}", avoid=("w1",)) for i in range(5)]
        await gateway.end_of_all(attempts)
    await gateway.wait(lambda: bool(gateway.records))
    assert {record.worker_id for record in gateway.records} == {"w2"}


async def test_the_only_worker_runs_jobs_that_should_avoid_it(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url)):
        assert isinstance(await gateway.end_of(await gateway.ask(avoid=("w1",))), m.Finished)


async def test_a_job_that_only_reaches_avoided_workers_is_run(gateway: PlayingGateway, nats_url: str) -> None:
    async with (
        running_worker(settings_for(nats_url, worker_id="w1")),
        running_worker(settings_for(nats_url, worker_id="w2")),
    ):
        assert isinstance(await gateway.end_of(await gateway.ask(avoid=("w1", "w2"))), m.Finished)


# --- lost gateways ----------------------------------------------------------------------------------------------------


async def test_the_jobs_of_a_lost_gateway_are_stopped(gateway: PlayingGateway, nats_url: str) -> None:
    watchful = {"gateway_probe_period_s": 0.05, "gateway_gone_after_s": 0.3}
    other = PlayingGateway(await Bus.connect(nats_url, name="other"))
    other.reply_subject = subjects.frames_subject("g2")
    await other.start()
    async with running_worker(settings_for(nats_url, max_sequences=2, **SLOW).model_copy(update=watchful)):
        mine = await gateway.ask(request_id="mine", **LONG)
        orphan = await other.ask(request_id="orphan", **LONG)
        await other.tokens_of(orphan, 1)
        await other.bus.close()
        await gateway.wait(lambda: bool(gateway.records))
        assert isinstance(await gateway.end_of(await gateway.ask(max_tokens=3)), m.Finished)  # there is room again
        assert not gateway.is_over(mine)
        await gateway.control("w1", m.Cancel(*mine))
    lost = gateway.records[0]
    assert (lost.request_id, lost.outcome, lost.error_code) == ("orphan", "failed", ErrorCode.GATEWAY_LOST)
    assert lost.completion_tokens > 0


async def test_a_reconnecting_gateway_is_not_lost(gateway: PlayingGateway, nats_server: NatsServer) -> None:
    watchful = {"gateway_probe_period_s": 0.05, "gateway_gone_after_s": HANGS_S}  # it returns long before
    async with running_worker(settings_for(nats_server.url, **SLOW).model_copy(update=watchful)):
        attempt = await gateway.ask(max_tokens=300, ignore_eos=True)
        await gateway.tokens_of(attempt, 3)
        gateway.bus.on_reconnect(gateway.apply_topology)
        nats_server.kill()
        nats_server.start()
        while not gateway.is_over(attempt):
            await gateway.ask_again("w1", attempt)
            await asyncio.sleep(0.2)
    assert isinstance(gateway.last(attempt), m.Finished)
    assert len(gateway.token_ids(attempt)) == 300
