"""Many jobs, a dying queue server, a dying engine, a dying process."""

import asyncio
import random
import signal

import pytest
from msgspec import structs

from protocol import job as m
from protocol.errors import ErrorCode
from tests.integration.pool_worker.playing_gateway import (
    Attempt,
    PlayingGateway,
    running_worker,
    settings_for,
)
from tests.integration.pool_worker.worker_process import finish, start_process
from tests.nats_server import NatsServer
from tests.waiting import until


class Held:
    """Counts, from the frames, the accepted jobs of a worker that have not ended, and their maximum."""

    def __init__(self, gateway: PlayingGateway, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.now: dict[str, set[str]] = {}
        self.most_sequences = self.most_jobs = 0
        gateway.loses = self.see

    def see(self, frame: m.Frame) -> bool:
        held = self.now.setdefault("", set())
        if isinstance(frame, m.Accepted):
            held.add(frame.request_id)
        elif not isinstance(frame, m.Tokens):
            held.discard(frame.request_id)
        self.most_jobs = max(self.most_jobs, len(held))
        self.most_sequences = max(self.most_sequences, sum(self.sizes[id_] for id_ in held))
        return False


async def test_a_burst_is_pulled_only_into_free_slots(gateway: PlayingGateway, nats_url: str) -> None:
    jobs = [gateway.job(f"p{i}", max_tokens=5, ignore_eos=True) for i in range(200)]
    held = Held(gateway, {job.request_id: 1 for job in jobs})
    queued, later = jobs[:100], jobs[100:]
    for job in queued:
        await gateway.publish(job)
    async with running_worker(settings_for(nats_url, max_sequences=7, inter_token_s=0.001)):
        await gateway.end_of_all((job.request_id, 1) for job in queued)
        # Now the pulls are parked at the server.
        await asyncio.gather(*map(gateway.publish, later))
        await gateway.end_of_all((job.request_id, 1) for job in later)
    assert held.most_jobs == 7


async def test_a_burst_of_mixed_sizes_leaves_at_most_one_waiting(gateway: PlayingGateway, nats_url: str) -> None:
    chance = random.Random(7)
    # KV for about two average jobs, so that KV is the limit, and sequences for the largest.
    jobs = [
        gateway.job(f"p{i}", n=chance.randint(1, 4), max_tokens=chance.randint(1, 60), ignore_eos=True)
        for i in range(150)
    ]
    held = Held(gateway, {job.request_id: job.sampling.n for job in jobs})
    for job in jobs:
        await gateway.publish(job)
    settings = settings_for(nats_url, max_sequences=6, max_kv_tokens=400, max_model_len=200)
    async with running_worker(settings):
        await gateway.end_of_all((job.request_id, 1) for job in jobs)
    # Running jobs fit into six sequences; one more job of up to four may wait for room.
    assert held.most_sequences <= 6 + 4


async def test_a_thousand_jobs_over_two_workers_are_each_run_once(gateway: PlayingGateway, nats_url: str) -> None:
    chance = random.Random(3)
    async with (
        running_worker(settings_for(nats_url, worker_id="w1", max_sequences=32, faults_from_prompt=True)),
        running_worker(settings_for(nats_url, worker_id="w2", max_sequences=32, faults_from_prompt=True)),
    ):
        attempts: list[Attempt] = []
        for i in range(1000):
            prompt = f"p{i}" + chance.choice(["", "", "", "[[fail after=3]]"])
            attempts.append(await gateway.ask(prompt, max_tokens=chance.randint(1, 12), n=chance.choice([1, 1, 2])))
            if chance.random() < 0.1 and (accepted := gateway.frames.get(chance.choice(attempts))):
                await gateway.control(accepted[0].worker_id, m.Cancel(*attempts[-1]))  # type: ignore[union-attr]
        await gateway.end_of_all(attempts)
        await gateway.wait_until_queue_is_empty()
        await gateway.wait(lambda: len(gateway.records) >= 1000)
    assert await gateway.stored_attempts() == 1000
    made = {
        id_: sum(len(f.token_ids) for f in frames if isinstance(f, m.Tokens)) for id_, frames in gateway.frames.items()
    }
    assert {(record.request_id, 1): record.completion_tokens for record in gateway.records} == made
    assert (gateway.gaps, gateway.repeated) == (0, 0)
    assert {record.worker_id for record in gateway.records} == {"w1", "w2"}


async def test_a_worker_that_drains_during_a_burst_loses_no_job(gateway: PlayingGateway, nats_url: str) -> None:
    """Jobs on their way to a draining worker come back at once, without a second delivery."""
    jobs = [gateway.job(f"p{i}", max_tokens=6, ignore_eos=True) for i in range(300)]
    places = {"max_sequences": 16, "inter_token_s": 0.003}
    async with (
        running_worker(settings_for(nats_url, worker_id="w1", drain_s=0.0, **places)) as w1_stop,
        running_worker(settings_for(nats_url, worker_id="w2", **places)),
    ):
        publishing = asyncio.gather(*map(gateway.publish, jobs))
        await gateway.wait(lambda: len(gateway.frames) > 60)
        w1_stop.request()
        await publishing
        ends = [await gateway.end_of((job.request_id, 1)) for job in jobs]
        failures = [end for end in ends if isinstance(end, m.Failed)]
        handed_back = {end.request_id for end in failures}
        again = [
            await gateway.publish(structs.replace(job, attempt=2)) for job in jobs if job.request_id in handed_back
        ]
        await gateway.end_of_all(again)
    assert {end.code for end in failures} == {ErrorCode.WORKER_DRAINING}
    assert all(isinstance(gateway.last(attempt), m.Finished) for attempt in again)
    assert await gateway.queued() == 0


async def test_all_jobs_end_despite_a_queue_server_restart(gateway: PlayingGateway, nats_server: NatsServer) -> None:
    """The gateway's part of the recovery: recreate the streams, republish unaccepted jobs, ask for lost frames."""
    jobs = [gateway.job(f"p{i}", max_tokens=40, ignore_eos=True) for i in range(120)]
    attempts = [(job.request_id, 1) for job in jobs]

    async def recover() -> None:
        await gateway.apply_topology()
        for job in jobs:
            if (job.request_id, 1) not in gateway.frames:
                await gateway.publish(job)

    async def ask_after_silent_ones() -> None:
        while True:
            await asyncio.sleep(0.5)
            if not gateway.bus.connected:
                continue
            for attempt in attempts:
                if attempt in gateway.frames and not gateway.is_over(attempt):
                    await gateway.ask_again("w1", attempt)

    gateway.bus.on_reconnect(recover)
    asking = asyncio.create_task(ask_after_silent_ones())
    async with running_worker(settings_for(nats_server.url, max_sequences=16, inter_token_s=0.005)):
        for job in jobs:
            await gateway.publish(job)
        await gateway.wait(lambda: sum(map(gateway.is_over, attempts)) > 20)
        nats_server.kill()
        nats_server.start()
        await gateway.end_of_all(attempts)
        asking.cancel()
        await gateway.wait_until_queue_is_empty()
    assert all(len(gateway.token_ids(attempt)) == 40 for attempt in attempts)
    assert await gateway.stored_attempts() == len(jobs)


# --- processes --------------------------------------------------------------------------------------------------------


async def test_a_lost_engine_hands_its_jobs_back_and_ends_the_process(gateway: PlayingGateway, nats_url: str) -> None:
    process = start_process(settings_for(nats_url, faults_from_prompt=True, inter_token_s=0.01))
    try:
        others = [await gateway.ask(f"p{i}", max_tokens=2000, ignore_eos=True) for i in range(3)]
        for other in others:
            await gateway.tokens_of(other, 2)
        crashing = await gateway.ask("[[crash after=4]]")
        failures = [await gateway.end_of(attempt) for attempt in (*others, crashing)]
        code, log = await finish(process)
    finally:
        process.kill()
    assert all(isinstance(f, m.Failed) and f.retryable and f.code == ErrorCode.ENGINE_DIED for f in failures)
    assert len(gateway.token_ids(crashing)) == 4
    assert await gateway.stored_attempts() == 4
    assert await gateway.queued() == 0
    assert code == 1
    assert "the engine died; handing back 4 jobs: scripted crash after 4 tokens" in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_the_process(gateway: PlayingGateway, nats_url: str, number: signal.Signals) -> None:
    process = start_process(settings_for(nats_url, inter_token_s=0.01))
    try:
        attempt = await gateway.ask(max_tokens=50, ignore_eos=True)
        await gateway.tokens_of(attempt, 1)
        process.send_signal(number)
        assert isinstance(await gateway.end_of(attempt), m.Finished)
        code, log = await finish(process)
    finally:
        process.kill()
    assert code == 0, log
    assert "Traceback" not in log


async def test_a_signal_ends_a_process_that_waits_for_a_gateway(nats_url: str) -> None:
    process = start_process(settings_for(nats_url))
    try:
        await until(lambda: process.said("waiting for the consumer scripted=2Ftest=2Ev1_resume"))
        process.terminate()
        code, log = await finish(process)
    finally:
        process.kill()
    assert code == 0, log


async def test_a_signal_ends_a_process_that_waits_for_the_queue_server(nats_server: NatsServer) -> None:
    nats_server.stop()
    process = start_process(settings_for(nats_server.url))
    try:
        await until(lambda: process.said("NATS: [Errno 111]"))
        process.terminate()
        code, log = await finish(process)
    finally:
        process.kill()
    assert code == 0, log


async def test_a_killed_workers_jobs_are_left_to_the_gateway(gateway: PlayingGateway, nats_url: str) -> None:
    process = start_process(settings_for(nats_url, faults_from_prompt=True, inter_token_s=0.01))
    try:
        attempt = await gateway.ask("[[exit after=6]]")
        code, _ = await finish(process)
    finally:
        process.kill()
    assert code == 137
    assert 0 < len(gateway.token_ids(attempt)) <= 6
    assert not gateway.is_over(attempt)
    assert await gateway.queued() == 0  # it was accepted, so only its gateway knows about it
