"""A job's path through the worker: queue → engine → frames → record."""

import asyncio
import itertools
import time
from collections import Counter
from typing import Any

import msgspec
import pytest
from msgspec import structs
from nats.aio.msg import Msg
from nats.js.errors import KeyNotFoundError

from pool_worker.engines.scripted import TOO_COMPLEX
from protocol import job as m
from protocol import subjects
from protocol.errors import ErrorCode
from protocol.generation import Grammar
from protocol.nats import objects
from protocol.nats.pull import Delivery, PullConsumer
from tests.integration.pool_worker.playing_gateway import (
    MODEL,
    TOKENIZER,
    PlayingGateway,
    running_worker,
    settings_for,
)
from tests.waiting import HANGS_S

SLOW: dict[str, Any] = {"inter_token_s": 0.01}


async def test_a_job_is_answered_acknowledged_and_recorded(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url)):
        attempt = await gateway.ask(max_tokens=8, ignore_eos=True)
        finished = await gateway.end_of(attempt)
        await gateway.wait_until_queue_is_empty()
    accepted = gateway.frames[attempt][0]
    assert isinstance(accepted, m.Accepted)
    assert (accepted.worker_id, accepted.pool) == ("w1", "test")
    assert isinstance(finished, m.Finished)
    assert finished.completion_tokens == 8 == len(gateway.token_ids(attempt))
    assert finished.prompt_tokens == len(TOKENIZER.encode("hello").ids)
    assert gateway.tokens(attempt)[-1].finish_reason == "length"
    assert gateway.text(attempt) == TOKENIZER.decode(gateway.token_ids(attempt))
    await gateway.wait(lambda: bool(gateway.records))
    (record,) = gateway.records
    assert (record.outcome, record.completion_tokens, record.prompt_tokens) == ("ok", 8, finished.prompt_tokens)
    assert record.ttft_ms == finished.ttft_ms <= record.total_ms
    assert finished.timings is not None
    timings = (record.engine_queue_ms, record.prefill_ms, record.decode_ms, record.preemptions)
    assert msgspec.structs.astuple(finished.timings) == timings
    assert 0 < finished.timings.prefill_ms + finished.timings.decode_ms < record.total_ms


async def test_heartbeats_report_the_engines_statistics(gateway: PlayingGateway, nats_url: str) -> None:
    beats: list[m.Heartbeat] = []

    async def on_beat(message: Msg) -> None:
        beats.extend([m.decode_heartbeat(message.data)] if message.data else [])

    await gateway.bus.subscribe(subjects.HEARTBEATS, on_beat)
    async with running_worker(settings_for(nats_url, max_sequences=1, inter_token_s=0.01)):
        jobs = [await gateway.ask(max_tokens=60, ignore_eos=True) for _ in range(2)]
        await gateway.end_of_all(jobs)
        async with asyncio.timeout(HANGS_S):
            while beats[-1].running:
                await asyncio.sleep(0.02)
    stats = [beat.stats for beat in beats if beat.stats is not None]
    assert len(stats) == len(beats)
    assert max(beat.running for beat in stats) == 1
    assert max(beat.kv_usage for beat in stats) > 0
    assert (stats[-1].running, stats[-1].waiting, stats[-1].generated_tokens) == (0, 0, 120)
    assert stats[-1].prompt_tokens == 2 * len(TOKENIZER.encode("hello").ids)
    assert sum(stats[-1].inter_token_s.counts) == 2 * 59
    assert all(one.generated_tokens <= next_.generated_tokens for one, next_ in itertools.pairwise(stats))


async def test_frames_come_in_order_and_one_message_per_step(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, **SLOW)):
        attempts = [await gateway.ask(f"prompt {i}", max_tokens=20, ignore_eos=True) for i in range(32)]
        await gateway.end_of_all(attempts)
    assert (gateway.gaps, gateway.repeated) == (0, 0)
    assert all(len(gateway.token_ids(attempt)) == 20 for attempt in attempts)
    # 640 tokens in about 20 steps plus arrivals; never a message per token
    assert sum(len(step.frames) for step in gateway.steps) == 32 * (1 + 20 + 1)
    assert len(gateway.steps) < 200


