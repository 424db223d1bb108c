"""Controls that a gateway sends a running worker, and a worker's stop."""

import asyncio
import contextlib
from functools import partial
from typing import Any

import pytest

from pool_worker import executor
from protocol import job as m
from protocol.errors import BusError, ErrorCode
from tests.integration.pool_worker.playing_gateway import PlayingGateway, running_worker, settings_for

SLOW: dict[str, Any] = {"inter_token_s": 0.01}
LONG: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}


def has_more_repeated(gateway: PlayingGateway, than: int) -> bool:
    return gateway.repeated > than


async def test_a_canceled_job_ends_with_exact_counts_and_frees_its_slot(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, max_sequences=2, **SLOW)):
        attempt = await gateway.ask(n=2, **LONG)
        await gateway.tokens_of(attempt, 3)
        for _ in range(2):
            await gateway.control("w1", m.Cancel(*attempt))
        finished = await gateway.end_of(attempt)
        other = await gateway.end_of(await gateway.ask("another", n=2))
        await gateway.control("w1", m.Cancel(*attempt))
        await gateway.control("w1", m.Cancel("unknown", 1))
        assert isinstance(await gateway.end_of(await gateway.ask("a third")), m.Finished)
        await gateway.wait_until_queue_is_empty()
    assert isinstance(finished, m.Finished)
    assert finished.cancelled
    made = len(gateway.token_ids(attempt, 0)) + len(gateway.token_ids(attempt, 1))
    assert finished.completion_tokens == made
    assert isinstance(other, m.Finished)
    assert not other.cancelled
    await gateway.wait(lambda: any(record.request_id == attempt[0] for record in gateway.records))
    record = next(record for record in gateway.records if record.request_id == attempt[0])
    assert (record.outcome, record.completion_tokens) == ("cancelled", made)
    assert gateway.repeated == 0


async def test_a_job_waiting_in_the_worker_can_be_canceled(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, max_sequences=4, **SLOW)):
        running = await gateway.ask(n=3, **LONG)
        await gateway.tokens_of(running, 1)
        waiting = await gateway.ask("another", n=3, **LONG)  # pulled for the one free slot, but does not fit
        await gateway.wait(lambda: waiting in gateway.frames)
        await gateway.control("w1", m.Cancel(*waiting))
        finished = await gateway.end_of(waiting)
        assert isinstance(finished, m.Finished)
        assert (finished.cancelled, finished.completion_tokens) == (True, 0)
        assert isinstance(await gateway.end_of(await gateway.ask("a third", max_tokens=3)), m.Finished)
        await gateway.control("w1", m.Cancel(*running))
        await gateway.end_of(running)


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_cancel_may_race_with_the_prompts_arrival(
    gateway: PlayingGateway, nats_url: str, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Behave like asyncio.wait_for of Python 3.11: return the result that has just arrived, losing the cancellation."""
    is_fetching = asyncio.Event()

    async def get_object(*_: object) -> bytes:
        is_fetching.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if not is_there:
            raise BusError("no such object")
        return m.pack_token_ids([1])

    monkeypatch.setattr(executor, "get_object", get_object)
    async with running_worker(settings_for(nats_url, max_sequences=1)):
        attempt = await gateway.ask(prompt_object="p", prompt_ids=b"", prompt_tokens=1)
        await is_fetching.wait()
        await gateway.control("w1", m.Cancel(*attempt))
        finished = await gateway.end_of(attempt)
        assert isinstance(await gateway.end_of(await gateway.ask("another")), m.Finished)
    assert isinstance(finished, m.Finished)
    assert finished.cancelled
    assert len(gateway.frames[attempt]) == 2


async def test_lost_frames_are_sent_again(gateway: PlayingGateway, nats_url: str) -> None:
    lost: set[int] = {0, 3, 4, 9}

    def loses_once(frame: m.Frame) -> bool:
        if frame.seq in lost:
            lost.discard(frame.seq)
            return True
        return False

    gateway.loses = loses_once
    async with running_worker(settings_for(nats_url, **SLOW)):
        attempt = await gateway.ask(max_tokens=20, ignore_eos=True)
        finished = await gateway.end_of(attempt)
    assert gateway.gaps
    assert not lost
    assert isinstance(finished, m.Finished)
    assert len(gateway.token_ids(attempt)) == finished.completion_tokens == 20


async def test_an_ended_attempt_is_resent_and_an_unknown_one_is_reported(
    gateway: PlayingGateway, nats_url: str
) -> None:
    async with running_worker(settings_for(nats_url)):
        attempt = await gateway.ask(max_tokens=10)
        await gateway.end_of(attempt)
        before = gateway.frames.pop(attempt)
        await gateway.ask_again("w1", attempt)
        await gateway.end_of(attempt)
        assert gateway.frames[attempt] == before
        unknown = ("unknown", 4)
        await gateway.ask_again("w1", unknown)
        failed = await gateway.end_of(unknown)
    assert isinstance(failed, m.Failed)
    assert (failed.code, failed.seq, failed.retryable) == (ErrorCode.UNKNOWN_ATTEMPT, 0, True)


async def test_a_republished_attempt_is_not_run_twice(gateway: PlayingGateway, nats_url: str) -> None:
    """After the loss of a memory stream a gateway republishes every job that seems unaccepted."""
    async with running_worker(settings_for(nats_url, **SLOW)):
        job = gateway.job(max_tokens=30, ignore_eos=True)
        attempt = await gateway.publish(job)
        await gateway.tokens_of(attempt, 2)
        for when in ("running", "ended"):
            accepted_again = gateway.repeated
            await gateway.publish(job, message_id=f"{job.request_id} {when}")
            await gateway.wait(partial(has_more_repeated, gateway, accepted_again))
            await gateway.end_of(attempt)
        await gateway.wait_until_queue_is_empty()
    assert len(gateway.token_ids(attempt)) == 30
    await gateway.wait(lambda: bool(gateway.records))
    assert len(gateway.records) == 1


async def test_a_draining_worker_finishes_its_jobs_and_stops_pulling(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, max_sequences=2, **SLOW)) as stop:
        running = await gateway.ask(max_tokens=30, ignore_eos=True)
        await gateway.tokens_of(running, 1)
        stop.request()
        assert isinstance(await gateway.end_of(running), m.Finished)
    late = await gateway.ask("too late")
    assert await gateway.queued() == 1  # the job waits for another worker
    async with running_worker(settings_for(nats_url, worker_id="w2")):
        assert isinstance(await gateway.end_of(late), m.Finished)


async def test_a_job_that_does_not_end_in_time_is_handed_back(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, max_sequences=4, drain_s=0.1, **SLOW)) as stop:
        running = await gateway.ask(n=3, **LONG)
        await gateway.tokens_of(running, 1)
        waiting = await gateway.ask("another", n=3, **LONG)
        await gateway.wait(lambda: waiting in gateway.frames)
        stop.request()
        failures = [await gateway.end_of(attempt) for attempt in (running, waiting)]
    for failed in failures:
        assert isinstance(failed, m.Failed)
        assert (failed.code, failed.retryable) == (ErrorCode.WORKER_DRAINING, True)
    assert failures[0].completion_tokens == sum(len(gateway.token_ids(running, i)) for i in range(3)) > 0  # type: ignore[union-attr]
    assert await gateway.queued() == 0
    assert await gateway.stored_attempts() == 2
