"""Errors of the API as the client sees them; statuses and types are defined here alone.

ApiError                     500  server_error
├── BadRequest               400  invalid_request_error
│   ├── MalformedHttp             malformed_http
│   ├── MalformedJson             the body is no JSON
│   ├── InvalidParameter          a field is wrong, or cannot be honoured
│   └── ContextLengthExceeded     context_length_exceeded
├── InvalidApiKey            401  invalid_api_key
├── LoginRequired            401  login_required
├── MissingScope             403  missing_scope
├── CrossOriginRequest            403  foreign_origin
├── HostedNotAllowed         403  hosted_not_allowed
├── ModelNotFound            404  model_not_found
├── NoTrustedPool            404  no_trusted_pool
├── OnlyTrustedPools         404  only_trusted_pools
├── UnknownObject            404  not_found
├── UnknownUrl               404  unknown_url
├── MethodNotAllowed         405  method_not_allowed
├── RequestTooSlow           408  request_timeout
├── NameInUse                409  name_in_use
├── IdempotencyKeyReused     409  idempotency_key_reused
├── AnswerNotKept            409  idempotency_answer_not_kept
├── BodyTooLarge             413  request_too_large
├── UnsupportedEncoding      415  unsupported_content_encoding
├── RateLimitExceeded        429  rate_limit_exceeded
├── TooManyConnections       429  too_many_connections
├── InsufficientQuota        429  insufficient_quota
├── HeadTooLarge             431  head_too_large
├── ModelNotReady            503  model_not_ready
├── Overloaded               503  overloaded
├── LimitsUnavailable        503  limits_unavailable
├── LedgerUnavailable             503  database_unavailable
├── StorageUnavailable       503  storage_unavailable
├── IdempotencyKeyBusy       503  idempotency_key_busy
└── RequestFailed                 a dispatch Failure; see FAILURES: 429 where workers are alive and too much waits
                                  (contended), 503 where there is no capacity, 504 where a deadline has passed

ClientDisconnected                nobody is left to be told
"""

import math
import random
from typing import Final

import msgspec

from db.accounts.masking import masked

RETRY_SOON_S: Final = 1
RETRY_LATER_S: Final = 5
LONGEST_RETRY_S: Final = 60.0  # clients ignore what is longer
RETRY_SPREAD: Final = 1.5  # the latest of those told to come back after a time, against the earliest

_encode_json = msgspec.json.Encoder().encode


def _spread_s(wait_s: float) -> float:
    """Return a little more than ``wait_s``, different each time: clients refused together must not return together."""
    latest_s = min(LONGEST_RETRY_S, wait_s * RETRY_SPREAD)
    return random.uniform(latest_s / RETRY_SPREAD, latest_s)  # noqa: S311


class ApiError(Exception):
    """The server had an internal error."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    other_codes: tuple[str, ...] = ()  # that one may have instead
    should_retry: bool | None = None  # None: the client's own rules apply
    retry_after_s: int | None = None

    def __init__(self, message: str | None = None, *, param: str | None = None, code: str | None = None) -> None:
        # It may repeat what the client sent, or what an upstream server said.
        self.message = masked(message) if message else (self.__doc__ or "").strip()
        self.param = None if param is None else masked(param)
        self.code = code or type(self).code
        super().__init__(self.message)

    def envelope(self) -> bytes:
        """The JSON body, as the official SDKs parse it."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return _encode_json({"error": error})

    def forget_frames(self) -> None:
        """Forget where it was raised: the frames hold the request, which holds the error for the log.

        A body in such a circle would stay until the collector finds it.
        """
        self.__traceback__ = self.__cause__ = self.__context__ = None

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers that tell the client whether and when to retry."""
        headers: list[tuple[bytes, bytes]] = []
        if self.should_retry is not None:
            headers.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        if self.retry_after_s is not None:
            wait_s = _spread_s(self.retry_after_s)
            headers.append((b"retry-after-ms", b"%d" % (wait_s * 1000)))  # the official SDKs look for this one first
            headers.append((b"retry-after", b"%d" % math.ceil(wait_s)))
        return headers


class BadRequest(ApiError):
    """The request is not valid."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None
    should_retry = False


class MalformedHttp(BadRequest):
    """This is not a valid HTTP/1.1 request."""

    code = "malformed_http"


class MalformedJson(BadRequest):
    """The body could not be parsed as JSON."""


class InvalidParameter(BadRequest):
    """A field of the request is wrong or not supported."""

    code = "invalid_value"
    other_codes = (
        "batch_is_not_over", "batch_is_over", "empty_file", "file_in_use", "invalid_type", "missing_required_parameter",
        "previous_response_not_found", "prompt_too_long", "response_in_progress", "too_large", "too_many_tokens",
        "too_many_values", "unsupported_parameter", "unsupported_schema_keyword",
    )  # fmt: skip


class ContextLengthExceeded(BadRequest):
    """The prompt and the answer do not fit into the model's context."""

    code = "context_length_exceeded"