async def test_two_gateways_get_their_own_frames(gateway: PlayingGateway, nats_url: str) -> None:
    other = PlayingGateway(gateway.bus)
    other.reply_subject = subjects.frames_subject("g2")
    await other.start()
    async with running_worker(settings_for(nats_url)):
        mine = await gateway.ask("hello", request_id="mine")
        others = await other.ask("hello", request_id="others")
        await gateway.end_of(mine)
        await other.end_of(others)
    assert (set(gateway.frames), set(other.frames)) == ({mine}, {others})


async def test_choices_and_logprobs_travel(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url)):
        attempt = await gateway.ask(n=3, logprobs=2, max_tokens=5, ignore_eos=True)
        finished = await gateway.end_of(attempt)
    assert isinstance(finished, m.Finished)
    assert finished.completion_tokens == 15
    for index in range(3):
        frames = gateway.tokens(attempt, index)
        logprobs = [entry for frame in frames for entry in frame.logprobs or ()]
        assert [entry.token_id for entry in logprobs] == gateway.token_ids(attempt, index)
        assert all(len(entry.top) == 2 for entry in logprobs)


async def test_a_resumed_job_continues_and_complete_choices_stay(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url)):
        whole = await gateway.ask(n=2, max_tokens=12, ignore_eos=True)
        await gateway.end_of(whole)
        first, second = gateway.tokens(whole, 0), gateway.tokens(whole, 1)
        ids, text = gateway.token_ids(whole, 0), "".join(frame.text for frame in first[:5])
        resume = (
            m.ResumePoint(0, m.pack_token_ids(ids[:5]), len(text)),
            m.ResumePoint(1, m.pack_token_ids(gateway.token_ids(whole, 1)), 99, second[-1].finish_reason),
        )
        rest = await gateway.ask(n=2, max_tokens=12, ignore_eos=True, attempt=2, request_id="r1", resume=resume)
        finished = await gateway.end_of(rest)
        all_done = tuple(m.ResumePoint(index, m.pack_token_ids(ids), 99, "length") for index in range(2))
        nothing = await gateway.ask(n=2, max_tokens=12, attempt=3, request_id="r1", resume=all_done)
        nothing_finished = await gateway.end_of(nothing)
    assert gateway.token_ids(rest, 0) == ids[5:]
    assert text + gateway.text(rest, 0) == gateway.text(whole, 0)
    assert gateway.tokens(rest, 1) == []
    assert isinstance(finished, m.Finished)
    assert finished.completion_tokens == 7
    assert isinstance(nothing_finished, m.Finished)
    assert (nothing_finished.completion_tokens, nothing_finished.cancelled) == (0, False)


async def test_a_prompt_by_reference_is_fetched(gateway: PlayingGateway, nats_url: str) -> None:
    packed = m.pack_token_ids(TOKENIZER.encode("hello").ids)
    await objects.put_object(gateway.bus, subjects.PROMPTS_BUCKET, "p1", packed)
    by_reference: dict[str, Any] = {"prompt_ids": b"", "prompt_tokens": len(packed) // 4}
    async with running_worker(settings_for(nats_url)):
        inline = await gateway.ask()
        attempt = await gateway.ask(prompt_object="p1", **by_reference)
        missing = await gateway.ask(prompt_object="p2", **by_reference)
        await gateway.end_of_all([inline, attempt])
        failed = await gateway.end_of(missing)
    assert gateway.text(attempt) == gateway.text(inline)
    assert isinstance(failed, m.Failed)
    assert (failed.code, failed.retryable) == (ErrorCode.INTERNAL_ERROR, True)


async def test_a_refused_request_fails_for_good_and_names_its_field(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url)):
        failed = await gateway.end_of(await gateway.ask(top_p=3.0))
        resumed = await gateway.end_of(await gateway.ask(top_p=3.0, request_id=failed.request_id, attempt=2))
    assert isinstance(failed, m.Failed)
    assert (failed.code, failed.param, failed.retryable) == (ErrorCode.INVALID_REQUEST, "top_p", False)
    assert isinstance(resumed, m.Failed)
    assert (resumed.code, resumed.retryable) == (ErrorCode.INVALID_REQUEST, True)  # another worker accepted it before
    await gateway.wait(lambda: len(gateway.records) >= 2)
    assert [(r.outcome, r.error_code) for r in gateway.records] == [("failed", ErrorCode.INVALID_REQUEST)] * 2


