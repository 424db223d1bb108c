import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dispatch import request as request_module
from gateway.dispatch.admission import Admission
from gateway.dispatch.mailbox import Ended, Failure, StillWaiting
from gateway.dispatch.request import OpenRequest, State
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode
from protocol.messages import Accepted, Cancel, Failed, Finished, Frame, Sampling, Tokens, unpack_token_ids
from tests.unit.gateway.admission.controls import ticket_of

ID = "req_1"


@dataclass
class RecordedActions:
    """What the request asked for, in order."""

    published: list[int] = field(default_factory=list)
    withdrawn: list[int] = field(default_factory=list)
    cancelled: list[tuple[str, Cancel]] = field(default_factory=list)
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    ends: int = 0

    def publish(self, request: OpenRequest) -> None:
        self.published.append(request.attempt)

    def withdraw(self, request: OpenRequest) -> None:
        self.withdrawn.append(request.attempt)

    def cancel(self, worker_id: str, cancel: Cancel) -> None:
        self.cancelled.append((worker_id, cancel))

    def ask_again(self, request: OpenRequest, worker_id: str, from_seq: int) -> None:
        self.asked.append((worker_id, request.attempt, from_seq))

    def ended(self, request: OpenRequest) -> None:
        self.ends += 1


def open_request(
    n: int = 1, *, stream: bool = True, max_attempts: int = 3, **timeouts: float
) -> tuple[OpenRequest, RecordedActions]:
    admission = Admission(
        request_id=ID,
        endpoint="completions",
        model="m",
        key_id="k",
        key_name="k",
        tenant="k",
        stream=stream,
        prompt_ids=b"\x01\x00\x00\x00",
        prompt_tokens=1,
        sampling=Sampling(max_tokens=100, n=n),
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


def always_alive(_worker_id: str, _now_s: float) -> bool:
    return True


def never_alive(_worker_id: str, _now_s: float) -> bool:
    return False


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
    told = [cancel for _, cancel in actions.cancelled]
    assert told == ([Cancel(ID, 1)] if isinstance(stale, Accepted) else [])


async def test_another_worker_with_the_same_attempt_is_stopped() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("other", accepted(), 1.0)
    request.on_frame("other", tokens(1, "OTHER"), 1.0)
    request.on_frame("w", tokens(1, "mine"), 1.0)
    assert await texts(request) == "mine"
    assert actions.cancelled == [("other", Cancel(ID, 1))]


async def test_a_gap_is_asked_for_once_in_a_while() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(2), 1.0)
    request.on_frame("w", tokens(3), 1.1)
    assert actions.asked == [("w", 1, 1)]
    request.on_frame("w", tokens(4), 1.0 + request_module.RESEND_GAP_S)
    assert actions.asked == [("w", 1, 1)] * 2


async def test_a_gap_that_stays_open_is_a_failed_attempt() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 0.0)
    for tick in range(int(request_module.GAP_LIMIT_S) + 1):
        request.on_frame("w", tokens(2 + tick), float(tick))
        request.on_tick(float(tick), always_alive, connected=True)
    assert actions.published == [2]


async def test_the_next_attempt_resumes() -> None:
    request, actions = open_request(n=3)
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, "héé", (1, 2), index=0), 1.0)
    request.on_frame("w", tokens(2, "", (3,), index=2, finish_reason="length"), 1.0)
    request.on_tick(1.5, never_alive, connected=True)
    assert (actions.published, actions.withdrawn, actions.cancelled) == ([2], [1], [("w", Cancel(ID, 1))])
    first, last = request.choices.resume_points()
    assert (first.index, unpack_token_ids(first.token_ids), first.text_chars, first.finish_reason) == (
        0,
        [1, 2],
        3,
        None,
    )
    assert (last.index, unpack_token_ids(last.token_ids), last.text_chars, last.finish_reason) == (2, [3], 0, "length")


async def test_no_judgement_while_the_queue_server_is_away() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_tick(30.0, never_alive, connected=False)
    assert (request.state, actions.published, actions.asked) == (State.RUNNING, [], [])


