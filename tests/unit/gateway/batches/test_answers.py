"""The effect of a refusal on its line."""

import pytest

from gateway.batches.asking import USUAL_WAIT_S, Verdict, verdict_of, wait_s
from gateway.errors import (
    Failure,
    InsufficientQuota,
    InvalidApiKey,
    InvalidParameter,
    LimitsUnavailable,
    RateLimitExceeded,
    Refused,
    RequestFailed,
    RequestTooSlow,
)
from protocol.errors import ErrorCode
from protocol.gateways import Kind


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (InvalidParameter("wrong"), Verdict.FAILED),
        (InvalidApiKey(), Verdict.REVOKED),
        (InsufficientQuota("used up"), Verdict.REFUSED),  # a new day has a new budget
        (InsufficientQuota("more than all of it", param="max_tokens", limit=Kind.MONEY), Verdict.FAILED),
        (RateLimitExceeded("more than the limit", is_final=True, limit=Kind.TOKENS), Verdict.FAILED),
        (RateLimitExceeded("used", limit=Kind.TOKENS), Verdict.REFUSED),
        (LimitsUnavailable(), Verdict.REFUSED),
        (RequestFailed(Failure(ErrorCode.TOO_MANY_QUEUED, "full")), Verdict.REFUSED),
        (RequestFailed(Failure(ErrorCode.KEY_REVOKED, "revoked")), Verdict.REVOKED),
        (RequestFailed(Failure(ErrorCode.ENGINE_ERROR, "broken")), Verdict.AGAIN),
        (RequestFailed(Failure(ErrorCode.FIRST_TOKEN_TIMEOUT, "slow")), Verdict.AGAIN),
        (RequestTooSlow(), Verdict.AGAIN),
        (Refused(), Verdict.AGAIN),
    ],
)
def test_a_final_refusal_fails_the_line(error: Refused, verdict: Verdict) -> None:
    assert verdict_of(error) is verdict


def test_a_line_waits_for_retry_after() -> None:
    assert wait_s(Refused()) == USUAL_WAIT_S
    assert 20 <= wait_s(RateLimitExceeded("used", retry_after_s=20)) <= 30
    assert wait_s(RateLimitExceeded("used", retry_after_s=4000)) <= 60
