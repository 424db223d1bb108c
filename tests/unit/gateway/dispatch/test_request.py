from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.dispatch import attempt as attempts_module
from gateway.dispatch.lifecycle import State
from gateway.request.mailbox import Ended
from protocol.errors import ErrorCode
from protocol.generation import PromptLogprob
from protocol.job import Cancel, Frame, Timings, Tokens, UnreadableFrame, Vector, unpack_token_ids
from tests.unit.gateway.dispatch.opened_requests import (
    ID,
    accepted,
    failed,
    finished,
    lose_worker,
    open_request,
    texts,
    tokens,
)


async def test_a_complete_answer() -> None:
    request, actions = open_request()
    for frame in (accepted(), tokens(1, "a"), tokens(2, "b", finish_reason="stop"), finished(3)):
        request.on_frame("w", frame, 1.0)
    events = await request.mailbox.take()
    assert events[-1] == Ended(None)
    assert (request.state, request.outcome, request.completion_tokens, actions.ends) == (State.ENDED, "ok", 2, 1)
    assert actions.cancelled == []
    assert actions.asked == []


@pytest.mark.parametrize("stale", [accepted(1), tokens(1, "STALE"), finished(2), failed(1)])
async def test_frames_of_an_earlier_attempt_do_nothing(stale: Frame) -> None:
    request, actions = open_request()
    request.on_frame("w", failed(0), 1.0)
    assert request.attempt == 2
    request.on_frame("w", accepted(2), 1.0)
    request.on_frame("w", stale, 1.0)
    request.on_frame("w", tokens(1, "b", attempt=2), 1.0)
    assert await texts(request) == "b"
    assert actions.fenced == [("w", stale)]


async def test_another_worker_with_the_same_attempt_is_stopped() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("other", accepted(), 1.0)
    request.on_frame("other", tokens(1, "OTHER"), 1.0)
    request.on_frame("w", tokens(1, "mine"), 1.0)
    assert await texts(request) == "mine"
    assert [worker for worker, _ in actions.fenced] == ["other", "other"]


async def test_a_gap_is_requested_again_periodically() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(2), 1.0)
    request.on_frame("w", tokens(3), 1.1)
    assert actions.asked == [("w", 1, 1)]
    request.on_frame("w", tokens(4), 1.0 + attempts_module.RESEND_GAP_S)
    assert actions.asked == [("w", 1, 1)] * 2


async def test_a_gap_that_stays_open_is_a_failed_attempt() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 0.0)
    for tick in range(int(attempts_module.GAP_LIMIT_S) + 1):
        request.on_frame("w", tokens(2 + tick), float(tick))
        request.on_tick(float(tick), connected=True)
    assert actions.published == [2]


async def test_the_next_attempt_resumes() -> None:
    request, actions = open_request(n=3)
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, "héé", (1, 2), index=0), 1.0)
    request.on_frame("w", tokens(2, "", (3,), index=2, finish_reason="length"), 1.0)
    lose_worker(request, 1.5)
    assert (actions.published, actions.withdrawn, actions.cancelled) == ([2], [1], [("w", Cancel(ID, 1))])
    first, last = request.choices.resume_points()
    assert (first.index, unpack_token_ids(first.token_ids), first.text_chars, first.finish_reason) == (
        0,
        [1, 2],
        3,
        None,
    )
    assert (last.index, unpack_token_ids(last.token_ids), last.text_chars, last.finish_reason) == (2, [3], 0, "length")


def of_prompt(seq: int, count: int, attempt: int = 1) -> Tokens:
    return tokens(seq, "", (), attempt, prompt_logprobs=(PromptLogprob(1, "x", -1.0, 1),) * count)


async def test_the_next_attempt_sends_only_the_rest_of_the_prompts_logprobs() -> None:
    request, actions = open_request(prompt_logprobs=0)
    frame: Frame
    for frame in (accepted(), of_prompt(1, 2)):
        request.on_frame("w", frame, 1.0)
    assert (request.choices.scored_tokens, request.first_token_s) == (2, None)
    lose_worker(request, 1.5)
    assert request.choices.resume_points() == ()
    for frame in (accepted(2), of_prompt(1, 1, 2), tokens(2, "a", attempt=2, finish_reason="stop"), finished(3, 2)):
        request.on_frame("w", frame, 2.0)
    assert (request.outcome, request.completion_tokens, request.first_token_s) == ("ok", 1, 2.0)
    frames = [event for event in await request.mailbox.take() if isinstance(event, Tokens)]
    assert [len(frame.prompt_logprobs or ()) for frame in frames] == [2, 1, 0]
    assert actions.published == [2]


