"""Errors that a server reports inside an answer with status 200, and their matching HTTP statuses."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pool_worker.engines.framing import ServerFailure

STATUSES: Final = range(400, 600)
# Words in errors, in lower case and letters only, with their statuses: from the documents of OpenAI, Anthropic and
# Google, and from vLLM, SGLang, TGI and llama.cpp.
_WORDS: Final[dict[str, int]] = {
    "invalidrequesterror": 400,
    "badrequesterror": 400,
    "badrequest": 400,
    "invalidargument": 400,
    "contextlengthexceeded": 400,
    "exceedcontextsizeerror": 400,
    "failedprecondition": 400,
    "authenticationerror": 401,
    "unauthorizederror": 401,
    "unauthenticated": 401,
    "permissionerror": 403,
    "permissiondenied": 403,
    "notfounderror": 404,
    "notfound": 404,
    "modelnotfound": 404,
    "requesttoolarge": 413,
    "unprocessableentityerror": 422,
    "validation": 422,
    "ratelimiterror": 429,
    "ratelimitexceeded": 429,
    "resourceexhausted": 429,
    "throttlingexception": 429,
    "toomanyrequests": 429,
    "overloaded": 429,  # TGI's
    "internalservererror": 500,
    "apierror": 500,
    "servererror": 500,
    "serviceunavailable": 503,
    "unavailable": 503,
    "unavailableerror": 503,
    "overloadederror": 529,
}
_FIELDS: Final = (
    "code",
    "status",
    "status_code",
    "http_status",
    "http_status_code",
    "statusCode",
    "type",
    "error_type",
)


def failure_in(event: Mapping[str, Any]) -> ServerFailure | None:
    """Return the failure that an event reports; None if it reports none: ``"error": null`` is not an error."""
    error = event.get("error")
    if error is None and event.get("object") == "error":  # vLLM's older releases
        error = event
    if not error:  # also false, "", {}
        return None
    return ServerFailure(_text(error), next(_statuses(error, event), None))


def _text(error: object) -> str:
    if not (isinstance(error, dict) and error.get("message")):
        return str(error)
    words = [error[field] for field in ("status", "code", "type") if isinstance(error.get(field), str)]
    return ": ".join(map(str, [*words[:1], error["message"]]))


def _statuses(error: object, event: Mapping[str, Any]) -> Iterator[int]:
    for source in (error, event):
        for value in (source.get(field) for field in _FIELDS) if isinstance(source, dict) else ():
            status = _status(value)
            if status is not None:
                yield status


def _status(value: object) -> int | None:
    if isinstance(value, str):
        return int(value) if value in _NUMBERS else _WORDS.get("".join(filter(str.isalpha, value)).lower())
    return value if type(value) is int and value in STATUSES else None


_NUMBERS: Final = frozenset(map(str, STATUSES))
