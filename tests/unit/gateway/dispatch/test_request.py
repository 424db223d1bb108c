import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dispatch import attempts as attempts_module
from gateway.dispatch.request import OpenRequest
from gateway.request.admission import Admission
from gateway.request.mailbox import LOOSE_EVENTS, Ended, Failure, StillWaiting
from gateway.request.states import State
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode
from protocol.logprobs import PromptLogprob
from protocol.messages import (
    Accepted,
    Cancel,
    Failed,
    Finished,
    Frame,
    Sampling,
    Timings,
    Tokens,
    UnreadableFrame,
    Vector,
    unpack_token_ids,
)
from tests.unit.gateway.admission.controls import principal, ticket_of

ID = "req_1"


@dataclass
class RecordedActions:
    """Actions that the request asked for, in order."""

    published: list[int] = field(default_factory=list)
    withdrawn: list[int] = field(default_factory=list)
    cancelled: list[tuple[str, Cancel]] = field(default_factory=list)
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    fenced: list[tuple[str, Frame]] = field(default_factory=list)
    held: list[tuple[str | None, int]] = field(default_factory=list)  # by workers: who, which attempt
    pauses: list[float] = field(default_factory=list)
    recorded: list[tuple[int, str, str | None, int]] = field(default_factory=list)  # attempt, outcome, code, tokens
    ends: int = 0

    def publish(self, request: OpenRequest, after_s: float) -> None:
        self.published.append(request.attempt)
        self.pauses.append(after_s)

    def accepted(self, request: OpenRequest) -> None:
        self.held.append((request.worker_id, request.attempt))

    def attempt_over(self, request: OpenRequest) -> None:
        if request.worker_id is not None:
            self.held.remove((request.worker_id, request.attempt))

    def fence_out(self, worker_id: str, frame: Frame, now_s: float) -> None:
        self.fenced.append((worker_id, frame))

    def record_lost_attempt(self, request: OpenRequest, outcome: str, code: str | None, now_s: float) -> None:
        self.recorded.append((request.attempt, outcome, code, request.attempt_tokens))

    def withdraw(self, request: OpenRequest) -> None:
        self.withdrawn.append(request.attempt)

    def cancel(self, worker_id: str, cancel: Cancel) -> None:
        self.cancelled.append((worker_id, cancel))

    def request_resend(self, request: OpenRequest, worker_id: str, from_seq: int) -> None:
        self.asked.append((worker_id, request.attempt, from_seq))

    def record(self, request: OpenRequest) -> asyncio.Future[None]:
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stored.set_result(None)
        return stored

    def ended(self, request: OpenRequest) -> None:
        self.ends += 1


def open_request(
    n: int = 1, *, stream: bool = True, max_attempts: int = 3, prompt_logprobs: int | None = None, **timeouts: float
) -> tuple[OpenRequest, RecordedActions]:
    admission = Admission(
        request_id=ID,
        endpoint="completions",
        model="m",
        principal=principal(),
        stream=stream,
        prompt_ids=b"\x01\x00\x00\x00" * 3,
        prompt_tokens=3,
        prompt_param="prompt",
        sampling=Sampling(max_tokens=100, n=n, prompt_logprobs=prompt_logprobs),
        received_s=0.0,
        received_unix_ms=0,
        admitted_s=0.0,
        queue_wait_s=600.0,
    )
    actions = RecordedActions()
    limits = TimeoutSettings.model_validate(timeouts)
    return OpenRequest(ticket_of(admission), limits, max_attempts, actions, 0.0), actions


def accepted(attempt: int = 1) -> Accepted:
    return Accepted(ID, attempt, 0, "w", "pool", "provider", "region", 1.0)


def tokens(seq: int, text: str = "x", ids: tuple[int, ...] = (1,), attempt: int = 1, **rest: Any) -> Tokens:
    return Tokens(ID, attempt, seq, rest.pop("index", 0), ids, text, **rest)


