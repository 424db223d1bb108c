"""The waits that servers ask for, in their various forms."""

import datetime as dt
from email.utils import format_datetime

import httpx
import pytest

from pool_worker.engines.server_busy import asked_wait_s

NOW = dt.datetime(2026, 11, 26, 12, 0, tzinfo=dt.UTC)
NOW_S = NOW.timestamp()


def http_date(seconds: float) -> str:
    return format_datetime(NOW + dt.timedelta(seconds=seconds), usegmt=True)


WAITS: dict[str, tuple[dict[str, str], str, float | None]] = {
    "nothing": ({}, "", None),
    "seconds": ({"Retry-After": "20"}, "", 20),
    "a part of a second": ({"retry-after": "0.25"}, "", 0.25),
    "seconds with their unit": ({"retry-after": "1m20s"}, "", 80),
    "a date of another kind": ({"retry-after": "2026-11-26T12:00:20Z"}, "", 20),
    "no time at all": ({"retry-after": "0"}, "", 0),
    "a date": ({"retry-after": http_date(20)}, "", 20),
    "a date that has passed": ({"retry-after": http_date(-20)}, "", 0),
    "a date by a clock that is an hour ahead": ({"retry-after": http_date(3620), "date": http_date(3600)}, "", 20),
    "milliseconds": ({"retry-after-ms": "1500"}, "", 1.5),
    "milliseconds beside seconds": ({"retry-after": "2", "retry-after-ms": "1500"}, "", 1.5),
    "Azure's milliseconds": ({"x-ms-retry-after-ms": "300"}, "", 0.3),
    "nonsense": ({"retry-after": "soon"}, "", None),
    "a negative number": ({"retry-after": "-5"}, "", None),
    "not a number": ({"retry-after": "nan", "x-ratelimit-reset": "inf"}, "", None),
    "nonsense, and a limit": ({"retry-after": "soon", "x-ratelimit-reset": "7"}, "", 7),
    "Retry-After before limits": ({"retry-after": "3", "x-ratelimit-reset-requests": "7s"}, "", 3),
    "OpenAI's limits, the used up one": (
        {
            "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": "6m0s",
            "x-ratelimit-remaining-tokens": "149984",
            "x-ratelimit-reset-tokens": "12ms",
        },
        "",
        360,
    ),
    "OpenAI's limits, none used up": (
        {"x-ratelimit-reset-requests": "1h2m3.5s", "x-ratelimit-reset-tokens": "120ms"},
        "",
        0.12,
    ),
    "both used up": (
        {
            "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": "2s",
            "x-ratelimit-remaining-tokens": "0",
            "x-ratelimit-reset-tokens": "9s",
        },
        "",
        9,
    ),
    "Azure's limit without a unit": ({"x-ratelimit-reset-requests": "10"}, "", 10),
    "Anthropic's limits": (
        {
            "anthropic-ratelimit-requests-remaining": "0",
            "anthropic-ratelimit-requests-reset": "2026-11-26T12:00:30Z",
            "anthropic-ratelimit-tokens-remaining": "100",
            "anthropic-ratelimit-tokens-reset": "2026-11-26T12:05:00Z",
        },
        "",
        30,
    ),
    "seconds since 1970": ({"x-ratelimit-reset": f"{NOW_S + 40:.0f}"}, "", 40),
    "milliseconds since 1970": ({"X-RateLimit-Reset": f"{(NOW_S + 40) * 1000:.0f}"}, "", 40),
    "IETF's draft": ({"ratelimit-remaining": "0", "ratelimit-reset": "50"}, "", 50),
    "IETF's newer draft": ({"ratelimit": '"minute";r=0;t=30, "day";r=900;t=5000'}, "", 30),
    "Mistral's": ({"ratelimitbysize-remaining": "0", "ratelimitbysize-reset": "26"}, "", 26),
    "Google's body": ({}, '{"error": {"details": [{"@type": "RetryInfo", "retryDelay": "34.5s"}]}}', 34.5),
    "OpenAI's sentence": ({}, "Rate limit reached. Please try again in 6.6s. Visit", 6.6),
    "OpenAI's sentence, in minutes": ({}, "Please try again in 1m12.5s.", 72.5),
}


@pytest.mark.parametrize("case", WAITS)
def test_each_servers_wait_is_parsed(case: str) -> None:
    headers, body, expected_s = WAITS[case]
    wait_s = asked_wait_s(httpx.Headers(headers), body, NOW_S)
    assert wait_s == (None if expected_s is None else pytest.approx(expected_s, abs=0.001))
