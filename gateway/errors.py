"""Why something is refused: a code, a message, the field that it is about. What HTTP makes of it: ``api/errors.py``.

Refused                       internal_error
├── BadRequest
│   ├── MalformedHttp             malformed_http
│   ├── MalformedJson             the body is no JSON
│   ├── InvalidParameter          a field is wrong, or cannot be honoured
│   └── ContextLengthExceeded     context_length_exceeded
├── …                             one for each code below
└── RequestFailed                 a Failure of an admitted request

ClientDisconnected                nobody is left to be told
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
    reset_s: float  # until it is not used at all, if no more comes


class Refused(Exception):
    """The server had an internal error."""

    code: str | None = "internal_error"
    other_codes: tuple[str, ...] = ()  # that one may have instead
    rates: Mapping[Kind, RateStatus] = {}  # how far they are used, where one of them refuses

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
        """``retry_after_s``: where more is known than the code's own. ``is_final``: waiting helps nobody.

        ``limit``: which of the limits that keys and teams have; None: none of these.
        """
        # It may repeat what the client sent, or what an upstream server said.
        self.message = masked(message) if message else (self.__doc__ or "").strip()
        self.param = None if param is None else masked(param)
        self.code = code or type(self).code
        self.retry_after_s = retry_after_s
        self.is_final = is_final
        self.limit = limit
        super().__init__(self.message)

    def forget_frames(self) -> None:
        """Forget where it was raised: the frames hold the request, which holds the error for the log.

        A body in such a circle would stay until the collector finds it.
        """
        self.__traceback__ = self.__cause__ = self.__context__ = None


class Failure(Struct, frozen=True):
    """Reason why a request was refused or ended without an answer."""

    code: ErrorCode
    message: str
    param: str | None = None
    retry_after_s: int | None = None  # where something better is known than the code's own
    is_wanted: bool = False  # the caller has asked to be refused: its client shall not try again by itself


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
    """A field of the request is wrong or not supported."""

    code = "invalid_value"
    other_codes = (
        "batch_is_not_over", "batch_is_over", "empty_file", "file_in_use", "invalid_type", "missing_required_parameter",
        "previous_response_not_found", "prompt_too_long", "response_in_progress", "too_large", "too_many_tokens",
        "too_many_values", "unknown_parameter", "unsupported_parameter", "unsupported_schema_keyword",
    )  # fmt: skip


class ContextLengthExceeded(BadRequest):
    """The prompt and the answer do not fit into the model's context."""

    code = "context_length_exceeded"


class InvalidApiKey(Refused):
    """Incorrect API key provided."""

    code = "invalid_api_key"


class LoginRequired(Refused):
    """Log in first."""

    code = "login_required"


class CrossOriginRequest(Refused):
    """A page of another site has asked for this change."""

    code = "foreign_origin"


class MissingScope(Refused):
    """This API key may not do that."""

    code = "missing_scope"


class RoleNotAllowed(Refused):
    """Your role may not do that."""

    code = "role_not_allowed"


class HostedNotAllowed(Refused):
    """Prompts of this API key may not go to a hosted API that serves the model."""

    code = "hosted_not_allowed"


class ModelNotFound(Refused):
    """The model does not exist or you do not have access to it."""

    code = "model_not_found"


class NoTrustedPool(Refused):
    """This API key demands trusted pools, and the model has none."""

    code = "no_trusted_pool"


class OnlyTrustedPools(Refused):
    """The model has only trusted pools, which take requests of API keys that demand them, and this one does not."""

    code = "only_trusted_pools"


class UnknownObject(Refused):
    """There is no such key, team or organisation."""

    code = "not_found"


class UnknownUrl(Refused):
    """There is nothing at this URL."""

    code = "unknown_url"


class MethodNotAllowed(Refused):
    """This URL does not take this method."""

    code = "method_not_allowed"

    def __init__(self, message: str | None = None, *, allow: str = "") -> None:
        super().__init__(message)
        self.allow = allow  # the methods that it takes


class RequestTooSlow(Refused):
    """The request did not arrive in time."""

    code = "request_timeout"


class NameInUse(Refused):
    """Another one has this name already."""

    code = "name_in_use"


class ChangedMeanwhile(Refused):
    """Somebody else has changed it meanwhile."""

    code = "changed_meanwhile"


class PreconditionFailed(Refused):
    """The object has changed: its ETag is not in If-Match. Nothing was saved. Read the object, then change it again."""

    code = "precondition_failed"


class IdempotencyKeyReused(Refused):
    """Another request, with a different path or body, was sent with this Idempotency-Key."""

    code = "idempotency_key_reused"


class AnswerNotKept(Refused):
    """The request with this Idempotency-Key runs, but its answer has outgrown what the gateway keeps for readers."""

    code = "idempotency_answer_not_kept"


class BodyTooLarge(Refused):
    """The request body is too large."""

    code = "request_too_large"


class UnsupportedEncoding(Refused):
    """The body is compressed, which is not supported."""

    code = "unsupported_content_encoding"


class RateLimitExceeded(Refused):
    """A limit of the key or its team refuses this request for now."""

    code = "rate_limit_exceeded"
    other_codes = ("file_quota_exceeded", "too_many_batches", "too_many_stored_responses", "too_many_uploads")


def too_many(message: str, code: str) -> RateLimitExceeded:
    """Return the error for a bound below which only the client can make room."""
    return RateLimitExceeded(message, code=code, is_final=True)


class InsufficientQuota(Refused):
    """The budget of the key or its team is used up."""

    code = "insufficient_quota"


class TooManyConnections(Refused):
    """There are too many connections from this address."""

    code = "too_many_connections"


class HeadTooLarge(Refused):
    """The request's line and headers are too large."""

    code = "head_too_large"


class LimitsUnavailable(Refused):
    """What is left of this key's limits cannot be told at the moment."""

    code = "limits_unavailable"


class ModelNotReady(Refused):
    """The model is configured, but no worker has published its tokenizer yet."""

    code = "model_not_ready"


class LedgerUnavailable(Refused):
    """The database cannot be used at the moment; generating continues without it."""

    code = "database_unavailable"


class StorageUnavailable(Refused):
    """The place for files cannot be used at the moment."""

    code = "storage_unavailable"


class Overloaded(Refused):
    """The gateway has no room for this request at the moment."""

    code = "overloaded"


class IdempotencyKeyBusy(Refused):
    """The gateway that runs the request with this Idempotency-Key does not answer at the moment."""

    code = "idempotency_key_busy"


class ClientDisconnected(Exception):
    """The caller has left before the request was read."""
