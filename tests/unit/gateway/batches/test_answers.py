"""What an answer means for the line that it answers."""

import json
from typing import Any

import pytest

from gateway.batches.run import Answer, Verdict, verdict_of

NEVER = {b"x-should-retry": b"false"}


def refused(**error: Any) -> Answer:
    return Answer(429, NEVER, json.dumps({"error": {"message": "m", **error}}).encode())


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (refused(code="insufficient_quota", type="insufficient_quota"), Verdict.REFUSED),
        (refused(code="insufficient_quota", type="budget", param="max_tokens"), Verdict.FAILED),
        (refused(code="rate_limit_exceeded", type="tokens"), Verdict.FAILED),
        (Answer(429, {}, b"{}"), Verdict.REFUSED),
    ],
)
def test_what_no_wait_helps_fails_the_line(answer: Answer, verdict: Verdict) -> None:
    assert verdict_of(answer) is verdict