async def test_a_too_complex_grammar_is_not_retried(gateway: PlayingGateway, nats_url: str) -> None:
    grammar = Grammar("lark", TOO_COMPLEX, "guided_grammar")
    async with running_worker(settings_for(nats_url)):
        for attempt in (1, 2):  # even if another worker accepted it before
            failed = await gateway.end_of(await gateway.ask(grammar=grammar, request_id="r", attempt=attempt))
            assert isinstance(failed, m.Failed)
            assert (failed.code, failed.param) == (ErrorCode.GRAMMAR_TOO_COMPLEX, "guided_grammar")
            assert not failed.retryable


async def test_an_engine_error_fails_one_job_only(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, faults_from_prompt=True, **SLOW)):
        good = await gateway.ask("hello")
        failed = await gateway.end_of(await gateway.ask("[[fail after=3]]", n=2))
        assert isinstance(await gateway.end_of(good), m.Finished)
    assert isinstance(failed, m.Failed)
    assert (failed.code, failed.retryable) == (ErrorCode.ENGINE_ERROR, True)
    assert failed.completion_tokens >= 3


async def test_a_redelivered_job_is_run(gateway: PlayingGateway, nats_url: str) -> None:
    taken: asyncio.Queue[Delivery] = asyncio.Queue()
    consumer = subjects.job_consumer(MODEL, subjects.HIGH_LANES[0])
    frozen = PullConsumer(gateway.bus, subjects.INTERACTIVE_STREAM, consumer, taken.put, tier="spot")
    await frozen.start()
    await frozen.pull(1)
    attempt = await gateway.ask()
    assert (await taken.get()).deliveries == 1
    async with running_worker(settings_for(nats_url)):
        assert isinstance(await gateway.end_of(attempt), m.Finished)
        await gateway.wait_until_queue_is_empty()


async def test_a_job_is_off_the_queue_before_it_has_ended(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url, **SLOW)):
        attempt = await gateway.ask(max_tokens=2000, ignore_eos=True)
        await gateway.wait(lambda: attempt in gateway.frames)
        await gateway.wait_until_queue_is_empty()
        assert not gateway.is_over(attempt)
        await gateway.control("w1", m.Cancel(*attempt))


async def test_two_workers_with_the_same_attempt_both_leave_a_record(gateway: PlayingGateway, nats_url: str) -> None:
    """If an acknowledgement is lost, the gateway stops the second worker, which still records its work."""
    await gateway.apply_topology((MODEL, "alias"))
    w2 = settings_for(nats_url, worker_id="w2", **SLOW).model_copy(update={"models": ("alias",)})
    job = gateway.job(max_tokens=2000, ignore_eos=True)
    async with running_worker(settings_for(nats_url, **SLOW)), running_worker(w2):
        attempt = await gateway.publish(job)
        await gateway.tokens_of(attempt, 1)
        await gateway.publish(structs.replace(job, model="alias"), message_id="again")
        await gateway.wait(lambda: any(step.worker_id == "w2" for step in gateway.steps))
        for worker_id in ("w1", "w2"):
            await gateway.control(worker_id, m.Cancel(*attempt))
        await gateway.wait(lambda: len(gateway.records) == 2)
    assert {record.worker_id for record in gateway.records} == {"w1", "w2"}
    assert await gateway.stored_attempts() == 2


async def test_a_job_past_its_deadline_is_not_run(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url)):
        failed = await gateway.end_of(await gateway.ask(deadline_unix_ms=int(time.time() * 1000) - 1))
        await gateway.wait_until_queue_is_empty()
    assert isinstance(failed, m.Failed)
    assert (failed.code, failed.retryable) == (ErrorCode.DEADLINE_EXCEEDED, False)
    assert gateway.records == []


