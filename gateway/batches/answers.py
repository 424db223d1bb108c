"""What follows from the answer to a line. Pure."""

from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec
from msgspec import Struct

from gateway.batches.store import Counts
from protocol.wire import UNDECODABLE

LONGEST_WAIT_S: Final = 60.0
USUAL_WAIT_S: Final = 5.0
BUDGET_WAIT_S: Final = 60.0  # until it is looked again whether a new day or month has brought a new budget


class Verdict(Enum):
    """What to do with a line."""

    ANSWERED = "into the output file"
    FAILED = "into the error file"
    REFUSED = "again, once there is room; that does not count as a try"
    AGAIN = "again, unless it has been tried too often"
    REVOKED = "nothing more: its key is not accepted"


class Answer(Struct, frozen=True):
    """A whole response."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    @property
    def request_id(self) -> str:
        """The id that the ledger has it under."""
        return self.headers.get(b"x-request-id", b"").decode("latin-1")


class _Details(Struct):
    cached_tokens: int = 0


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Body(Struct):
    usage: _Usage | None = None


class _Error(Struct):
    code: str | None = None
    type: str | None = None


class _ErrorBody(Struct):
    error: _Error | None = None


_decode_body: Final = msgspec.json.Decoder(_Body).decode
_decode_error: Final = msgspec.json.Decoder(_ErrorBody).decode


def verdict_of(answer: Answer) -> Verdict:
    """Judge an answer."""
    status = answer.status
    if status == 200:
        return Verdict.ANSWERED
    if status == 401:
        return Verdict.REVOKED
    if status == 429:
        is_final = answer.headers.get(b"x-should-retry") == b"false" and not _is_budget(answer)
        return Verdict.FAILED if is_final else Verdict.REFUSED
    if status == 503:
        return Verdict.REFUSED
    return Verdict.AGAIN if status >= 500 or status == 408 else Verdict.FAILED


def wait_s(answer: Answer) -> float:
    """Return how long to wait before it is tried again, as the answer says."""
    if _is_budget(answer):
        return BUDGET_WAIT_S
    for name, unit_s in ((b"retry-after-ms", 0.001), (b"retry-after", 1.0)):
        try:
            return max(0.0, min(LONGEST_WAIT_S, float(answer.headers[name]) * unit_s))
        except (KeyError, ValueError):
            continue
    return USUAL_WAIT_S


def _is_budget(answer: Answer) -> bool:
    if answer.status != 429:
        return False
    try:
        error = _decode_error(answer.body).error
    except UNDECODABLE:
        return False
    # A request that alone costs more than the budget has another type: waiting does not help it.
    return error is not None and error.code == error.type == "insufficient_quota"


def counts_of(answer: Answer) -> Counts:
    """Return what an answered line adds to its batch."""
    try:
        usage = _decode_body(answer.body).usage or _Usage()
    except UNDECODABLE:  # an endpoint that tells it otherwise, or not at all
        usage = _Usage()
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Details(usage.cache_read_input_tokens)
    prompt, completion = usage.prompt_tokens or usage.input_tokens, usage.completion_tokens or usage.output_tokens
    return Counts(1, 0, prompt, details.cached_tokens, completion)
