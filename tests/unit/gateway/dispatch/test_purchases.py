"""How often the gateway pays for an answer from a server that breaks it off."""

import pytest

from gateway.dispatch.attempt import PROGRESS_ALLOWANCE
from gateway.dispatch.lifecycle import State
from protocol.errors import ErrorCode
from protocol.job import Accepted, Failed
from tests.unit.gateway.dispatch.opened_requests import ID, open_request, tokens
from tests.unit.gateway.dispatch.test_elsewhere import worker

MAX_ATTEMPTS = 3
NO_END = "the server's answer has no end"
CASES: dict[str, tuple[list[tuple[str, int, str, str]], int]] = {
    # attempts (pool, tokens, reason, code), of which the last repeats · number of attempts
    "cut at the same place": ([("a", 3, NO_END, "engine_error")], 2),
    "cut where the answer is whole": ([("a", 9, NO_END, "engine_error"), ("a", 0, NO_END, "engine_error")], 2),
    "cut by two pools": ([("a", 3, NO_END, "engine_error"), ("b", 3, NO_END, "engine_error")], 3),
    "refused after a cut": (
        [("a", 3, NO_END, "engine_error"), ("a", 0, "it answered 401", "engine_error")],
        MAX_ATTEMPTS,
    ),
    "killed at the same place": ([("a", 3, "killed", "engine_died")], MAX_ATTEMPTS * PROGRESS_ALLOWANCE),
    "no token at all": ([("a", 0, NO_END, "engine_error")], MAX_ATTEMPTS),
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_not_paid_for_more_than_twice(case: str) -> None:
    plays, attempts = CASES[case]
    request, _ = open_request(max_attempts=MAX_ATTEMPTS)
    count = 0
    while request.state is not State.ENDED:
        pool, made, reason, code = plays[min(count, len(plays) - 1)]
        count += 1
        number = request.attempt
        request.on_frame("w", Accepted(ID, number, 0, "w", pool, "provider", "region", 1.0), 1.0)
        for seq in range(1, made + 1):
            request.on_frame("w", tokens(seq, attempt=number), 1.0)
        request.on_frame("w", Failed(ID, number, made + 1, code, reason, retryable=True), 1.0)
    assert count == attempts
    assert request.failure is not None
    assert request.failure.code is ErrorCode.ATTEMPTS_EXHAUSTED
    assert plays[-1][2] in request.failure.message


def test_another_pool_is_tried_before_giving_up() -> None:
    request, actions = open_request(max_attempts=MAX_ATTEMPTS)
    actions.others = [worker("a"), worker("b")]
    for number in range(1, 3):
        request.on_frame("w-a", Accepted(ID, number, 0, "w-a", "a", "provider", "region", 1.0), 1.0)
        request.on_frame("w-a", tokens(1, attempt=number), 1.0)
        request.on_frame("w-a", Failed(ID, number, 2, "engine_error", NO_END, retryable=True), 1.0)
    assert request.state is State.QUEUED
    assert "w-a" in request.log.avoid
    assert "w-b" not in request.log.avoid


def test_breaks_at_different_points_are_failures_of_the_server() -> None:
    request, _ = open_request(max_attempts=MAX_ATTEMPTS)
    for number in range(1, MAX_ATTEMPTS * PROGRESS_ALLOWANCE):
        request.on_frame("w", Accepted(ID, number, 0, "w", "a", "provider", "region", 1.0), 1.0)
        for seq in range(1, number + 1):
            request.on_frame("w", tokens(seq, attempt=number), 1.0)
        request.on_frame("w", Failed(ID, number, number + 1, "engine_error", "it broke", retryable=True), 1.0)
        assert request.state is State.QUEUED
