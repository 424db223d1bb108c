"""Frames and workers that get lost: the caller sees a pause, nothing twice and nothing missing."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from gateway.dispatch import job_queue as lookups_module
from protocol import subjects
from protocol.job import Cancel, Resend, encode, unpack_token_ids
from protocol.nats.bus import Bus
from protocol.nats.pull import ack
from protocol.usage import AttemptRecord
from tests.integration.gateway.conftest import MODEL, GatewayUnderTest, Share, Start, restart
from tests.integration.gateway.scripted_worker import Attempt, ScriptedWorker, answer_hello, until_cancelled
from tests.integration.queued_jobs import until_queued
from tests.nats_server import NatsServer
from tests.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


async def stream_text(gateway: GatewayUnderTest, heard: asyncio.Event | None = None) -> str:
    """Return the text of an answer; ``heard`` is set by its first piece."""
    text = ""
    async for chunk in await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True):
        text += chunk.choices[0].delta.content or ""
        if text and heard is not None:
            heard.set()
    return text


async def test_lost_frames_are_sent_again(share_gateway: Share) -> None:
    gateway = await share_gateway()

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


async def test_a_lost_end_is_asked_for(share_gateway: Share) -> None:
    gateway = await share_gateway()

    async def end_in_silence(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("a", (1,))
        await attempt.tokens("b", (2,), finish_reason="stop", lost=True)
        await attempt.finish(lost=True)

    await gateway.add_worker(script=end_in_silence)
    assert await stream_text(gateway) == "ab"
    [record] = await gateway.records()
    assert (record.attempts, record.completion_tokens) == (1, 2)


async def test_retryable_failure_goes_on_where_it_stopped(share_gateway: Share) -> None:
    gateway = await share_gateway()

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


async def test_a_dead_worker_is_a_pause(share_gateway: Share) -> None:
    """Its heartbeats stop in the middle of a stream; later it wakes up and its old frames are of no use to anybody."""
    gateway = await share_gateway()

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
    first.takes_jobs = False  # or it might pull the second attempt too
    assert await asking == "one two"
    assert [attempt.job.attempt for attempt in (*first.attempts, *second.attempts)] == [1, 2]
    [record] = await gateway.records()
    assert (record.attempts, record.completion_tokens) == (2, 2)


@pytest.mark.parametrize("server_tells", [True, False], ids=["event", "no responders"])
async def test_a_killed_worker_is_a_short_pause(
    start_gateway: Start, nats_url: str, monkeypatch: pytest.MonkeyPatch, server_tells: bool
) -> None:
    """Its connection is gone: the server says so, or answers that nobody listens. No heartbeat has to be missed."""
    if not server_tells:  # as where its configuration does not import the event
        monkeypatch.setattr(subjects, "DISCONNECTS", "nobody.says.this")
    gateway = await start_gateway(timeouts={"worker_silence_s": 1000.0})
    bus = await Bus.connect(nats_url, name=subjects.connection_name("w1"))

    async def die(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("one ", (1,))
        await bus.client.flush()
        await bus.close()

    async def go_on(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("two", (2,), finish_reason="stop")
        await attempt.finish()

    first = ScriptedWorker(bus, MODEL, "w1", die)
    await first.start()
    raw = await gateway.client().chat.completions.with_raw_response.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    second = await gateway.add_worker("w2", script=go_on)
    events = [line async for line in raw.http_response.aiter_lines() if line]
    assert "".join(texts_of(events)) == "one two"
    assert events[-2:] == [": spillway attempts=2", "data: [DONE]"]
    assert json.loads(events[-3].removeprefix("data: "))["spillway"] == {"attempts": 2}
    await first.stop()
    assert second.attempts[0].job.avoid == ("w1",)
    [request] = await gateway.records()
    assert (request.attempts, request.completion_tokens, request.outcome) == (2, 2, "ok")
    [attempt] = [record for record in await gateway.usage() if isinstance(record, AttemptRecord)]
    assert (attempt.attempt, attempt.worker_id, attempt.outcome, attempt.error_code) == (
        1,
        "w1",
        "failed",
        "worker_lost",
    )
    assert (attempt.completion_tokens, attempt.tier, attempt.engine) == (1, "spot", "scripted")


def texts_of(events: list[str]) -> list[str]:
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    return [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]


async def test_a_job_that_somebody_took_and_nobody_has_goes_on(start_gateway: Start) -> None:
    """The worker died between its acknowledgement and its first frame, or that frame was lost with it."""
    gateway = await start_gateway(max_attempts=1)

    async def swallow_the_first(attempt: Attempt) -> None:
        if attempt.job.attempt == 1:
            await ack(attempt.worker.bus, attempt.delivery)
        else:
            await answer_hello(attempt)

    worker = await gateway.add_worker(script=swallow_the_first)
    assert await stream_text(gateway) == "Hello world"  # nobody's failure: it costs no attempt
    assert [attempt.job.attempt for attempt in worker.attempts] == [1, 2]


async def test_a_job_that_waits_for_long_is_left_alone(start_gateway: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    is_stored = lookups_module.JobLookups.is_stored

    async def counted(self: lookups_module.JobLookups, message_id: str, sequence: int) -> bool:
        looks.append(await is_stored(self, message_id, sequence))
        return looks[-1]

    monkeypatch.setattr(lookups_module.JobLookups, "is_stored", counted)
    gateway = await start_gateway()
    asking = asyncio.create_task(stream_text(gateway))
    await until(lambda: len(looks) >= 2)
    worker = await gateway.add_worker()
    assert await asking == "Hello world"
    assert [attempt.job.attempt for attempt in worker.attempts] == [1]
    assert looks[:2] == [True, True]


async def test_a_stop_string_split_over_a_crash(share_gateway: Share) -> None:
    """Text that may be the beginning of a stop string was held back by the worker that is gone."""
    gateway = await share_gateway()

    async def split(attempt: Attempt) -> None:
        await attempt.accept()
        if attempt.job.attempt == 1:
            await attempt.tokens("go ", (1,))
            await attempt.tokens("", (2, 3))  # "EN" is held back: it may become "END"
            await attempt.fail("engine_died", "boom", retryable=True)
        else:
            await attempt.tokens("", (4,), finish_reason="stop")
            await attempt.finish()

    worker = await gateway.add_worker(script=split)
    answer = await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, stop=["END"], max_tokens=9)
    assert answer.choices[0].message.content == "go "
    [point] = worker.attempts[1].job.resume
    assert (unpack_token_ids(point.token_ids), point.text_chars) == ([1, 2, 3], 3)
    # The limit is that of the whole answer: whoever resumes takes off what is there.
    assert worker.attempts[1].job.sampling.max_tokens == 9
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


async def test_what_goes_on_for_nobody_is_told_to_stop_again(start_gateway: Start) -> None:
    gateway = await start_gateway(timeouts={"cancel_s": 0.1})  # then it is nobody's
    worker = await gateway.add_worker(script=until_cancelled)
    worker.deaf = True
    asking = asyncio.create_task(stream_text(gateway))
    await until(lambda: worker.attempts and worker.attempts[0].made_tokens)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await gateway.records()
    so_far = len(worker.controls)
    await until(lambda: len([c for c in worker.controls[so_far:] if isinstance(c, Cancel)]) >= 3)
    worker.deaf = False
    await until(worker.attempts[0].cancelled.is_set)


async def test_attempts_are_exhausted(start_gateway: Start, caplog: pytest.LogCaptureFixture) -> None:
    gateway = await start_gateway(max_attempts=3)

    async def fail(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.fail("engine_died", "boom", retryable=True)

    worker = await gateway.add_worker(script=fail)
    own: dict[str, Any] = {
        "stop": ["SECRET"],
        "logit_bias": {"7777": 1},
        "extra_body": {"guided_regex": "SECRET|" * 1000 + "b"},
    }
    with pytest.raises(openai.APIStatusError) as caught:
        await gateway.client().chat.completions.create(model=MODEL, messages=HELLO, **own)
    assert caught.value.code == "attempts_exhausted"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "boom" in caught.value.message
    said = caught.value.response.json()["error"]["message"]
    assert said.startswith(f"{caught.value.response.headers['x-spillway-attempts']} attempts failed ")
    assert [attempt.job.attempt for attempt in worker.attempts] == [1, 2, 3]
    [record] = await gateway.records()
    assert (record.attempts, record.outcome, record.error_code) == (3, "failed", "attempts_exhausted")
    assert f"gave up request {record.request_id}: 3 attempts failed (3 x engine_died)" in caplog.text
    letter = await gateway.dead_letter()
    assert (letter.request_id, letter.model, letter.gateway_id) == (record.request_id, MODEL, "g0")
    assert [(failure.attempt, failure.worker_id, failure.code, failure.reason) for failure in letter.failures] == [
        (number, "w1", "engine_died", "boom") for number in (1, 2, 3)
    ]
    # Of what the caller wrote, it says how much that was, and how a grammar that kills workers is known again.
    assert b"SECRET" not in encode(letter)
    assert not letter.sampling.logit_bias
    assert letter.withheld_bytes == {"stop": 8, "logit_bias": 13, "grammar": 7001}
    assert len(letter.grammar_sha256) == 64


async def test_queued_request_survives_the_loss_of_the_queue(start_gateway: Start, nats_server: NatsServer) -> None:
    gateway = await start_gateway()
    asking = asyncio.create_task(stream_text(gateway))
    await until_queued(gateway.bus, 1)
    await restart(nats_server, gateway.bus)  # the memory stream and all its jobs are gone
    await gateway.add_worker()
    assert await asking == "Hello world"
    [record] = await gateway.records()
    assert (record.outcome, record.completion_tokens) == ("ok", 2)


async def test_running_request_survives_a_restart_of_the_queue(start_gateway: Start, nats_server: NatsServer) -> None:
    """Frames sent while the server is away may be lost; they are asked for afterwards."""
    gateway = await start_gateway()
    restarted = asyncio.Event()

    async def talk_into_the_void(attempt: Attempt) -> None:
        await attempt.accept()
        await attempt.tokens("a", (1,))
        await restarted.wait()
        await attempt.tokens("b", (2,), lost=True)
        await attempt.tokens("c", (3,), finish_reason="stop", lost=True)
        await attempt.finish(lost=True)

    await gateway.add_worker(script=talk_into_the_void)
    heard = asyncio.Event()
    asking = asyncio.create_task(stream_text(gateway, heard))
    await heard.wait()  # only then does the gateway know where the job is; one that it may have lost is asked again
    await restart(nats_server, gateway.bus)
    restarted.set()
    assert await asking == "abc"
    [record] = await gateway.records()
    assert (record.attempts, record.completion_tokens) == (1, 3)


async def test_a_record_outlasts_the_queue_server(start_gateway: Start, nats_server: NatsServer) -> None:
    """The caller leaves while the server is away; his record waits for it."""
    gateway = await start_gateway()
    asking = asyncio.create_task(stream_text(gateway))
    await until_queued(gateway.bus, 1)
    nats_server.kill()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    async with httpx.AsyncClient(base_url=gateway.url) as client:

        async def has_ended() -> bool:
            ready = (await client.get("/readyz")).json()
            return "nats" in ready["missing"] and ready["in_flight"] == 0

        await until(has_ended)
    nats_server.start()
    [record] = await gateway.records()
    assert (record.outcome, record.http_status, record.completion_tokens) == ("cancelled", 499, 0)
