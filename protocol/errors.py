"""Stable error codes, shared by frames, records, logs, and answers.

    ExpectedError                 base of errors that a command prints as one line

    ProtocolError                 a message that this version cannot read
    └── NewerVersion              a message of a newer build
    BusError                      an operation of the queue server failed
    ├── BusTimeout                no answer within the limit (the outcome is unknown: retry with the same id)
    │   └── NoResponders         the subject has no subscriber
    ├── StreamFull                the stream is full and discards new messages
    ├── PayloadTooLarge           the message exceeds the server's max_payload
    └── ApiError                  the JetStream API returned an error

``gateway.api.errors`` maps codes to HTTP statuses.
"""

from enum import StrEnum
from typing import Final

STREAM_NOT_FOUND: Final = 10059  # the code of an ApiError


class ExpectedError(Exception):
    """An error that the user can act on: commands print its message without a traceback."""


class ErrorCode(StrEnum):
    """The reason why a request or an attempt failed. Values are public and never change meaning."""

    # Invalid requests that only the engine can detect.
    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    # The client's key, or its request.
    KEY_REVOKED = "key_revoked"
    GRAMMAR_TOO_COMPLEX = "grammar_too_complex"  # for every worker
    # Capacity.
    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    USAGE_NOT_STORED = "usage_not_stored"  # neither the queue nor the local disk accepts usage records
    TOO_MANY_QUEUED = "too_many_queued"  # too many requests are waiting for the model
    TOO_MANY_QUEUED_TOKENS = "too_many_queued_tokens"
    TOO_MANY_QUEUED_BYTES = "too_many_queued_bytes"
    WAIT_TOO_LONG = "wait_too_long"  # the estimated wait exceeds the client's limit
    NO_WORKERS = "no_workers"  # and the queue is too long, or the client set do_not_queue
    NO_FREE_PLACE = "no_free_place"  # and the client set do_not_queue
    TENANT_IN_FLIGHT = "tenant_in_flight_exceeded"
    TENANT_QUEUED = "tenant_queued_exceeded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    MODEL_CHANGED = "model_changed"  # no worker runs the model version of the prompt or answer
    ANSWER_CUT = "answer_cut"  # no worker can resume the stream, and what was sent is not repeated
    # The attempt failed. The request may continue on another worker.
    ENGINE_ERROR = "engine_error"
    ENGINE_BUSY = "engine_busy"  # its server is busy (429 or 503); not a failure
    ENGINE_DIED = "engine_died"
    WORKER_DRAINING = "worker_draining"
    WORKER_LOST = "worker_lost"
    JOB_VANISHED = "job_vanished"  # it left the queue, but no worker accepted it
    UNKNOWN_ATTEMPT = "unknown_attempt"
    GATEWAY_LOST = "gateway_lost"  # the gateway of the request died; only in records
    # The gateway gave up the request.
    QUEUE_WAIT_TIMEOUT = "queue_wait_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105  # no password
    INTER_TOKEN_TIMEOUT = "inter_token_timeout"  # noqa: S105  # no password
    TOTAL_TIMEOUT = "total_timeout"
    SLOW_CLIENT = "slow_client"
    ANSWER_TOO_LARGE = "answer_too_large"  # for the memory limit of answers that are not streamed
    SHUTTING_DOWN = "shutting_down"
    # The request failed for good.
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    INTERNAL_ERROR = "internal_error"


class ProtocolError(ValueError):
    """A message cannot be decoded, or has another protocol version."""


class NewerVersion(ProtocolError):
    """A message has a newer protocol version. A newer build can read it."""


class BusError(ExpectedError):
    """An operation of the queue server failed."""


class BusTimeout(BusError):
    """No answer within the limit. The outcome is unknown: retry with the same message id."""


class NoResponders(BusTimeout):
    """The subject has no subscriber."""


class StreamFull(BusError):
    """The stream is full and discards new messages."""


class PayloadTooLarge(BusError):
    """The message is larger than the server's max_payload."""


class ApiError(BusError):
    """The JetStream API returned an error. ``code`` is JetStream's ``err_code``."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"JetStream error {code}: {description}")
        self.code = code