def finished(seq: int, attempt: int = 1, *, cancelled: bool = False, completion_tokens: int = 0) -> Finished:
    return Finished(
        ID,
        attempt,
        seq,
        cancelled=cancelled,
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=completion_tokens,
        ttft_ms=1.0,
    )


def failed(seq: int, attempt: int = 1, code: str = "engine_died", *, retryable: bool = True) -> Failed:
    return Failed(ID, attempt, seq, code, "boom", retryable=retryable)


async def texts(request: OpenRequest) -> str:
    if not len(request.mailbox):
        return ""
    return "".join(event.text for event in await request.mailbox.take() if isinstance(event, Tokens))


def lose_worker(request: OpenRequest, now_s: float) -> None:
    request.worker_lost(ErrorCode.WORKER_LOST, "worker w is lost", now_s)


async def test_the_usual_way() -> None:
    request, actions = open_request()
    for frame in (accepted(), tokens(1, "a"), tokens(2, "b", finish_reason="stop"), finished(3)):
        request.on_frame("w", frame, 1.0)
    events = await request.mailbox.take()
    assert events[-1] == Ended(None)
    assert (request.state, request.outcome, request.completion_tokens, actions.ends) == (State.ENDED, "ok", 2, 1)
    assert actions.cancelled == actions.asked == []


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


async def test_a_gap_is_asked_for_once_in_a_while() -> None:
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
    for frame in (accepted(), of_prompt(1, 2)):
        request.on_frame("w", frame, 1.0)
    assert (request.choices.scored_tokens, request.first_token_s) == (2, None)
    lose_worker(request, 1.5)
    assert request.choices.resume_points() == ()
    for frame in (accepted(2), of_prompt(1, 1, 2), tokens(2, "a", attempt=2, finish_reason="stop"), finished(3, 2)):
        request.on_frame("w", frame, 2.0)
    assert (request.outcome, request.completion_tokens, request.first_token_s) == ("ok", 1, 2.0)
    told = [event for event in await request.mailbox.take() if isinstance(event, Tokens)]
    assert [len(frame.prompt_logprobs or ()) for frame in told] == [2, 1, 0]
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


async def test_no_judgement_while_the_queue_server_is_away() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_tick(30.0, connected=False)
    assert (request.state, actions.published, actions.asked) == (State.RUNNING, [], [])


async def test_probes_then_the_next_attempt() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 0.0)
    request.on_frame("w", tokens(1), 0.0)
    now_s = 0.0
    while request.attempt == 1:
        now_s += 0.25
        request.on_tick(now_s, connected=True)
    # From the last frame on: a worker that has nothing new sends that one, which is a sign of life.
    assert actions.asked == [("w", 1, 1)] * attempts_module.MAX_PROBES
    assert now_s == attempts_module.SILENCE_LIMIT_S + attempts_module.MAX_PROBES * attempts_module.PROBE_PERIOD_S


async def test_an_answered_probe_starts_the_count_anew() -> None:
    request, actions = open_request(first_token_s=1000)
    request.on_frame("w", accepted(), 0.0)
    for tick in range(1, 200):
        request.on_tick(tick * 0.5, connected=True)
        if tick % 8 == 0:
            request.on_frame("w", accepted(), tick * 0.5)  # again: nothing new
    assert request.attempt == 1
    assert len(actions.asked) > 20


async def test_a_forgotten_attempt_goes_on_elsewhere() -> None:
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
    # Some of its frames were lost: its count is exact all the same.
    request.on_frame("v", finished(9, attempt=2, cancelled=True, completion_tokens=6), 2.1)
    assert (request.state, request.outcome, request.completion_tokens) == (State.ENDED, "cancelled", 8)
    assert actions.ends == 1


