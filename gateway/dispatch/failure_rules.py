"""Rules that turn a worker's failure into another attempt or into the client's error."""

import math
from typing import TYPE_CHECKING, Final

from gateway.dispatch.attempts import MAX_BUSY_FAILURES
from gateway.request.mailbox import Failure
from gateway.request.request import Admission
from protocol.errors import ErrorCode
from protocol.job import Failed

if TYPE_CHECKING:
    from gateway.dispatch.request import OpenRequest

VANISHED: Final = Failure(ErrorCode.JOB_VANISHED, "the job vanished from the queue")
BROKEN_OFF_TWICE: Final = (
    "The server broke the answer off twice, and it is not paid for a third time: check the server of this pool, "
    "or send the request again."
)
CLOCK_SKEW_S: Final = 1.0  # between a gateway and a worker


def is_premature(frame: Failed, queue_deadline_s: float, now_s: float) -> bool:
    """Return whether a worker ends the request's wait too early: its clock is wrong, and others may take the job."""
    return frame.code == ErrorCode.DEADLINE_EXCEEDED and now_s < queue_deadline_s - CLOCK_SKEW_S


def verdict_of(frame: Failed, admission: Admission, now_s: float) -> Failure:
    """Return the failure that the client sees."""
    code = _known_code(frame.code)
    if code is ErrorCode.DEADLINE_EXCEEDED and now_s < admission.deadline_s - CLOCK_SKEW_S:
        code = ErrorCode.QUEUE_WAIT_TIMEOUT  # the worker was told only until when it may wait
    # The engine knows token ids only; the caller knows the field that they were made from.
    param = admission.prompt_param if frame.param == "prompt_ids" else frame.param
    return Failure(code, frame.message, param)


def why_over(request: "OpenRequest") -> Failure | None:
    """Return why a request whose attempt has failed gets no other, or None."""
    if request.log.is_busy_too_often:
        return Failure(ErrorCode.WAIT_TOO_LONG, f"the servers of this model asked to wait {MAX_BUSY_FAILURES} times")
    if request.log.exhausted:
        return Failure(ErrorCode.ATTEMPTS_EXHAUSTED, request.log.why(request.attempt))
    if request.log.is_repeated and not _leaves_pool(request):
        return Failure(ErrorCode.ATTEMPTS_EXHAUSTED, f"{request.log.why(request.attempt)}. {BROKEN_OFF_TWICE}")
    if request.choices.is_encoded and not request.admission.stream:
        if not request.log.drop():
            return Failure(ErrorCode.ATTEMPTS_EXHAUSTED, f"{request.log.why(request.attempt)}. {BROKEN_OFF_TWICE}")
        drop_answer(request)  # its caller has been told nothing of it
    return None if request.choices.may_go_on else answer_cut(request)


def answer_cut(request: "OpenRequest") -> Failure:
    """Return the failure of a stream that no live worker can resume."""
    why = f": {failures[-1].reason}" if (failures := request.log.failures) else ""
    end = "Text already sent is not repeated: send the request again."
    message = f"The stream was interrupted and no worker can resume it{why}. {end}"
    return Failure(ErrorCode.ANSWER_CUT, message)


def _leaves_pool(request: "OpenRequest") -> bool:
    """Avoid every worker of the pool whose server repeats a fault; return False if no other pool is left."""
    failed, takers = request.log.failed_pools, request.takers()
    for beat in takers:
        if beat.pool in failed:
            request.log.avoid_worker(beat.worker_id)
    return any(beat.takes_jobs and beat.pool not in failed for beat in takers)


def is_excused(request: "OpenRequest", code: str) -> bool:
    """Return whether a failed attempt uses up none: it made no token, and the request has not failed at another pool.

    A server that refuses everything takes jobs faster than healthy ones. A request that fails everywhere has an end: at
    the last pool its failures count.
    """
    current, log = request.current, request.log
    if code != ErrorCode.ENGINE_ERROR or current.accepted is None or request.attempt_tokens or current.answered_inputs:
        return False
    failed = {current.accepted.pool, *log.failed_pools}
    return any(beat.takes_jobs and beat.pool not in failed for beat in request.takers())


def may_run_elsewhere(request: "OpenRequest", timeout: Failure) -> bool:
    """Return whether a worker's silence ends its attempt alone, as another one is free."""
    if timeout.code not in {ErrorCode.FIRST_TOKEN_TIMEOUT, ErrorCode.INTER_TOKEN_TIMEOUT}:
        return False
    silent = {request.worker_id, *request.log.avoid}
    takers = request.takers()
    return any(beat.takes_jobs and beat.free_sequences and beat.worker_id not in silent for beat in takers)


def why_waited_in_vain(request: "OpenRequest", timeout: Failure) -> Failure:
    """Return why a request waited until its time limit: its servers asked to wait, or else ``timeout``."""
    takers = request.takers()
    waits_ms = [beat.paused.wait_ms for beat in takers if beat.paused is not None and beat.paused.wait_ms]
    all_wait = bool(takers) and len(waits_ms) == len(takers)
    if not all_wait and not request.log.was_asked_to_wait:
        return timeout
    retry_after_s = math.ceil(min(waits_ms) / 1000) if all_wait else None
    message = "the servers of this model asked to wait, and none took the request in time"
    return Failure(ErrorCode.WAIT_TOO_LONG, message, retry_after_s=retry_after_s)


def drop_answer(request: "OpenRequest") -> None:
    """Drop what is held of the answer: the next attempt begins it again."""
    request.choices.clear()
    request.current.tokens_before = 0
    request.mailbox.drop(request.request_id)


def _known_code(code: str) -> ErrorCode:
    try:
        return ErrorCode(code)
    except ValueError:  # of a newer worker
        return ErrorCode.INTERNAL_ERROR


def too_much_unread(admission: Admission) -> Failure:
    """Return the failure of a request whose unread answer exceeds the buffer."""
    if admission.stream:
        return Failure(ErrorCode.SLOW_CLIENT, "the client reads more slowly than the buffer allows")
    message = (
        "the answer has become larger than the gateway keeps for one key or team until it is complete;"
        " ask for fewer tokens, choices or log-probabilities, or for a stream"
    )
    return Failure(ErrorCode.ANSWER_TOO_LARGE, message)
