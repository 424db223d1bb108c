"""Answers of such pools that are cut, and what a pool of another kind has begun."""

from typing import Final

import openai
import pytest
from fastapi.responses import JSONResponse

from pool_worker.drain import Stop
from protocol.job import unpack_token_ids
from tests.conformance.chat_replay import ARGUMENTS, ChatReplay
from tests.integration.gateway.chat_pools.pools import (
    ASKED,
    TOOLS,
    WHOLE,
    StartPool,
    Streamed,
    ask,
    cut,
    is_provider,
    rows,
    stream,
)
from tests.integration.gateway.conftest import MODEL, Start
from tests.integration.gateway.scripted_worker import Attempt, wait_for_pulls
from tests.small_tokenizer import byte_tokenizer
from tests.waiting import HANGS_S, until

# --- what is cut ----------------------------------------------------------------------------------------------------


async def test_a_cut_stream_goes_on_where_the_api_takes_its_beginning(
    start_pool: StartPool, replay: ChatReplay
) -> None:
    gateway = await start_pool("deepseek", workers=2)
    replay.faults.append(cut(replay, 12))
    told = await stream(gateway)
    assert (told.text, told.finish_reason, told.roles, told.error) == (WHOLE, "stop", 1, None)
    said = replay.bodies[1]["messages"][-1]
    assert (said["role"], said["prefix"]) == ("assistant", True)
    assert WHOLE.startswith(said["content"])
    record, [first, second] = await rows(gateway, 2)
    assert (first.rescue, second.rescue) == (None, "message")
    assert first.completion_tokens > 0, "what was made before the cut is counted"
    assert (first.counted_by, second.counted_by, record.counted_by) == ("estimate", "provider", "estimate")
    assert record.completion_tokens == first.completion_tokens + second.completion_tokens