@pytest.mark.parametrize("last", [finished, failed])
async def test_nobody_pays_for_what_a_worker_claims_beyond_what_can_be(last: Callable[..., Frame]) -> None:
    # A stolen worker's word for a cancelled request was a row and a bill of 10^9 tokens.
    for n, silence_s, most in ((1, 0.0, 98), (3, 0.0, 98 + 2 * 100), (1, -0.95, 50)):
        request, _ = open_request(n=n)
        request.on_frame("w", accepted(), 1.0)
        request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
        request.cancel(1.0)
        request.on_frame("w", msgspec.structs.replace(last(2), completion_tokens=10**9), 1.0 + silence_s)
        assert (request.state, request.completion_tokens) == (State.ENDED, 2 + most)


async def test_a_failed_request_bills_no_less_than_what_came() -> None:
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
        tokens(2, index=1),  # has ended
        tokens(2, ids=(), prompt_logprobs=(PromptLogprob(1, "x", -1.0, 1),) * 4),
        Vector(ID, 1, 2, -1, b""),
        Vector(ID, 1, 2, 2, b""),
        accepted(),
    ],
)
async def test_what_nobody_asked_for_ends_the_attempt(lie: Frame) -> None:
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
async def test_a_worker_that_cannot_be_is_not_accepted(lie: dict[str, Any]) -> None:
    request, actions = open_request()
    request.on_frame("w", msgspec.structs.replace(accepted(), **lie), 1.0)
    assert (request.state, request.accepted, request.log.avoid) == (State.QUEUED, None, ("w",))
    assert actions.published == [2]


async def test_a_frame_of_an_unknown_kind_is_done_without_and_a_broken_one_is_the_workers_fault() -> None:
    request, actions = open_request()
    for frame in (accepted(), tokens(1, "a"), UnreadableFrame(ID, 1, 2, "z", "unknown"), tokens(3, "b")):
        request.on_frame("w", frame, 1.0)
    assert (await texts(request), actions.asked, request.attempt) == ("ab", [], 1)
    request.on_frame("w", UnreadableFrame(ID, 1, 4, "t", "token ids below 0"), 1.0)
    assert (request.attempt, request.log.failures[0].reason) == (2, "token ids below 0")


async def test_who_answers_without_having_accepted_is_not_heard() -> None:
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
async def test_timings_that_cannot_be_and_a_cache_larger_than_the_prompt_count_for_nothing(timings: Timings) -> None:
    request, _ = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, finish_reason="stop"), 2.0)
    request.on_frame("w", msgspec.structs.replace(finished(2), timings=timings, cached_tokens=10**9), 2.0)
    spent = request.log.spent
    assert (spent.engine_queue_ms, spent.prefill_ms, spent.decode_ms, spent.preemptions) == (0.0, 1000.0, 0.0, 0)
    assert request.cached_tokens == 3


async def test_a_silent_worker_does_not_hold_the_record_back() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
    request.cancel(2.0)
    request.on_tick(3.0, connected=True)
    assert len(actions.cancelled) == 2  # said again, as it may have been lost
    request.on_tick(2.0 + TimeoutSettings().cancel_s, connected=True)
    assert (request.state, request.completion_tokens, actions.ends) == (State.ENDED, 2, 1)


async def test_cancelled_while_queued() -> None:
    request, actions = open_request()
    request.cancel(1.0)
    assert (request.state, actions.withdrawn, actions.cancelled) == (State.STOPPING, [1], [])
    request.on_frame("w", accepted(), 1.5)  # pulled at the last moment
    assert actions.cancelled == [("w", Cancel(ID, 1))]
    request.on_frame("w", finished(1, cancelled=True), 1.6)
    assert (request.state, request.completion_tokens) == (State.ENDED, 0)


async def test_cancelling_twice_or_after_the_end_changes_nothing() -> None:
    request, actions = open_request()
    for frame in (accepted(), tokens(1, finish_reason="stop"), finished(2)):
        request.on_frame("w", frame, 1.0)
    request.cancel(2.0)
    request.fail(Failure(ErrorCode.TOTAL_TIMEOUT, "late"), 2.0)
    assert (request.outcome, actions.ends, actions.cancelled) == ("ok", 1, [])


