"""Requests with one answer: their shared mailbox, and their end."""

from typing import Any

from gateway.api.calls import CompletionCall
from gateway.dispatch.lifecycle import OpenRequest, State
from gateway.dispatch.stream import AnswerStream
from gateway.request.mailbox import LOOSE_EVENTS, MAX_UNREAD_BYTES, Ended, SharedMailbox, StillWaiting
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode
from protocol.job import Cancel, Tokens
from tests.unit.gateway.admission.controls import admission, control
from tests.unit.gateway.dispatch.opened_requests import Closing, RecordedActions, accepted, failed, finished, tokens

COUNT = 3
COMPLETION = CompletionCall(b'{"model":"m","prompt":"Hi"}')


def open_group(**timeouts: float) -> tuple[AnswerStream[Any], list[OpenRequest], RecordedActions]:
    gate, actions, mailbox = control(), RecordedActions(), SharedMailbox(COUNT)
    limits = TimeoutSettings.model_validate(timeouts)
    requests = [
        OpenRequest(
            gate.enter(admission(f"req_1-{number}", param=f"prompt[{number}]", tokens=number)),
            limits,
            3,
            actions,
            0.0,
            mailbox=mailbox,
        )
        for number in range(COUNT)
    ]
    return AnswerStream([COMPLETION] * COUNT, requests, Closing()), requests, actions


async def test_it_ends_when_the_last_has_ended() -> None:
    group, requests, _ = open_group()
    ends: list[Ended] = []
    group.on_end = ends.append
    for number, request in enumerate(requests):
        assert (group.state, ends) == (State.RUNNING if number else State.QUEUED, [])
        request.on_frame("w", accepted(), 1.0)
        request.on_frame("w", tokens(1, finish_reason="stop"), 1.0)
        request.on_frame("w", finished(2), 1.0)
    events = await group.mailbox.take()
    assert [type(event) for event in events] == [Tokens, Tokens, Tokens, Ended]
    assert ends == [Ended(None)]
    assert (group.state, group.outcome, group.failure) == (State.ENDED, "ok", None)
    assert (group.prompt_tokens, group.completion_tokens) == (3, 3)


async def test_the_first_failure_ends_all_and_is_the_answer() -> None:
    group, (first, second, third), actions = open_group()
    ends: list[Ended] = []
    group.on_end = ends.append
    for request in (first, second):
        request.on_frame("w", accepted(), 1.0)
    second.on_frame("w", failed(1, code="engine_error", retryable=False), 1.0)
    assert actions.cancelled == [("w", Cancel("req_1-0", 1))]
    assert third.state is State.STOPPING
    assert (second.outcome, {first.outcome, third.outcome}) == ("failed", {"cancelled"})
    first.on_frame("w", tokens(1), 1.0)  # sent before the cancel arrived
    assert group.failure is not None
    assert (group.failure.code, group.failure.param) == (ErrorCode.ENGINE_ERROR, "prompt[1]")
    assert [type(event) for event in await group.mailbox.take()] == [Ended]
    assert (ends, len(group.mailbox)) == ([Ended(group.failure)], 0)


async def test_a_client_that_leaves_ends_it_without_a_failure() -> None:
    group, requests, _ = open_group()
    for request in requests:
        request.cancel(1.0)
    assert await group.mailbox.take() == [Ended(None)]
    assert (group.outcome, group.failure) == ("cancelled", None)


async def test_while_all_wait_there_is_one_keep_alive() -> None:
    group, requests, _ = open_group(queued_comment_s=10.0)
    for request in requests:
        request.on_tick(10.0, connected=True)
    assert await group.mailbox.take() == [StillWaiting("queued")]
    place = group.queue_position()
    assert place is not None
    assert place.position == COUNT


def test_each_request_adds_to_the_bound_on_unread_bytes() -> None:
    group, (first, *_), _ = open_group()
    first.on_frame("w", accepted(), 1.0)
    seq = 0
    while group.failure is None:
        seq += 1
        first.on_frame("w", tokens(seq, text="x" * 50_000, ids=()), 1.0)
        most_bytes = group.mailbox.held_bytes
        assert most_bytes <= COUNT * MAX_UNREAD_BYTES
    assert 50_000 * (seq - LOOSE_EVENTS) > COUNT * MAX_UNREAD_BYTES
