"""Errors over HTTP: their statuses, types, headers, and body."""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from msgspec import Struct

from gateway import errors
from gateway.api.fields import encode_json
from gateway.error_codes import MALFORMED_JSON
from gateway.errors import RETRY_LATER_S, RETRY_SOON_S, MethodNotAllowed, Refused, RequestFailed
from protocol.errors import ErrorCode
from protocol.gateways import Kind

DOCUMENTATION_PATH: Final = "/docs/errors"
LONGEST_RETRY_S: Final = 60.0  # clients ignore longer values
RETRY_SPREAD: Final = 1.5  # latest retry time divided by the earliest


class HttpForm(Struct, frozen=True):
    """How an error is sent over HTTP."""

    status: int
    type: str = "server_error"
    should_retry: bool | None = None  # None: the client decides
    retry_after_s: int | None = None


def _invalid(status: int) -> HttpForm:
    return HttpForm(status, "invalid_request_error", should_retry=False)


def _forbidden(*, should_retry: bool | None = False) -> HttpForm:
    return HttpForm(403, "permission_error", should_retry=should_retry)


def _unavailable(retry_after_s: int) -> HttpForm:
    return HttpForm(503, should_retry=True, retry_after_s=retry_after_s)


# By class of refusal, including its subclasses.
FORMS: Final[dict[type[Refused], HttpForm]] = {
    Refused: HttpForm(500),
    errors.BadRequest: _invalid(400),
    errors.InvalidApiKey: _invalid(401),
    errors.LoginRequired: _invalid(401),
    errors.CrossOriginRequest: _forbidden(),
    errors.MissingScope: _forbidden(),
    errors.RoleNotAllowed: _forbidden(),
    errors.HostedNotAllowed: _forbidden(should_retry=None),
    errors.ModelNotFound: _invalid(404),
    errors.NoTrustedPool: _invalid(404),
    errors.OnlyTrustedPools: _invalid(404),
    errors.UnknownObject: _invalid(404),
    errors.UnknownUrl: _invalid(404),
    errors.MethodNotAllowed: _invalid(405),
    errors.RequestTooSlow: HttpForm(408, "invalid_request_error", should_retry=True),
    errors.NameInUse: _invalid(409),
    errors.ChangedMeanwhile: _invalid(409),
    errors.IdempotencyKeyReused: _invalid(409),
    errors.AnswerNotKept: _invalid(409),
    errors.PreconditionFailed: _invalid(412),
    errors.BodyTooLarge: _invalid(413),
    errors.UnsupportedEncoding: _invalid(415),
    errors.RateLimitExceeded: HttpForm(429, should_retry=True),
    errors.InsufficientQuota: HttpForm(429, "insufficient_quota", should_retry=False),
    errors.TooManyConnections: HttpForm(429, "rate_limit_error", should_retry=True, retry_after_s=RETRY_SOON_S),
    errors.HeadTooLarge: _invalid(431),
    errors.LimitsUnavailable: _unavailable(RETRY_SOON_S),
    errors.ModelNotReady: _unavailable(RETRY_LATER_S),
    errors.LedgerUnavailable: _unavailable(RETRY_LATER_S),
    errors.StorageUnavailable: _unavailable(RETRY_LATER_S),
    errors.Overloaded: _unavailable(RETRY_SOON_S),
    errors.IdempotencyKeyBusy: _unavailable(RETRY_SOON_S),
}
# By limit of a key or team.
_LIMIT_TYPES: Final = {
    Kind.REQUESTS: "requests",
    Kind.TOKENS: "tokens",
    Kind.CONCURRENT: "concurrent_requests",
    Kind.MONEY: "budget",
}

_TYPES_OF_LIMITS: Final[dict[type[Refused], Sequence[str]]] = {
    errors.RateLimitExceeded: tuple(_LIMIT_TYPES.values()),
    errors.InsufficientQuota: (_LIMIT_TYPES[Kind.MONEY],),
}

_BAD_REQUEST: Final = _invalid(400)
_CONTENDED: Final = HttpForm(429, "rate_limit_error", should_retry=True, retry_after_s=RETRY_LATER_S)
_NO_CAPACITY: Final = _unavailable(RETRY_LATER_S)
_TOO_SLOW: Final = HttpForm(504, should_retry=False)  # a retry would wait just as long
_INTERNAL: Final = HttpForm(500)

