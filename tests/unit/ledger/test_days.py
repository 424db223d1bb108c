import os
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from itertools import pairwise

import pytest

from ledger.days import Span, UnknownTimeZone, parse_zone, split_into_days

HOUR_MS = 3_600_000


def utc_ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


@pytest.fixture
def machine_in_new_york() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "America/New_York"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


def test_a_day_in_kolkata_begins_at_half_past_six_the_evening_before_in_utc() -> None:
    spans = list(split_into_days(utc_ms("2026-01-10T12:00"), utc_ms("2026-01-11T20:00"), parse_zone("Asia/Kolkata")))
    assert spans == [
        Span(date(2026, 1, 10), utc_ms("2026-01-10T12:00"), utc_ms("2026-01-10T18:30")),
        Span(date(2026, 1, 11), utc_ms("2026-01-10T18:30"), utc_ms("2026-01-11T18:30")),
        Span(date(2026, 1, 12), utc_ms("2026-01-11T18:30"), utc_ms("2026-01-11T20:00")),
    ]


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Europe/Berlin", date(2026, 3, 29), 23),
        ("Europe/Berlin", date(2026, 10, 25), 25),
        ("Europe/Berlin", date(2026, 6, 1), 24),
        ("Africa/Cairo", date(2026, 4, 24), 23),  # 00:00 does not exist
        ("UTC", date(2026, 3, 29), 24),
    ],
)
def test_days_have_the_hours_their_clocks_give_them(zone: str, day: date, hours: int) -> None:
    noon = utc_ms(f"{day}T12:00")
    spans = split_into_days(noon - 30 * HOUR_MS, noon + 30 * HOUR_MS, parse_zone(zone))
    span = next(span for span in spans if span.day == day)
    assert (span.until_unix_ms - span.since_unix_ms) / HOUR_MS == hours


def test_spans_leave_no_gap_over_a_year() -> None:
    since, until = utc_ms("2026-01-01T05:00"), utc_ms("2027-01-01T05:00")
    spans = list(split_into_days(since, until, parse_zone("America/Santiago")))
    assert spans[0].since_unix_ms == since
    assert spans[-1].until_unix_ms == until
    for before, after in pairwise(spans):
        assert before.until_unix_ms == after.since_unix_ms
        assert before.day is not None
        assert after.day is not None
        assert (after.day - before.day).days == 1


def test_without_a_name_days_are_the_machines(machine_in_new_york: None) -> None:
    [span] = split_into_days(utc_ms("2026-03-08T05:00"), utc_ms("2026-03-09T04:00"), parse_zone(None))
    assert span.day == date(2026, 3, 8)  # 23 hours: clocks go forward that night


@pytest.mark.parametrize("name", ["", "Mars/Olympus", "../etc/passwd", "Europe"])
def test_an_unknown_zone_is_named(name: str) -> None:
    with pytest.raises(UnknownTimeZone, match=repr(name)):
        parse_zone(name)
