"""Failures over HTTP: statuses, types and advice for each of the protocol's error codes."""

from typing import Final

from msgspec import Struct

from gateway.errors import RETRY_LATER_S, RETRY_SOON_S, ApiError
from gateway.request.mailbox import Failure
from protocol.errors import ErrorCode


class FailureKind(Struct, frozen=True):
    """HTTP form of one of the protocol's error codes."""

    status: int
    type: str = "server_error"
    should_retry: bool | None = None
    retry_after_s: int | None = None


_BAD_REQUEST: Final = FailureKind(400, "invalid_request_error", should_retry=False)
_CONTENDED: Final = FailureKind(429, "rate_limit_error", should_retry=True, retry_after_s=RETRY_LATER_S)
_NO_CAPACITY: Final = FailureKind(503, should_retry=True, retry_after_s=RETRY_LATER_S)
_TOO_SLOW: Final = FailureKind(504, should_retry=False)  # the whole wait would begin again
_INTERNAL: Final = FailureKind(500)

FAILURES: Final[dict[ErrorCode, FailureKind]] = {
    ErrorCode.INVALID_REQUEST: _BAD_REQUEST,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: _BAD_REQUEST,
    ErrorCode.GRAMMAR_TOO_COMPLEX: _BAD_REQUEST,
    ErrorCode.KEY_REVOKED: FailureKind(401, "invalid_request_error", should_retry=False),
    ErrorCode.QUEUE_FULL: _NO_CAPACITY,
    ErrorCode.OVERLOADED: FailureKind(503, should_retry=True, retry_after_s=RETRY_SOON_S),
    ErrorCode.USAGE_NOT_STORED: FailureKind(503, should_retry=True, retry_after_s=RETRY_LATER_S),
    ErrorCode.TOO_MANY_QUEUED: _CONTENDED,
    ErrorCode.TOO_MANY_QUEUED_TOKENS: _CONTENDED,
    ErrorCode.TOO_MANY_QUEUED_BYTES: _CONTENDED,
    ErrorCode.WAIT_TOO_LONG: _CONTENDED,
    ErrorCode.NO_FREE_PLACE: _CONTENDED,
    ErrorCode.TENANT_IN_FLIGHT: _CONTENDED,
    ErrorCode.TENANT_QUEUED: _CONTENDED,
    ErrorCode.NO_WORKERS: _NO_CAPACITY,
    ErrorCode.MODEL_CHANGED: FailureKind(503, should_retry=True, retry_after_s=RETRY_SOON_S),
    ErrorCode.ANSWER_CUT: FailureKind(502, should_retry=True, retry_after_s=RETRY_SOON_S),
    ErrorCode.DEADLINE_EXCEEDED: _TOO_SLOW,
    ErrorCode.QUEUE_WAIT_TIMEOUT: _NO_CAPACITY,
    ErrorCode.SHUTTING_DOWN: FailureKind(503, should_retry=True, retry_after_s=RETRY_SOON_S),
    ErrorCode.FIRST_TOKEN_TIMEOUT: _TOO_SLOW,
    ErrorCode.INTER_TOKEN_TIMEOUT: _TOO_SLOW,
    ErrorCode.TOTAL_TIMEOUT: _TOO_SLOW,
    ErrorCode.SLOW_CLIENT: FailureKind(408, "invalid_request_error", should_retry=False),
    ErrorCode.ANSWER_TOO_LARGE: _BAD_REQUEST,
    ErrorCode.ENGINE_ERROR: _INTERNAL,
    ErrorCode.ENGINE_BUSY: _INTERNAL,
    ErrorCode.ENGINE_DIED: _INTERNAL,
    ErrorCode.WORKER_DRAINING: _NO_CAPACITY,
    ErrorCode.WORKER_LOST: _INTERNAL,
    ErrorCode.JOB_VANISHED: _INTERNAL,
    ErrorCode.UNKNOWN_ATTEMPT: _INTERNAL,
    ErrorCode.GATEWAY_LOST: _INTERNAL,
    ErrorCode.ATTEMPTS_EXHAUSTED: FailureKind(502, should_retry=False),  # several workers: a retry makes it only worse
    ErrorCode.INTERNAL_ERROR: _INTERNAL,
}


class RequestFailed(ApiError):
    """The request was refused or ended without an answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, param=failure.param, code=failure.code.value)
        kind = FAILURES[failure.code]
        self.status = kind.status
        self.type = kind.type
        self.should_retry = False if failure.is_wanted else kind.should_retry
        self.retry_after_s = failure.retry_after_s or kind.retry_after_s