async def test_a_cut_stream_is_never_told_twice_where_it_does_not(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("openai", workers=2)
    replay.faults.append(cut(replay, 12))
    told = await stream(gateway)
    assert told.error == "answer_cut"
    assert 0 < len(told.text) < len(WHOLE)
    assert WHOLE.startswith(told.text)
    assert len(replay.bodies) == 1
    record, [attempt] = await rows(gateway)
    assert (record.error_code, record.counted_by) == ("answer_cut", "estimate")
    assert record.completion_tokens == attempt.completion_tokens > 0


@pytest.mark.parametrize("profile", ["openai", "deepseek"])
async def test_a_cut_answer_that_nobody_has_seen_begins_anew(
    start_pool: StartPool, replay: ChatReplay, profile: str
) -> None:
    gateway = await start_pool(profile)
    replay.faults.append(cut(replay, 12))
    answer = await ask(gateway)
    assert answer.choices[0].message.content == WHOLE
    record, [_, second] = await rows(gateway, 2)
    assert second.rescue == "start"
    assert is_provider(record, 22, 4, 30)
    assert record.attempts == 2


@pytest.mark.parametrize("after", [2, 3, 8])
async def test_a_call_is_whole_or_not_told_again(start_pool: StartPool, replay: ChatReplay, after: int) -> None:
    gateway = await start_pool("deepseek")
    replay.faults.append(cut(replay, after))
    told = await stream(gateway, "call", tools=TOOLS)
    assert told.error == "answer_cut"
    assert len(replay.bodies) == 1
    answer = await ask(gateway, "call", tools=TOOLS)
    assert [call.function.arguments for call in answer.choices[0].message.tool_calls] == [ARGUMENTS] * 2


async def test_nothing_told_is_begun_anew(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("openai")
    replay.faults.append(cut(replay, 1))
    told = await stream(gateway, "call", tools=TOOLS)
    assert (told.error, told.finish_reason) == (None, "tool_calls")
    record, [_, second] = await rows(gateway, 2)
    assert second.rescue == "start"
    assert record.counted_by == "provider"


async def test_a_worker_that_leaves_ends_what_its_api_has_begun(
    start_pool: StartPool, replay: ChatReplay, stops: list[Stop]
) -> None:
    gateway = await start_pool("deepseek", workers=2)
    replay.token_s = 0.05
    told = Streamed()
    async for chunk in await ask(gateway, stream=True):
        told.take(chunk)
        if told.text and not stops[0].requested.is_set():
            for stop in stops:
                stop.request()
    assert (told.text, told.finish_reason) == (WHOLE, "stop")
    assert len(replay.bodies) == 1


async def test_who_leaves_is_counted_for_what_was_made(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool()
    replay.token_s = 0.05
    async for chunk in await ask(gateway, stream=True):
        if chunk.choices[0].delta.content:
            break
    await gateway.close_clients()
    record, [attempt] = await rows(gateway)
    assert (record.outcome, attempt.outcome) == ("cancelled", "cancelled")
    assert (record.counted_by, attempt.counted_by) == ("estimate", "estimate")
    assert record.completion_tokens == attempt.completion_tokens > 0
    await until(lambda: replay.streams == 0)


# --- somebody else's API --------------------------------------------------------------------------------------------


MANY: Final = 10  # faults: a request that a busy worker is slow to accept is moved, and the API may get it twice


async def test_a_model_that_only_a_hosted_api_serves(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("deepseek", tier="hosted")
    answer = await ask(gateway)
    assert answer.choices[0].message.content == WHOLE
    replay.faults.extend([lambda _: JSONResponse({"error": {"message": "content is not allowed"}}, 400)] * MANY)
    with pytest.raises(openai.BadRequestError, match="content is not allowed"):
        await ask(gateway)
    replay.faults.clear()
    replay.faults.append(cut(replay, 12))
    told = await stream(gateway)
    assert (told.text, told.error) == (WHOLE, None)
    first, *_ = await gateway.records(3)
    assert (first.tier, first.provider) == ("hosted", "openai")
    assert is_provider(first, 22, 4, 30)


async def test_a_hosted_stream_that_nobody_can_go_on_with_ends_soon(start_pool: StartPool, replay: ChatReplay) -> None:
    """It waits for nobody: its own workers are alive, and their API does not take the beginning of an answer."""
    gateway = await start_pool("openai", tier="hosted")
    await ask(gateway)  # the pool is known
    replay.faults.extend([cut(replay, 12)] * MANY)
    told = await stream(gateway)
    assert told.error == "answer_cut"
    assert WHOLE.startswith(told.text)
    assert [body for body in replay.bodies if body["messages"] != ASKED] == []


async def test_what_no_api_can_read_finds_no_room_at_a_hosted_pool(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("openai", is_mixed=True, tier="hosted")
    assert (await ask(gateway)).choices[0].message.content == WHOLE
    with pytest.raises(openai.APIStatusError) as refusal:
        await ask(gateway, "a's", extra_body={"structured_outputs": {"regex": "a+"}, "do_not_queue": True})
    assert refusal.value.code == "no_workers"
    assert "x-spillway-attempts" not in refusal.value.response.headers, "it was not admitted"
    assert [body for body in replay.bodies if body["messages"] != ASKED] == []


# --- beside the model's own workers ---------------------------------------------------------------------------------


async def test_what_an_engine_began_goes_on_as_a_message(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("deepseek", is_mixed=True, tier="on-demand")
    begun = WHOLE[:20]

    async def begin(attempt: Attempt) -> None:
        await attempt.worker.stop_pulling()
        await attempt.accept()
        await attempt.tokens(begun, (5, 6, 7))
        await attempt.fail("engine_error", "lost", True)

    await gateway.add_worker(script=begin, pull_s=HANGS_S)  # of a cheaper tier: it comes first
    await wait_for_pulls(gateway.bus, MODEL, workers=2)
    told = await stream(gateway)
    assert (told.text, told.finish_reason, told.error) == (WHOLE, "stop", None)
    assert replay.bodies[0]["messages"][-1]["content"] == begun
    record, [attempt] = await rows(gateway)  # our worker leaves none
    assert (attempt.rescue, attempt.resumed_tokens, record.counted_by) == ("message", 3, "estimate")


async def test_what_an_api_began_goes_on_from_its_text(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("openai", is_mixed=True, tier="spot")
    replay.faults.append(cut(replay, 12))

    async def go_on(attempt: Attempt) -> None:
        if attempt.job.attempt == 1:
            await attempt.hand_back(0.2)
            return
        await attempt.accept()
        await attempt.tokens(" and an end", (1, 2), finish_reason="stop")
        await attempt.finish()

    ours = await gateway.add_worker(script=go_on, place=("pool-a", "provider-a", "region-a", "on-demand"))
    told = await stream(gateway)
    assert told.error is None
    said = told.text.removesuffix(" and an end")
    assert 0 < len(said) < len(told.text)
    assert WHOLE.startswith(said)
    [point] = ours.attempts[-1].job.resume
    assert byte_tokenizer().decode(unpack_token_ids(point.token_ids)) == said
    assert (point.text, point.text_chars, point.is_encoded) == (said, len(said), True)
    [record] = await gateway.records(1)
    assert (record.counted_by, record.attempts) == ("estimate", 2)


async def test_what_the_api_does_not_take_goes_to_our_own(start_pool: StartPool, replay: ChatReplay) -> None:
    gateway = await start_pool("openai", is_mixed=True)
    await gateway.add_worker()
    for fields in ({"top_k": 5}, {"structured_outputs": {"regex": "a+"}}, {"return_token_ids": True}):
        answer = await ask(gateway, extra_body=fields)
        assert answer.choices[0].message.content == "Hello world"
    assert replay.bodies == []
    completion = await gateway.client().completions.create(model=MODEL, prompt="Hi")
    assert completion.choices[0].text == "Hello world"


async def test_a_job_of_the_exact_path_carries_no_conversation(start_gateway: Start) -> None:
    gateway = await start_gateway()
    worker = await gateway.add_worker()
    await ask(gateway)
    job = worker.attempts[0].job
    assert (job.chat, job.chat_object) == (None, None)
    [record] = await gateway.records(1)
    assert record.counted_by == "engine"