async def test_a_worker_that_leaves_out_the_prompts_logprobs_has_failed() -> None:
    request, actions = open_request(prompt_logprobs=0)
    for frame in (accepted(), of_prompt(1, 2), tokens(2, "a", finish_reason="stop"), finished(3)):
        request.on_frame("w", frame, 1.0)
    assert (request.state, actions.published) == (State.QUEUED, [2])


async def test_no_token_at_all_can_be_a_whole_answer() -> None:
    request, _ = open_request(prompt_logprobs=0)
    for frame in (accepted(), of_prompt(1, 3), tokens(2, "", (), finish_reason="length"), finished(3)):
        request.on_frame("w", frame, 1.0)
    assert (request.outcome, request.completion_tokens, request.first_token_s) == ("ok", 0, None)


async def test_workers_are_not_lost_while_the_queue_server_is_unavailable() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_tick(30.0, connected=False)
    assert (request.state, actions.published, actions.asked) == (State.RUNNING, [], [])


async def test_a_silent_worker_is_probed_and_then_given_up() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 0.0)
    request.on_frame("w", tokens(1), 0.0)
    now_s = 0.0
    while request.attempt == 1:
        now_s += 0.25
        request.on_tick(now_s, connected=True)
    # From the last frame on: a worker without new frames resends that one, which shows that it is alive.
    assert actions.asked == [("w", 1, 1)] * attempts_module.MAX_PROBES
    assert now_s == attempts_module.SILENCE_LIMIT_S + attempts_module.MAX_PROBES * attempts_module.PROBE_PERIOD_S


async def test_an_answered_probe_resets_the_count() -> None:
    request, actions = open_request(first_token_s=1000)
    request.on_frame("w", accepted(), 0.0)
    for tick in range(1, 200):
        request.on_tick(tick * 0.5, connected=True)
        if tick % 8 == 0:
            request.on_frame("w", accepted(), tick * 0.5)  # a repeated frame
    assert request.attempt == 1
    assert len(actions.asked) > 20


async def test_a_forgotten_attempt_continues_elsewhere() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1), 1.0)
    request.on_frame("w", failed(1, code="unknown_attempt"), 3.0)  # a seq seen before
    assert actions.published == [2]


async def test_complete_choices_need_no_further_attempt() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, finish_reason="stop"), 1.0)
    lose_worker(request, 3.0)
    assert (request.state, request.outcome, actions.published) == (State.ENDED, "ok", [])
    assert actions.recorded == [(1, "ok", None, 1)]
    assert actions.held == []


async def test_an_end_before_all_choices_are_complete_is_a_failed_attempt() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1), 1.0)
    request.on_frame("w", finished(2), 1.0)
    assert (request.state, actions.published) == (State.QUEUED, [2])


async def test_an_attempt_that_was_moved_counts_as_in_the_header() -> None:
    request, _ = open_request(max_attempts=1)
    request.move(1, None, 1.0)
    request.on_frame("w", accepted(2), 1.0)
    request.on_frame("w", failed(1, 2), 1.0)
    assert request.failure is not None
    assert request.failure.message == "2 attempts, of which 1 failed (engine_died); the last: boom"
    assert request.attempt == 2


async def test_a_request_that_was_accepted_before_goes_first_even_if_moved() -> None:
    request, _ = open_request()
    request.on_frame("w", accepted(), 1.0)
    lose_worker(request, 1.0)  # before its first token
    request.move(2, None, 2.0)
    assert (request.attempt, request.current.is_rescue) == (3, True)


async def test_attempts_are_bounded() -> None:
    request, actions = open_request(max_attempts=3)
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", failed(1), 1.0)
    request.on_frame("v", accepted(2), 1.0)
    lose_worker(request, 1.0)
    request.on_frame("u", accepted(3), 1.0)
    request.on_frame("u", failed(1, 3, "engine_error"), 1.0)
    assert request.failure is not None
    assert request.failure.code is ErrorCode.ATTEMPTS_EXHAUSTED
    assert request.failure.message == ("3 attempts failed (engine_died, worker_lost, engine_error); the last: boom")
    assert (request.state, actions.published) == (State.ENDED, [2, 3])
    assert [(failure.attempt, failure.worker_id, failure.code) for failure in request.log.failures] == [
        (1, "w", "engine_died"),
        (2, "v", "worker_lost"),
        (3, "u", "engine_error"),
    ]
    assert request.log.avoid == ("w", "v", "u")
    assert actions.held == []


async def test_cancelled_counts_are_the_workers_own() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
    request.on_frame("w", failed(2), 1.0)
    request.on_frame("v", accepted(2), 2.0)
    request.on_frame("v", tokens(1, ids=(3,), attempt=2), 2.0)
    request.cancel(2.0)
    assert (request.state, actions.ends) == (State.STOPPING, 0)
    assert actions.cancelled[-1] == ("v", Cancel(ID, 2))
    # Some of its frames were lost, but its count is exact.
    request.on_frame("v", finished(9, attempt=2, cancelled=True, completion_tokens=6), 2.1)
    assert (request.state, request.outcome, request.completion_tokens) == (State.ENDED, "cancelled", 8)
    assert actions.ends == 1