FAILURES: Final[dict[ErrorCode, HttpForm]] = {
    ErrorCode.INVALID_REQUEST: _BAD_REQUEST,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: _BAD_REQUEST,
    ErrorCode.GRAMMAR_TOO_COMPLEX: _BAD_REQUEST,
    ErrorCode.KEY_REVOKED: _invalid(401),
    ErrorCode.QUEUE_FULL: _NO_CAPACITY,
    ErrorCode.OVERLOADED: _unavailable(RETRY_SOON_S),
    ErrorCode.USAGE_NOT_STORED: _unavailable(RETRY_LATER_S),
    ErrorCode.TOO_MANY_QUEUED: _CONTENDED,
    ErrorCode.TOO_MANY_QUEUED_TOKENS: _CONTENDED,
    ErrorCode.TOO_MANY_QUEUED_BYTES: _CONTENDED,
    ErrorCode.WAIT_TOO_LONG: _CONTENDED,
    ErrorCode.NO_FREE_PLACE: _CONTENDED,
    ErrorCode.TENANT_IN_FLIGHT: _CONTENDED,
    ErrorCode.TENANT_QUEUED: _CONTENDED,
    ErrorCode.NO_WORKERS: _NO_CAPACITY,
    ErrorCode.MODEL_CHANGED: _unavailable(RETRY_SOON_S),
    ErrorCode.ANSWER_CUT: HttpForm(502, should_retry=True, retry_after_s=RETRY_SOON_S),
    ErrorCode.DEADLINE_EXCEEDED: _TOO_SLOW,
    ErrorCode.QUEUE_WAIT_TIMEOUT: _NO_CAPACITY,
    ErrorCode.SHUTTING_DOWN: _unavailable(RETRY_SOON_S),
    ErrorCode.FIRST_TOKEN_TIMEOUT: _TOO_SLOW,
    ErrorCode.INTER_TOKEN_TIMEOUT: _TOO_SLOW,
    ErrorCode.TOTAL_TIMEOUT: _TOO_SLOW,
    ErrorCode.SLOW_CLIENT: _invalid(408),
    ErrorCode.ANSWER_TOO_LARGE: _BAD_REQUEST,
    ErrorCode.ENGINE_ERROR: _INTERNAL,
    ErrorCode.ENGINE_BUSY: _INTERNAL,
    ErrorCode.ENGINE_DIED: _INTERNAL,
    ErrorCode.WORKER_DRAINING: _NO_CAPACITY,
    ErrorCode.WORKER_LOST: _INTERNAL,
    ErrorCode.JOB_VANISHED: _INTERNAL,
    ErrorCode.UNKNOWN_ATTEMPT: _INTERNAL,
    ErrorCode.GATEWAY_LOST: _INTERNAL,
    ErrorCode.ATTEMPTS_EXHAUSTED: HttpForm(502, should_retry=False),  # it failed on several workers: a retry adds load
    ErrorCode.INTERNAL_ERROR: _INTERNAL,
}


class DocumentationLinks:
    """Links from error bodies to the documentation of their codes, which every gateway serves."""

    def __init__(self) -> None:
        self._start = f"{DOCUMENTATION_PATH}#"

    def begin_with(self, public_url: str | None) -> None:
        """Set the gateway's public URL; None: links are relative to the URL of the request."""
        self._start = f"{(public_url or '').rstrip('/')}{DOCUMENTATION_PATH}#"

    def of(self, error: Refused) -> str:
        return self._start + (error.code or MALFORMED_JSON)


DOCUMENTATION_LINKS: Final = DocumentationLinks()  # of this process


class AnswerStyle(Protocol):
    """Format of errors and headers of an API other than OpenAI's (``gateway.api.surface.Surface``)."""

    def error_body(self, error: Refused, request_id: str) -> bytes: ...

    def field_name(self, name: str) -> str:
        """Return the API's name for a field of a chat."""
        ...

    def headers(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Return the additional headers of every answer."""
        ...


def form_of_kind(kind: type[Refused]) -> HttpForm:
    """Return the HTTP form of a class of refusals."""
    return next(FORMS[one] for one in kind.__mro__ if one in FORMS)


def form_of(error: Refused) -> HttpForm:
    """Return the form of one refusal."""
    form = FAILURES[error.failure.code] if isinstance(error, RequestFailed) else form_of_kind(type(error))
    return HttpForm(
        form.status,
        form.type if error.limit is None else _LIMIT_TYPES[error.limit],
        should_retry=False if error.is_final else form.should_retry,
        retry_after_s=error.retry_after_s or form.retry_after_s,
    )


def envelope(error: Refused) -> bytes:
    """Return the JSON body that OpenAI's SDKs parse."""
    return encode_json({"error": error_fields(error, error.message, error.param)})


def error_fields(error: Refused, message: str, param: str | None) -> dict[str, str | None]:
    """Return the fields of an error in OpenAI's APIs. ``message``, ``param``: with the API's names of fields."""
    return {
        "message": message,
        "type": form_of(error).type,
        "param": param,
        "code": error.code,
        "doc_url": DOCUMENTATION_LINKS.of(error),
    }


def forms_of_code(code: str) -> list[HttpForm]:
    """Return the forms that errors of a code can have; empty: no response has it."""
    forms = [
        HttpForm(form.status, kind_name, False if code in final else form.should_retry, form.retry_after_s)
        for kind in _kinds_of_code(code)
        for form, final in ((form_of_kind(kind), errors.RateLimitExceeded.final_codes),)
        for kind_name in (form.type, *(_TYPES_OF_LIMITS.get(kind, ()) if code == kind.code else ()))
    ]
    return list(dict.fromkeys(forms + [form for failed, form in FAILURES.items() if failed.value == code]))


def _kinds_of_code(code: str, base: type[Refused] = Refused) -> Iterator[type[Refused]]:
    if base is not RequestFailed:
        if code == (base.code or MALFORMED_JSON) or code in base.other_codes:
            yield base
        for kind in base.__subclasses__():
            yield from _kinds_of_code(code, kind)


def headers_of(error: Refused) -> list[tuple[bytes, bytes]]:
    """Return the headers that say whether and when to retry, or which methods are allowed."""
    form, headers = form_of(error), list[tuple[bytes, bytes]]()
    if form.should_retry is not None:
        headers.append((b"x-should-retry", b"true" if form.should_retry else b"false"))
    wait_s = retry_wait_s(error)
    if wait_s is not None:
        headers.append((b"retry-after-ms", b"%d" % (wait_s * 1000)))  # OpenAI's SDKs prefer this header
        headers.append((b"retry-after", b"%d" % math.ceil(wait_s)))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode()))
    return headers


def retry_wait_s(error: Refused) -> float | None:
    """Return the seconds until a retry; None: the client decides.

    Adds random jitter, so that clients refused at the same time do not retry at the same time.
    """
    meant_s = form_of(error).retry_after_s
    if meant_s is None:
        return None
    latest_s = min(LONGEST_RETRY_S, meant_s * RETRY_SPREAD)
    return random.uniform(latest_s / RETRY_SPREAD, latest_s)  # noqa: S311
