"""Frames and workers that get lost: the caller sees a pause, nothing twice and nothing missing."""

import asyncio

import httpx
import openai
import pytest

from protocol import subjects
from protocol.bus import Bus
from protocol.messages import Accepted, Cancel, Resend, Tokens, unpack_token_ids
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Start, restart, until, until_async
from tests.integration.gateway.scripted_worker import Attempt, answer_hello
from tests.nats_server import NatsServer

HELLO = [{"role": "user", "content": "Hi"}]


async def stream_text(gateway: GatewayUnderTest) -> str:
    stream = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_lost_frames_are_sent_again(start_gateway: Start) -> None:
    gateway = await start_gateway()

    async def lossy(attempt: Attempt) -> None:
        await attempt.accept(lost=True)
        await attempt.tokens("a", (1,), lost=True)
        await attempt.tokens("b", (2,))
        await asyncio.sleep(0.3)  # more than one request to send again may be made
        await attempt.tokens("c", (3,), lost=True)
        await attempt.tokens("d", (4,), finish_reason="stop")
        await attempt.finish()

    worker = await gateway.add_worker(script=lossy)
    assert await stream_text(gateway) == "abcd"
    assert any(isinstance(control, Resend) for control in worker.controls)
    [record] = await gateway.records()
    assert (record.attempts, record.completion_tokens, record.outcome) == (1, 4, "ok")


async def test_a_lost_end_is_asked_for(start_gateway: Start) -> None:
    gateway = await start_gateway()

    async def end_in_silence(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("a", (1,))
        await attempt.tokens("b", (2,), finish_reason="stop", lost=True)
        await attempt.finish(lost=True)

    await gateway.add_worker(script=end_in_silence)
    assert await stream_text(gateway) == "ab"
    [record] = await gateway.records()
    assert (record.attempts, record.completion_tokens) == (1, 2)


async def test_retryable_failure_goes_on_where_it_stopped(start_gateway: Start) -> None:
    gateway = await start_gateway()

    async def fail_then_finish(attempt: Attempt) -> None:
        await attempt.accept()
        if attempt.job.attempt == 1:
            await attempt.tokens("Hel", (1, 2), index=0)
            await attempt.tokens("all", (5,), index=1, finish_reason="stop")
            await attempt.fail("worker_draining", "bye", retryable=True)
            return
        await attempt.tokens("lo", (3,), index=0, finish_reason="length")
        await attempt.finish()

    worker = await gateway.add_worker(script=fail_then_finish)
    raw = await gateway.client().chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, n=2)
    answer = raw.parse()
    assert [choice.message.content for choice in answer.choices] == ["Hello", "all"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "stop"]
    assert raw.headers["x-spillway-attempts"] == "2"
    first, second = worker.attempts[1].job.resume
    assert (first.index, unpack_token_ids(first.token_ids), first.text_chars) == (0, [1, 2], 3)
    assert first.finish_reason is None
    assert (second.index, unpack_token_ids(second.token_ids), second.finish_reason) == (1, [5], "stop")
    [record] = await gateway.records()
    assert (record.attempts, record.completion_tokens, record.outcome) == (2, 4, "ok")