@pytest.mark.parametrize("last", [finished, failed])
async def test_implausible_token_counts_are_not_charged(last: Callable[..., Frame]) -> None:
    # A stolen worker's count for a canceled request once produced a row and a bill of 10^9 tokens.
    for n, silence_s, most in ((1, 0.0, 98), (3, 0.0, 98 + 2 * 100), (1, -0.95, 50)):
        request, _ = open_request(n=n)
        request.on_frame("w", accepted(), 1.0)
        request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
        request.cancel(1.0)
        request.on_frame("w", msgspec.structs.replace(last(2), completion_tokens=10**9), 1.0 + silence_s)
        assert (request.state, request.completion_tokens) == (State.ENDED, 2 + most)


async def test_a_failed_request_is_charged_for_received_tokens() -> None:
    request, _ = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
    lie = msgspec.structs.replace(failed(2, retryable=False), completion_tokens=-(10**9))
    request.on_frame("w", lie, 1.0)
    assert (request.outcome, request.completion_tokens) == ("failed", 2)


@pytest.mark.parametrize(
    "lie",
    [
        tokens(2, index=-1),
        tokens(2, index=2),
        tokens(2, ids=(1,) * 99),
        tokens(2, index=1),  # a choice that has ended
        tokens(2, ids=(), prompt_logprobs=(PromptLogprob(1, "x", -1.0, 1),) * 4),
        Vector(ID, 1, 2, -1, b""),
        Vector(ID, 1, 2, 2, b""),
        accepted(),
    ],
)
async def test_output_that_was_not_requested_ends_the_attempt(lie: Frame) -> None:
    request, actions = open_request(n=2, prompt_logprobs=0)
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, ids=(1, 2), index=1, finish_reason="stop"), 1.0)
    request.on_frame("w", tokens(2, "a", ids=(1, 2)), 1.0)
    request.on_frame("w", msgspec.structs.replace(lie, seq=3), 1.0)
    assert (request.attempt, request.log.failures[0].code, actions.published) == (2, "engine_error", [2])
    assert request.choices.held_tokens() == 4
    request.on_frame("v", accepted(2), 1.0)
    request.on_frame("v", tokens(1, "b", attempt=2, finish_reason="stop"), 1.0)
    assert await texts(request) == "xab"


@pytest.mark.parametrize(
    "lie", [{"pool": "a\0b"}, {"region": "r" * 256}, {"queue_ms": float("nan")}, {"queue_ms": -1.0}]
)
async def test_an_implausible_acceptance_is_refused(lie: dict[str, Any]) -> None:
    request, actions = open_request()
    request.on_frame("w", msgspec.structs.replace(accepted(), **lie), 1.0)
    assert (request.state, request.accepted, request.log.avoid) == (State.QUEUED, None, ("w",))
    assert actions.published == [2]


async def test_a_frame_of_an_unknown_kind_is_skipped_and_a_broken_one_fails_the_attempt() -> None:
    request, actions = open_request()
    for frame in (accepted(), tokens(1, "a"), UnreadableFrame(ID, 1, 2, "z", "unknown"), tokens(3, "b")):
        request.on_frame("w", frame, 1.0)
    assert (await texts(request), actions.asked, request.attempt) == ("ab", [], 1)
    request.on_frame("w", UnreadableFrame(ID, 1, 4, "t", "token ids below 0"), 1.0)
    assert (request.attempt, request.log.failures[0].reason) == (2, "token ids below 0")


async def test_output_of_a_worker_that_did_not_accept_is_dropped() -> None:
    request, actions = open_request()
    request.on_frame("w", tokens(0), 1.0)
    assert (request.state, request.completion_tokens, actions.published) == (State.QUEUED, 0, [2])


@pytest.mark.parametrize(
    "timings",
    [
        Timings(float("nan"), 1.0, 1.0, 0),
        Timings(-1.0, 1.0, 1.0, 0),
        Timings(1.0, 1e12, 1.0, 0),
        Timings(1.0, 1.0, 1.0, -1),
        Timings(1.0, 1.0, 1.0, 2**70),
    ],
)
async def test_implausible_timings_and_cached_tokens_are_ignored(timings: Timings) -> None:
    request, _ = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, finish_reason="stop"), 2.0)
    request.on_frame("w", msgspec.structs.replace(finished(2), timings=timings, cached_tokens=10**9), 2.0)
    spent = request.log.spent
    assert (spent.engine_queue_ms, spent.prefill_ms, spent.decode_ms, spent.preemptions) == (0.0, 1000.0, 0.0, 0)
    assert request.cached_tokens == 3
