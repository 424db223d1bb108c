"""Refusals: a code, a message, and the field at fault. ``api/errors.py`` maps them to HTTP.

Refused                       internal_error
├── BadRequest
│   ├── MalformedHttp             malformed_http
│   ├── MalformedJson             the body is not JSON
│   ├── InvalidParameter          a field is invalid or not supported
│   └── ContextLengthExceeded     context_length_exceeded
├── …                             one for each code below
└── RequestFailed                 a Failure of an admitted request

ClientDisconnected                no client is left to receive an answer
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from db.accounts.masking import masked
from protocol.errors import ErrorCode
from protocol.gateways import Kind

RETRY_SOON_S: Final = 1
RETRY_LATER_S: Final = 5


class RateStatus(Struct, frozen=True):
    """Use of a rate limit."""

    limit: int
    remaining: int
    reset_s: float  # until the limit is completely unused again


class Refused(Exception):
    """The server had an internal error."""

    code: str | None = "internal_error"
    other_codes: tuple[str, ...] = ()  # more specific codes of the same class
    rates: Mapping[Kind, RateStatus] = {}  # use of the rate limits, if one of them refused

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        is_final: bool = False,
        limit: Kind | None = None,
    ) -> None:
        """``retry_after_s``: overrides the default of the code. ``is_final``: a retry cannot succeed.

        ``limit``: the limit of the key or team that refused; None: another reason.
        """
        # The message may repeat text of the client or of an upstream server.
        self.message = masked(message) if message else (self.__doc__ or "").strip()
        self.param = None if param is None else masked(param)
        self.code = code or type(self).code
        self.retry_after_s = retry_after_s
        self.is_final = is_final
        self.limit = limit
        super().__init__(self.message)

    def forget_frames(self) -> None:
        """Drop the traceback and the chained exceptions.

        Their frames reference the request, which references the error: the cycle would keep the body in memory until
        the garbage collector runs.
        """
        self.__traceback__ = self.__cause__ = self.__context__ = None


class Failure(Struct, frozen=True):
    """Reason why a request was refused or ended without an answer."""

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_s: int | None = None  # overrides the default of the code
    is_wanted: bool = False  # the client asked for the refusal (do_not_queue), so it must not retry automatically


class RequestFailed(Refused):
    """The request was refused or ended without an answer."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(
            failure.message,
            param=failure.param,
            code=failure.code.value,
            retry_after_s=failure.retry_after_s,
            is_final=failure.is_wanted,
        )
        self.failure = failure


class BadRequest(Refused):
    """The request is not valid."""

    code: str | None = None


class MalformedHttp(BadRequest):
    """This is not a valid HTTP/1.1 request."""

    code = "malformed_http"


class MalformedJson(BadRequest):
    """The body could not be parsed as JSON."""


class InvalidParameter(BadRequest):
    """A request field is invalid or not supported."""

    code = "invalid_value"
    other_codes = (
        "batch_is_not_over", "batch_is_over", "empty_file", "file_in_use", "invalid_type", "missing_required_parameter",
        "previous_response_not_found", "prompt_too_long", "response_in_progress", "too_large", "too_many_tokens",
        "too_many_values", "unknown_parameter", "unsupported_parameter", "unsupported_schema_keyword",
    )  # fmt: skip


class ContextLengthExceeded(BadRequest):
    """The prompt and the requested output exceed the model's context length."""

    code = "context_length_exceeded"


class InvalidApiKey(Refused):
    """Incorrect API key provided."""

    code = "invalid_api_key"


class LoginRequired(Refused):
    """Log in first."""

    code = "login_required"


class CrossOriginRequest(Refused):
    """Cross-origin requests cannot make changes."""

    code = "foreign_origin"


class MissingScope(Refused):
    """This API key does not have the required scope."""

    code = "missing_scope"


class RoleNotAllowed(Refused):
    """Your role does not allow this action."""

    code = "role_not_allowed"


class HostedNotAllowed(Refused):
    """This API key does not allow prompts to be sent to the hosted API that serves the model."""

    code = "hosted_not_allowed"


class ModelNotFound(Refused):
    """The model does not exist or you do not have access to it."""

    code = "model_not_found"


class NoTrustedPool(Refused):
    """This API key requires trusted pools, and the model has none."""

    code = "no_trusted_pool"


class OnlyTrustedPools(Refused):
    """The model has only trusted pools, which serve only API keys that require them. This API key does not."""

    code = "only_trusted_pools"


class UnknownObject(Refused):
    """There is no such key, team or organization."""

    code = "not_found"


class UnknownUrl(Refused):
    """Unknown request URL."""

    code = "unknown_url"


class MethodNotAllowed(Refused):
    """This URL does not support this method."""

    code = "method_not_allowed"

    def __init__(self, message: str | None = None, *, allow: str = "") -> None:
        super().__init__(message)
        self.allow = allow  # the supported methods


class RequestTooSlow(Refused):
    """The request did not arrive in time."""

    code = "request_timeout"


class NameInUse(Refused):
    """This name is already in use."""

    code = "name_in_use"


class ChangedMeanwhile(Refused):
    """Another request changed this object. Reload it and try again."""

    code = "changed_meanwhile"


class PreconditionFailed(Refused):
    """The object has changed: its ETag is not in If-Match. Nothing was saved. Read the object, then change it again."""

    code = "precondition_failed"


class IdempotencyKeyReused(Refused):
    """This Idempotency-Key was already used for a request with a different path or body."""

    code = "idempotency_key_reused"


class AnswerNotKept(Refused):
    """The request with this Idempotency-Key is still running, but its answer is too large to be replayed."""

    code = "idempotency_answer_not_kept"


class BodyTooLarge(Refused):
    """The request body is too large."""

    code = "request_too_large"


class UnsupportedEncoding(Refused):
    """The content encoding of the body is not supported."""

    code = "unsupported_content_encoding"


class RateLimitExceeded(Refused):
    """The API key or its team has reached a rate limit."""

    code = "rate_limit_exceeded"
    final_codes = ("file_quota_exceeded", "too_many_batches", "too_many_stored_responses")  # see ``too_many``
    other_codes = (*final_codes, "too_many_uploads")


def too_many(message: str, code: str) -> RateLimitExceeded:
    """Return the error for a quota that the client must free up first: waiting does not help."""
    return RateLimitExceeded(message, code=code, is_final=True)


class InsufficientQuota(Refused):
    """The budget of the API key or its team is used up."""

    code = "insufficient_quota"


class TooManyConnections(Refused):
    """Too many connections from this address."""

    code = "too_many_connections"


class HeadTooLarge(Refused):
    """The request line and headers are too large."""

    code = "head_too_large"


class LimitsUnavailable(Refused):
    """The remaining limits of this API key cannot be determined at the moment. Try again."""

    code = "limits_unavailable"


class ModelNotReady(Refused):
    """The model is configured, but no worker has published its tokenizer yet."""

    code = "model_not_ready"


class LedgerUnavailable(Refused):
    """The database is unavailable. Inference continues without it."""

    code = "database_unavailable"


class StorageUnavailable(Refused):
    """File storage is unavailable."""

    code = "storage_unavailable"


class Overloaded(Refused):
    """The gateway is at capacity. Try again later."""

    code = "overloaded"


class IdempotencyKeyBusy(Refused):
    """The gateway that runs the request with this Idempotency-Key is not responding."""

    code = "idempotency_key_busy"


class ClientDisconnected(Exception):
    """The client disconnected before the request was read."""