@pytest.mark.parametrize("payload", [b"", b"garbage", m.encode({"v": 99})])
async def test_an_undecodable_job_is_dropped_and_the_worker_continues(
    gateway: PlayingGateway, nats_url: str, payload: bytes
) -> None:
    async with running_worker(settings_for(nats_url)):
        await gateway.bus.publish_durable(
            subjects.job_subject(MODEL, subjects.HIGH_LANES[0]), payload, message_id="garbage"
        )
        await gateway.bus.publish(subjects.control_subject("w1"), payload)
        assert isinstance(await gateway.end_of(await gateway.ask()), m.Finished)
        await gateway.wait_until_queue_is_empty()


async def test_truncated_token_lists_fail_and_are_retryable(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url)):
        for fields in ({"prompt_ids": b"12345"}, {"resume": (m.ResumePoint(0, b"12345", 0),)}):
            failed = await gateway.end_of(await gateway.ask(**fields))
            assert isinstance(failed, m.Failed)
            assert (failed.code, failed.retryable) == (ErrorCode.INTERNAL_ERROR, True)


async def test_every_model_the_engine_serves_is_pulled(gateway: PlayingGateway, nats_url: str) -> None:
    models = (MODEL, "alias one", "alias/two")
    await gateway.apply_topology(models)
    settings = settings_for(nats_url, max_sequences=2).model_copy(update={"models": models})
    async with running_worker(settings):
        attempts = [await gateway.ask(f"p{i}", model=models[i % 3]) for i in range(60)]
        await gateway.end_of_all(attempts)
        for model in models:
            card = await objects.read_model_card(gateway.bus, model)
            assert card is not None
            assert card.model == model
    await gateway.wait(lambda: len(gateway.records) >= 20 * len(models))
    assert Counter(record.model for record in gateway.records) == dict.fromkeys(models, 20)


async def test_the_registry_shows_the_worker_as_long_as_it_lives(gateway: PlayingGateway, nats_url: str) -> None:
    bucket = await gateway.bus.client.jetstream().key_value(subjects.WORKERS_BUCKET)
    async with running_worker(settings_for(nats_url, max_sequences=7, inter_token_s=0.05)) as stop:
        attempt = await gateway.ask(n=3, max_tokens=40, ignore_eos=True)
        await gateway.tokens_of(attempt, 1)

        async def entry_with(running: int, *, draining: bool) -> m.Heartbeat:
            async with asyncio.timeout(HANGS_S):
                while True:
                    entry = await bucket.get("w1")
                    beat = m.decode_heartbeat(entry.value or b"")
                    if beat.running == running and beat.draining == draining:
                        return beat
                    await asyncio.sleep(0.05)

        beat = await entry_with(1, draining=False)
        assert (beat.max_sequences, beat.free_sequences, beat.models) == (7, 4, (MODEL,))
        stop.request()
        await entry_with(1, draining=True)
        await gateway.end_of(attempt)
    with pytest.raises(KeyNotFoundError):
        await bucket.get("w1")


async def test_a_deleted_consumer_is_found_again(gateway: PlayingGateway, nats_url: str) -> None:
    async with running_worker(settings_for(nats_url)):
        await gateway.end_of(await gateway.ask())
        name = subjects.job_consumer(MODEL, subjects.HIGH_LANES[0])
        await gateway.bus.api(f"CONSUMER.DELETE.{subjects.INTERACTIVE_STREAM}.{name}")
        await gateway.apply_topology()
        assert isinstance(await gateway.end_of(await gateway.ask("another")), m.Finished)


async def test_a_refusal_ends_an_attempt_whose_first_choice_was_complete(
    gateway: PlayingGateway, nats_url: str
) -> None:
    """A resumed attempt may be refused here although another worker accepted it; it must leave nothing behind."""
    complete = m.ResumePoint(0, m.pack_token_ids([300]), 1, "stop")
    async with running_worker(settings_for(nats_url, max_sequences=2)):
        failed = await gateway.end_of(await gateway.ask(n=2, top_p=3.0, resume=(complete,)))
        assert isinstance(failed, m.Failed)
        assert isinstance(await gateway.end_of(await gateway.ask(n=2)), m.Finished)  # the credit is returned