@pytest.mark.parametrize(
    ("limits", "frames", "code"),
    [
        ({"queue_wait_s": 600.0}, [], ErrorCode.QUEUE_WAIT_TIMEOUT),
        ({"first_token_s": 5.0}, [accepted()], ErrorCode.FIRST_TOKEN_TIMEOUT),
        ({"inter_token_s": 5.0}, [accepted(), tokens(1)], ErrorCode.INTER_TOKEN_TIMEOUT),
        ({"total_s": 5.0}, [accepted(), tokens(1)], ErrorCode.TOTAL_TIMEOUT),
    ],
)
async def test_timeouts(limits: dict[str, float], frames: list[Frame], code: ErrorCode) -> None:
    request, _ = open_request(**limits)
    limit_s = next(iter(limits.values()))
    for frame in frames:
        request.on_frame("w", frame, 0.0)
    request.on_tick(limit_s - 0.1, connected=False)
    assert request.failure is None
    request.on_tick(limit_s, connected=False)
    assert request.failure is not None
    assert (request.failure.code, request.state) == (code, State.STOPPING)


async def test_signs_of_life_for_those_who_stream() -> None:
    for stream in (True, False):
        request, _ = open_request(stream=stream, queued_comment_s=10.0)
        for now_s in (9.9, 10.0, 15.0, 20.0):
            request.on_tick(now_s, connected=True)
        assert len(request.mailbox) == (2 if stream else 0)
    assert StillWaiting("queued").state == State.QUEUED.value


async def test_a_client_that_lags_too_far_behind() -> None:
    request, actions = open_request()
    request.mailbox.max_unread_bytes = 1000
    request.on_frame("w", accepted(), 1.0)
    seq = 0
    while request.failure is None:
        seq += 1
        request.on_frame("w", tokens(seq), 1.0)
    assert LOOSE_EVENTS < seq < LOOSE_EVENTS + 20
    assert request.failure is not None
    assert request.failure.code is ErrorCode.SLOW_CLIENT
    assert actions.cancelled == [("w", Cancel(ID, 1))]
    assert await request.mailbox.take() == [Ended(request.failure)]


async def test_those_that_leave_in_order_cost_no_attempt() -> None:
    request, actions = open_request(max_attempts=1)
    for attempt in range(1, 10):
        request.on_frame("w", accepted(attempt), 1.0)
        request.on_frame("w", failed(1, attempt, "worker_draining"), 1.0)
        assert request.attempt == attempt + 1
    assert set(actions.pauses) == {0.0}
    assert request.log.avoid == ()


async def test_a_job_that_nobody_keeps_is_given_up_at_last() -> None:
    request, actions = open_request(max_attempts=1)
    while request.state is State.QUEUED:
        request.job_vanished(request.attempt, 1.0)
    assert len(actions.published) == attempts_module.MAX_FREE_FAILURES - 1
    assert request.failure is not None
    assert request.failure.code is ErrorCode.ATTEMPTS_EXHAUSTED


async def test_the_first_retry_is_immediate_and_later_ones_wait_a_little_longer_each() -> None:
    request, actions = open_request(max_attempts=5)
    for attempt in range(1, 5):
        request.on_frame("w", accepted(attempt), 1.0)
        lose_worker(request, 1.0)
    first, second, third, fourth = actions.pauses
    assert first == 0.0
    assert 0.05 <= second <= 0.1 <= third <= 0.2 <= fourth <= 0.4


async def test_an_answer_that_gets_on_outlives_many_workers_but_not_any_number() -> None:
    request, actions = open_request(max_attempts=2)
    while request.state is not State.ENDED:
        request.on_frame("w", accepted(request.attempt), 1.0)
        request.on_frame("w", tokens(1, attempt=request.attempt), 1.0)
        lose_worker(request, 1.0)
    assert request.attempt == 2 * attempts_module.PROGRESS_ALLOWANCE
    assert set(actions.pauses) == {0.0}