class InvalidApiKey(ApiError):
    """Incorrect API key provided."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"
    should_retry = False


class LoginRequired(ApiError):
    """Log in first."""

    status = 401
    type = "invalid_request_error"
    code = "login_required"
    should_retry = False


class CrossOriginRequest(ApiError):
    """A page of another site has asked for this change."""

    status = 403
    type = "permission_error"
    code = "foreign_origin"
    should_retry = False


class MissingScope(ApiError):
    """This API key may not do that."""

    status = 403
    type = "permission_error"
    code = "missing_scope"
    should_retry = False


class HostedNotAllowed(ApiError):
    """Prompts of this API key may not go to a hosted API that serves the model."""

    status = 403
    type = "permission_error"
    code = "hosted_not_allowed"


class ModelNotFound(ApiError):
    """The model does not exist or you do not have access to it."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    should_retry = False


class NoTrustedPool(ApiError):
    """This API key demands trusted pools, and the model has none."""

    status = 404
    type = "invalid_request_error"
    code = "no_trusted_pool"
    should_retry = False


class OnlyTrustedPools(ApiError):
    """The model has only trusted pools, which take requests of API keys that demand them, and this one does not."""

    status = 404
    type = "invalid_request_error"
    code = "only_trusted_pools"
    should_retry = False


class UnknownObject(ApiError):
    """There is no such key, team or organisation."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"
    should_retry = False


class UnknownUrl(ApiError):
    """There is nothing at this URL."""

    status = 404
    type = "invalid_request_error"
    code = "unknown_url"
    should_retry = False


class MethodNotAllowed(ApiError):
    """This URL does not take this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"
    should_retry = False

    def __init__(self, message: str | None = None, *, allow: str = "") -> None:
        super().__init__(message)
        self._allow = allow

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Add to the headers of ``ApiError``."""
        return [*super().headers(), (b"allow", self._allow.encode())]


class RequestTooSlow(ApiError):
    """The request did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"
    should_retry = True


class NameInUse(ApiError):
    """Another one has this name already."""

    status = 409
    type = "invalid_request_error"
    code = "name_in_use"
    should_retry = False


class IdempotencyKeyReused(ApiError):
    """Another request, with a different path or body, was sent with this Idempotency-Key."""

    status = 409
    type = "invalid_request_error"
    code = "idempotency_key_reused"
    should_retry = False


class AnswerNotKept(ApiError):
    """The request with this Idempotency-Key runs, but its answer has outgrown what the gateway keeps for readers."""

    status = 409
    type = "invalid_request_error"
    code = "idempotency_answer_not_kept"
    should_retry = False


class BodyTooLarge(ApiError):
    """The request body is too large."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"
    should_retry = False


class UnsupportedEncoding(ApiError):
    """The body is compressed, which is not supported."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_content_encoding"
    should_retry = False


class RateLimitExceeded(ApiError):
    """A limit of the key or its team refuses this request for now."""

    status = 429
    code = "rate_limit_exceeded"
    other_codes = ("file_quota_exceeded", "too_many_batches", "too_many_stored_responses", "too_many_uploads")
    should_retry = True


def too_many(message: str, code: str) -> RateLimitExceeded:
    """Return the error for a bound below which only the client can make room."""
    error = RateLimitExceeded(message, code=code)
    error.should_retry = False
    return error


class InsufficientQuota(ApiError):
    """The budget of the key or its team is used up."""

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"
    should_retry = False


class TooManyConnections(ApiError):
    """There are too many connections from this address."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_connections"
    should_retry = True
    retry_after_s = RETRY_SOON_S


class HeadTooLarge(ApiError):
    """The request's line and headers are too large."""

    status = 431
    type = "invalid_request_error"
    code = "head_too_large"
    should_retry = False


class LimitsUnavailable(ApiError):
    """What is left of this key's limits cannot be told at the moment."""

    status = 503
    code = "limits_unavailable"
    should_retry = True
    retry_after_s = RETRY_SOON_S


class ModelNotReady(ApiError):
    """The model is configured, but no worker has published its tokenizer yet."""

    status = 503
    code = "model_not_ready"
    should_retry = True
    retry_after_s = RETRY_LATER_S


class LedgerUnavailable(ApiError):
    """The database cannot be used at the moment; generating continues without it."""

    status = 503
    code = "database_unavailable"
    should_retry = True
    retry_after_s = RETRY_LATER_S


class StorageUnavailable(ApiError):
    """The place for files cannot be used at the moment."""

    status = 503
    code = "storage_unavailable"
    should_retry = True
    retry_after_s = RETRY_LATER_S


class Overloaded(ApiError):
    """The gateway has no room for this request at the moment."""

    status = 503
    code = "overloaded"
    should_retry = True
    retry_after_s = RETRY_SOON_S


class IdempotencyKeyBusy(ApiError):
    """The gateway that runs the request with this Idempotency-Key does not answer at the moment."""

    status = 503
    code = "idempotency_key_busy"
    should_retry = True
    retry_after_s = RETRY_SOON_S


class ClientDisconnected(Exception):
    """The caller has left before the request was read."""
