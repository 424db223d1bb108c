"""Time limits of a request in each state; each has an error of its own."""

import asyncio
from collections.abc import Callable
from typing import Final

from gateway.dispatch.attempts import CurrentAttempt
from gateway.request.mailbox import Failure
from gateway.request.request import Admission
from gateway.settings import TimeoutSettings
from protocol.errors import ErrorCode

RESCUE_QUEUE_WAIT_S: Final = 5.0  # for an attempt after the first, even if the first has used all patience up
WITHDRAW_LINGER_S: Final = 2.0  # how long a worker that pulled the job at the last moment may still say so
ACCEPT_LIMIT_S: Final = 1.0  # within which a worker takes a request that is not to be queued
NEVER_S: Final = float("inf")
TIMER_SLACK_S: Final = 0.001  # timers may be early by the clock's resolution


class DeadlineTimers:
    """Timers of the requests whose clients have set a deadline: to the point, where the sweep may be late."""

    def __init__(self) -> None:
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by request

    def set(self, admission: Admission, now_s: float, call: Callable[[], None]) -> None:
        """Call when the client's deadline has passed, if it has set one."""
        if admission.deadline_s != NEVER_S:
            delay_s = admission.deadline_s - now_s + TIMER_SLACK_S
            self._timers[admission.request_id] = asyncio.get_running_loop().call_later(delay_s, call)

    def drop(self, request_id: str) -> None:
        """Call nothing."""
        timer = self._timers.pop(request_id, None)
        if timer is not None:
            timer.cancel()


class QueueWaitBudget:
    """Time that a request may still wait in the queue, over all its attempts."""

    def __init__(self, limit_s: float) -> None:
        self.left_s = limit_s

    def spend(self, waited_s: float) -> None:
        """Deduct the wait of an attempt. A little always stays, for a rescue in mid-stream."""
        least_s = min(RESCUE_QUEUE_WAIT_S, self.left_s)
        self.left_s = max(least_s, self.left_s - waited_s)


def overdue(
    limits: TimeoutSettings,
    admission: Admission,
    attempt: CurrentAttempt,
    queue_deadline_s: float | None,
    now_s: float,
) -> Failure | None:
    """Return the exceeded limit, if any. ``queue_deadline_s``: None once a worker has the attempt."""
    if now_s >= admission.deadline_s:
        return Failure(ErrorCode.DEADLINE_EXCEEDED, "the deadline that the caller has set has passed")
    if now_s - admission.received_s >= limits.total_s:
        return Failure(ErrorCode.TOTAL_TIMEOUT, f"the request took longer than {limits.total_s:g} s")
    if queue_deadline_s is not None:
        return _overdue_in_queue(admission, attempt, queue_deadline_s, now_s)
    return _overdue_token(limits, attempt, now_s)


def _overdue_in_queue(admission: Admission, attempt: CurrentAttempt, deadline_s: float, now_s: float) -> Failure | None:
    """Return the limit exceeded while no worker has accepted the attempt."""
    waited_s = now_s - attempt.queued_s
    if now_s >= deadline_s:
        return Failure(ErrorCode.QUEUE_WAIT_TIMEOUT, f"no worker took the request within {waited_s:.1f} s")
    if admission.do_not_queue and attempt.number == 1 and waited_s >= ACCEPT_LIMIT_S:
        return Failure(ErrorCode.NO_FREE_PLACE, "no worker took the request at once", retry_after_s=1, is_wanted=True)
    return None


def _overdue_token(limits: TimeoutSettings, attempt: CurrentAttempt, now_s: float) -> Failure | None:
    """Return the limit exceeded while a worker runs the attempt."""
    if attempt.last_token_s is not None:
        if now_s - attempt.last_token_s >= limits.inter_token_s:
            return Failure(ErrorCode.INTER_TOKEN_TIMEOUT, f"no further token within {limits.inter_token_s:g} s")
    elif attempt.accepted_s is not None and now_s - attempt.accepted_s >= limits.first_token_s:
        return Failure(ErrorCode.FIRST_TOKEN_TIMEOUT, f"no first token within {limits.first_token_s:g} s")
    return None