async def test_a_dead_worker_is_a_pause(start_gateway: Start) -> None:
    """Its heartbeats stop in the middle of a stream; later it wakes up and its old frames are of no use to anybody."""
    gateway = await start_gateway()

    async def go_silent(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("one ", (1,))
        attempt.worker.stop_beating()
        await attempt.cancelled.wait()  # the gateway tells it even though it counts as dead
        await attempt.tokens("STALE", (9,))
        await attempt.finish()

    async def go_on(attempt: Attempt) -> None:
        await attempt.accept()
        await asyncio.sleep(0.1)  # let the stale frames come
        await attempt.tokens("two", (2,), finish_reason="stop")
        await attempt.finish()

    first = await gateway.add_worker("w1", script=go_silent)
    asking = asyncio.create_task(stream_text(gateway))
    await until(lambda: first.attempts and first.attempts[0].made_tokens)
    second = await gateway.add_worker("w2", script=go_on)
    await first._consumer.stop()  # or it might pull the second attempt too
    assert await asking == "one two"
    assert [attempt.job.attempt for attempt in (*first.attempts, *second.attempts)] == [1, 2]
    [record] = await gateway.records()
    assert (record.attempts, record.completion_tokens) == (2, 2)


async def test_a_worker_that_answers_no_probe_is_given_up(start_gateway: Start) -> None:
    """Heartbeats alone do not help a request whose worker has forgotten it."""
    gateway = await start_gateway()

    async def stall_once(attempt: Attempt) -> None:
        if attempt.job.attempt > 1:
            await answer_hello(attempt)
        else:
            await attempt.accept()

    worker = await gateway.add_worker(script=stall_once)
    worker.deaf = True
    assert await stream_text(gateway) == "Hello world"
    assert len([control for control in worker.controls if isinstance(control, Resend)]) == 3
    assert isinstance(worker.controls[-1], Cancel)


async def test_attempts_are_exhausted(start_gateway: Start) -> None:
    gateway = await start_gateway(max_attempts=3)

    async def fail(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.fail("engine_died", "boom", retryable=True)

    worker = await gateway.add_worker(script=fail)
    with pytest.raises(openai.APIStatusError) as caught:
        await gateway.client().chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.code == "attempts_exhausted"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "boom" in caught.value.message
    assert [attempt.job.attempt for attempt in worker.attempts] == [1, 2, 3]
    [record] = await gateway.records()
    assert (record.attempts, record.outcome, record.error_code) == (3, "failed", "attempts_exhausted")


async def test_frames_of_others_are_fenced_out(start_gateway: Start) -> None:
    """A second worker that runs the same attempt (the memory stream was lost, the job published again) is stopped."""
    gateway = await start_gateway()
    told: list[bytes] = []

    async def on_told(message: object) -> None:
        told.append(message.data)  # type: ignore[attr-defined]

    await gateway.bus.subscribe(subjects.control_subject("impostor"), on_told)

    async def beside_an_impostor(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("a", (1,))
        job, worker = attempt.job, attempt.worker
        worker.worker_id = "impostor"
        await worker.send(
            [
                Accepted(job.request_id, 1, 0, "impostor", "p", "p", "r", 0.0),
                Tokens(job.request_id, 1, 2, 0, (9,), "IMPOSTOR"),
            ],
            job.reply_subject,
        )
        worker.worker_id = "w1"
        await attempt.tokens("b", (2,), finish_reason="stop")
        await attempt.finish()

    await gateway.add_worker(script=beside_an_impostor)
    assert await stream_text(gateway) == "ab"
    await until(lambda: told)


async def test_queued_request_survives_the_loss_of_the_queue(start_gateway: Start, nats_server: NatsServer) -> None:
    gateway = await start_gateway()
    asking = asyncio.create_task(stream_text(gateway))
    await until_queued(gateway)
    await restart(nats_server, gateway.bus)  # the memory stream and all its jobs are gone
    await gateway.add_worker()
    assert await asking == "Hello world"
    [record] = await gateway.records()
    assert (record.outcome, record.completion_tokens) == ("ok", 2)


async def test_running_request_survives_a_restart_of_the_queue(start_gateway: Start, nats_server: NatsServer) -> None:
    """What the worker sends while the server is away may be lost; it is asked for afterwards."""
    gateway = await start_gateway()
    restarted = asyncio.Event()

    async def talk_into_the_void(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("a", (1,))
        await restarted.wait()
        await attempt.tokens("b", (2,), lost=True)
        await attempt.tokens("c", (3,), finish_reason="stop", lost=True)
        await attempt.finish(lost=True)

    worker = await gateway.add_worker(script=talk_into_the_void)
    asking = asyncio.create_task(stream_text(gateway))
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens)
    await restart(nats_server, gateway.bus)
    restarted.set()
    assert await asking == "abc"
    [record] = await gateway.records()
    assert (record.attempts, record.completion_tokens) == (1, 3)


async def test_a_record_outlasts_the_queue_server(start_gateway: Start, nats_server: NatsServer) -> None:
    """The caller leaves while the server is away; his record waits for it."""
    gateway = await start_gateway()
    asking = asyncio.create_task(stream_text(gateway))
    await until_queued(gateway)
    nats_server.kill()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    async with httpx.AsyncClient(base_url=gateway.url) as client:

        async def has_ended() -> bool:
            ready = (await client.get("/readyz")).json()
            return "nats" in ready["missing"] and ready["in_flight"] == 0

        await until_async(has_ended)
    nats_server.start()
    [record] = await gateway.records()
    assert (record.outcome, record.http_status, record.completion_tokens) == ("cancelled", 499, 0)


async def until_queued(gateway: GatewayUnderTest) -> None:
    bus: Bus = gateway.bus
    async with asyncio.timeout(15):
        while True:
            info = await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}")
            if info["state"]["messages"]:
                return
            await asyncio.sleep(0.01)