async def test_a_lost_worker_ends_the_wait_for_its_counts() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
    request.cancel(2.0)
    lose_worker(request, 2.1)
    assert (request.state, request.outcome, request.completion_tokens) == (State.ENDED, "cancelled", 2)
    assert actions.recorded == [(1, "cancelled", None, 2)]
    assert actions.held == []


async def test_only_attempts_that_their_workers_cannot_record_are_recorded_here() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
    lose_worker(request, 1.5)
    request.on_frame("v", accepted(2), 2.0)
    request.on_frame("v", tokens(1, ids=(3,), attempt=2), 2.0)
    request.on_frame("v", failed(2, attempt=2), 2.0)
    assert actions.recorded == [(1, "failed", "worker_lost", 2)]
    assert request.attempt == 3


@given(seed=st.integers(0, 2**32), loss=st.floats(0, 0.6), n=st.integers(1, 3), length=st.integers(1, 15))
@settings(max_examples=150)
def test_whatever_is_lost_or_repeated_the_text_comes_out_once(seed: int, loss: float, n: int, length: int) -> None:
    """Workers die, frames get lost and come twice; the caller's text is that of an undisturbed run."""
    with mock.patch.object(attempts_module, "MAX_FREE_FAILURES", 10_000):
        _disturb_until_it_ends(seed, loss, n, length)


def _disturb_until_it_ends(seed: int, loss: float, n: int, length: int) -> None:
    dice = random.Random(seed)
    request, actions = open_request(n=n, max_attempts=1000, first_token_s=1e7, inter_token_s=1e7, total_s=1e7)
    wanted = [[f"{index}.{k} " for k in range(length)] for index in range(n)]
    now_s = 0.0
    while request.state is not State.ENDED:
        attempt = request.attempt
        now_s = _run_attempt(request, actions, _frames_of_attempt(request, wanted, dice), dice, loss, now_s)
        if request.attempt == attempt and request.state is State.QUEUED:
            request.job_vanished(attempt, now_s)
        elif request.attempt == attempt and request.state is State.RUNNING:
            lose_worker(request, now_s)
    texts = [""] * n
    for event in request.mailbox._events:
        if isinstance(event, Tokens):
            texts[event.index] += event.text
    assert texts == ["".join(words) for words in wanted]
    assert request.completion_tokens == n * length
    assert actions.ends == 1


def _frames_of_attempt(request: OpenRequest, wanted: list[list[str]], dice: random.Random) -> list[Frame]:
    attempt = request.attempt
    frames: list[Frame] = [accepted(attempt)]
    left = []
    for index, words in enumerate(wanted):
        choice = request.choices[index]
        held = len(choice.token_ids)
        left.append([] if choice.finish_reason else list(enumerate(words))[held:])
    while any(left):
        index = dice.choice([i for i, words in enumerate(left) if words])
        number, word = left[index].pop(0)
        reason = "stop" if number == len(wanted[index]) - 1 else None
        frames.append(tokens(len(frames), word, (number,), attempt, index=index, finish_reason=reason))
    return [*frames, finished(len(frames), attempt)]


def _run_attempt(
    request: OpenRequest, actions: RecordedActions, sent: list[Frame], dice: random.Random, loss: float, now_s: float
) -> float:
    attempt, worker = request.attempt, f"w{request.attempt}"
    dies_after = dice.randrange(len(sent)) if dice.random() < loss else len(sent)
    for seq, frame in enumerate(sent[:dies_after]):
        now_s += 0.5
        if dice.random() >= loss:
            request.on_frame(worker, frame, now_s)
        if dice.random() < loss:
            request.on_frame(worker, sent[dice.randrange(seq + 1)], now_s)
        if actions.asked and actions.asked[-1][1] == attempt and dice.random() >= loss:
            for again in sent[actions.asked[-1][2] : seq + 1]:
                request.on_frame(worker, again, now_s)
    return now_s
