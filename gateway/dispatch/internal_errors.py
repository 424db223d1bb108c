"""An unexpected exception while handling one request ends that request and nothing else."""

import contextlib
import logging
import time
from typing import Final

from gateway.dispatch.actions import Actions
from gateway.dispatch.request import OpenRequest
from gateway.request.mailbox import Ended, Failure
from gateway.request.states import State
from protocol.errors import ErrorCode

_FAILURE: Final = Failure(ErrorCode.INTERNAL_ERROR, "the gateway made a mistake with this request")

log = logging.getLogger(__name__)


def fail_alone(request: OpenRequest, actions: Actions, mistake: Exception) -> None:
    """Log an exception and end its request with an internal error.

    In order where that works: its worker is told, and its counts are waited for. A request that cannot be stopped so,
    or that fails again while its counts are waited for, ends at once.
    """
    log.error("request %s fails by a mistake of the gateway's", request.request_id, exc_info=mistake)
    now_s = time.monotonic()
    if request.state in {State.QUEUED, State.RUNNING}:
        try:
            request.fail(_FAILURE, now_s)
        except Exception:
            log.exception("request %s cannot be stopped in order", request.request_id)
        else:
            return
    if request.state is not State.ENDED:
        _end_at_once(request, actions, now_s)


def _end_at_once(request: OpenRequest, actions: Actions, now_s: float) -> None:
    request.state, request.ended_s = State.ENDED, now_s
    request.outcome, request.failure = "failed", request.failure or _FAILURE
    with contextlib.ExitStack() as stack:  # each of them whatever becomes of the others; the last one first
        stack.callback(actions.ended, request)
        stack.callback(request.ticket.close)
        stack.callback(actions.attempt_over, request)
        if request.on_end is not None:
            stack.callback(request.on_end, Ended(request.failure))
        stack.callback(request.mailbox.wake)
        stack.callback(request.mailbox.put, Ended(request.failure))
