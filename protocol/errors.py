"""Stable error codes: what goes wrong on the path, named once, the same in frames, records, logs and answers.

    ExpectedError                 the base of every error that a command prints as one line

    ProtocolError                 a message that this version cannot read
    └── NewerVersion              one of a newer build: others may read it
    BusError                      the queue server did not do what was asked
    ├── BusTimeout                no answer within the limit (the outcome is unknown: retry with the same id)
    │   └── NoResponders         the server says that the subject has no subscriber
    ├── StreamFull                the stream's bound is reached and it discards new messages
    ├── PayloadTooLarge           the message would exceed the server's max_payload
    └── ApiError                  the JetStream API answered with an error

HTTP statuses belong to the gateway's edge (``gateway.errors``); here is only the meaning.
"""

from enum import StrEnum
from typing import Final

STREAM_NOT_FOUND: Final = 10059  # the code of an ApiError


class ExpectedError(Exception):
    """An error that its reader can act on: a command prints the message alone, without a traceback."""


class ErrorCode(StrEnum):
    """The reason why a request or an attempt failed. Values are public and never change meaning."""

    # The caller's mistakes, found by the engine after the gateway let them pass.
    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    # The caller's key.
    KEY_REVOKED = "key_revoked"
    GRAMMAR_TOO_COMPLEX = "grammar_too_complex"  # for any worker
    # Capacity.
    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    USAGE_NOT_STORED = "usage_not_stored"  # neither the queue nor this machine's disk takes records
    TOO_MANY_QUEUED = "too_many_queued"  # requests that wait for the model
    TOO_MANY_QUEUED_TOKENS = "too_many_queued_tokens"
    TOO_MANY_QUEUED_BYTES = "too_many_queued_bytes"
    WAIT_TOO_LONG = "wait_too_long"  # the estimate exceeds the caller's patience
    NO_WORKERS = "no_workers"  # and too much, or a caller who will not wait
    NO_FREE_PLACE = "no_free_place"  # for a caller who will not wait
    TENANT_IN_FLIGHT = "tenant_in_flight_exceeded"
    TENANT_QUEUED = "tenant_queued_exceeded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    MODEL_CHANGED = "model_changed"  # nobody runs the weights any more that the answer, or its prompt's tokens, are of
    ANSWER_CUT = "answer_cut"  # no worker can resume the stream, and what was sent is not repeated
    # The attempt failed; the request may go on elsewhere.
    ENGINE_ERROR = "engine_error"
    ENGINE_BUSY = "engine_busy"  # its server asks to wait: nobody has failed
    ENGINE_DIED = "engine_died"
    WORKER_DRAINING = "worker_draining"
    WORKER_LOST = "worker_lost"
    JOB_VANISHED = "job_vanished"  # from the queue, and nobody has said to have accepted it
    UNKNOWN_ATTEMPT = "unknown_attempt"
    GATEWAY_LOST = "gateway_lost"  # nobody was left to answer; only in records
    # The gateway gave the request up.
    QUEUE_WAIT_TIMEOUT = "queue_wait_timeout"
    FIRST_TOKEN_TIMEOUT = "first_token_timeout"  # noqa: S105  # no password
    INTER_TOKEN_TIMEOUT = "inter_token_timeout"  # noqa: S105  # no password
    TOTAL_TIMEOUT = "total_timeout"
    SLOW_CLIENT = "slow_client"
    ANSWER_TOO_LARGE = "answer_too_large"  # one that is kept until it is complete
    SHUTTING_DOWN = "shutting_down"
    # The request failed for good.
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    INTERNAL_ERROR = "internal_error"


class ProtocolError(ValueError):
    """A message could not be decoded, or speaks another protocol version."""


class NewerVersion(ProtocolError):
    """A message speaks a newer protocol version: a newer build reads it."""


class BusError(ExpectedError):
    """The queue server did not do what was asked."""


class BusTimeout(BusError):
    """No answer within the limit; the outcome is unknown, so retry with the same message id."""


class NoResponders(BusTimeout):
    """The server says that the subject has no subscriber."""


class StreamFull(BusError):
    """The stream has reached its bound and discards new messages."""


class PayloadTooLarge(BusError):
    """The message is larger than the server's max_payload."""


class ApiError(BusError):
    """The JetStream API answered with an error; ``code`` is JetStream's ``err_code``."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"JetStream error {code}: {description}")
        self.code = code
