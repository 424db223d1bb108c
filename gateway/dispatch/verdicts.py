"""What the caller is told where a worker refuses his request for good, and what is noted of an attempt."""

from typing import Final

from gateway.dispatch.admission import Admission
from gateway.dispatch.mailbox import Failure
from protocol.errors import ErrorCode
from protocol.messages import Failed

VANISHED: Final = Failure(ErrorCode.JOB_VANISHED, "the job vanished from the queue")
CLOCK_SKEW_S: Final = 1.0  # between a gateway and a worker


def is_premature(frame: Failed, queue_deadline_s: float, now_s: float) -> bool:
    """Whether a worker takes the request's wait for over while it is not: its clock is wrong, and others may do."""
    return frame.code == ErrorCode.DEADLINE_EXCEEDED and now_s < queue_deadline_s - CLOCK_SKEW_S


def verdict_of(frame: Failed, admission: Admission, now_s: float) -> Failure:
    """The failure that the caller sees."""
    code = _known_code(frame.code)
    if code is ErrorCode.DEADLINE_EXCEEDED and now_s < admission.deadline_s - CLOCK_SKEW_S:
        code = ErrorCode.QUEUE_WAIT_TIMEOUT  # the worker was told only until when it may wait
    # The engine knows token ids only; the caller knows the field that they were made from.
    param = admission.prompt_param if frame.param == "prompt_ids" else frame.param
    return Failure(code, frame.message, param)


def _known_code(code: str) -> ErrorCode:
    try:
        return ErrorCode(code)
    except ValueError:  # of a newer worker
        return ErrorCode.INTERNAL_ERROR


def too_much_unread(admission: Admission) -> Failure:
    """What a caller is told whose answer takes more than may be kept of what is not read."""
    if admission.stream:
        return Failure(ErrorCode.SLOW_CLIENT, "the client reads more slowly than the buffer allows")
    message = (
        "the answer has become larger than the gateway keeps for one key or team until it is complete;"
        " ask for fewer tokens, choices or log-probabilities, or for a stream"
    )
    return Failure(ErrorCode.ANSWER_TOO_LARGE, message)