async def test_probes_then_the_next_attempt() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 0.0)
    request.on_frame("w", tokens(1), 0.0)
    now_s = 0.0
    while request.attempt == 1:
        now_s += 0.25
        request.on_tick(now_s, always_alive, connected=True)
    # From the last frame on: a worker that has nothing new sends that one, which is a sign of life.
    assert actions.asked == [("w", 1, 1)] * request_module.MAX_PROBES
    assert now_s == request_module.SILENCE_LIMIT_S + request_module.MAX_PROBES * request_module.PROBE_PERIOD_S


async def test_an_answered_probe_starts_the_count_anew() -> None:
    request, actions = open_request(first_token_s=1000)
    request.on_frame("w", accepted(), 0.0)
    for tick in range(1, 200):
        request.on_tick(tick * 0.5, always_alive, connected=True)
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
    request.on_tick(3.0, never_alive, connected=True)
    assert (request.state, request.outcome, actions.published) == (State.ENDED, "ok", [])


async def test_an_end_before_all_choices_are_complete_is_a_failed_attempt() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1), 1.0)
    request.on_frame("w", finished(2), 1.0)
    assert (request.state, actions.published) == (State.QUEUED, [2])


async def test_attempts_are_bounded() -> None:
    request, actions = open_request(max_attempts=2)
    request.on_frame("w", failed(0), 1.0)
    request.on_frame("w", failed(0, attempt=2), 1.0)
    assert request.failure is not None
    assert request.failure.code is ErrorCode.ATTEMPTS_EXHAUSTED
    assert (request.state, actions.published) == (State.ENDED, [2])


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


async def test_a_silent_worker_does_not_hold_the_record_back() -> None:
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    request.on_frame("w", tokens(1, ids=(1, 2)), 1.0)
    request.cancel(2.0)
    request.on_tick(3.0, always_alive, connected=True)
    assert len(actions.cancelled) == 2  # said again, as it may have been lost
    request.on_tick(2.0 + request_module.CANCEL_LIMIT_S, always_alive, connected=True)
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
    request.on_tick(limit_s - 0.1, always_alive, connected=False)
    assert request.failure is None
    request.on_tick(limit_s, always_alive, connected=False)
    assert request.failure is not None
    assert (request.failure.code, request.state) == (code, State.STOPPING)


async def test_signs_of_life_for_those_who_stream() -> None:
    for stream in (True, False):
        request, _ = open_request(stream=stream, queued_comment_s=10.0)
        for now_s in (9.9, 10.0, 15.0, 20.0):
            request.on_tick(now_s, always_alive, connected=True)
        assert len(request.mailbox) == (2 if stream else 0)
    assert StillWaiting("queued").state == State.QUEUED.value


async def test_a_client_that_lags_too_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_module, "MAX_UNREAD_EVENTS", 10)
    request, actions = open_request()
    request.on_frame("w", accepted(), 1.0)
    for seq in range(1, 12):
        request.on_frame("w", tokens(seq), 1.0)
    assert request.failure is not None
    assert request.failure.code is ErrorCode.SLOW_CLIENT
    assert actions.cancelled == [("w", Cancel(ID, 1))]
    assert await request.mailbox.take() == [Ended(request.failure)]


@given(seed=st.integers(0, 2**32), loss=st.floats(0, 0.6), n=st.integers(1, 3), length=st.integers(1, 15))
@settings(max_examples=150, deadline=None)
def test_whatever_is_lost_or_repeated_the_text_comes_out_once(seed: int, loss: float, n: int, length: int) -> None:
    """Workers die, frames get lost and come twice; the caller's text is that of an undisturbed run."""
    dice = random.Random(seed)
    request, actions = open_request(n=n, max_attempts=1000, first_token_s=1e9, inter_token_s=1e9, total_s=1e9)
    wanted = [[f"{index}.{k} " for k in range(length)] for index in range(n)]
    now_s = 0.0
    while request.state is not State.ENDED:
        attempt = request.attempt
        now_s = _run_attempt(request, actions, _frames_of_attempt(request, wanted, dice), dice, loss, now_s)
        if request.attempt == attempt and request.state is State.QUEUED:
            request.job_vanished(attempt, now_s)
        elif request.attempt == attempt and request.state is State.RUNNING:
            request.on_tick(now_s, never_alive, connected=True)
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
