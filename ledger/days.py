"""Days in the viewer's time zone: spans of UTC time between two midnights."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_MONTH: Final = re.compile(r"(\d{4})-(0[1-9]|1[0-2])", re.ASCII)


class UnknownTimeZone(ValueError):
    """No IANA time zone has this name."""


class NoMonth(ValueError):
    """Not a calendar month such as 2026-11."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time span, and the day that it is part of."""

    day: date | None  # None: not split into days
    since_unix_ms: int  # included
    until_unix_ms: int  # excluded


def parse_zone(name: str | None) -> tzinfo | None:
    """Return the IANA time zone with this name ("Asia/Kolkata"); None: the machine's. Raises UnknownTimeZone."""
    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise UnknownTimeZone(f"unknown time zone {name!r}. Use an IANA name such as Europe/Berlin") from error


def midnight_unix_ms(day: date, zone: tzinfo | None) -> int:
    """Return the start of a day. A zone of None is the machine's.

    If clocks are set forward at midnight, so that midnight does not exist, the day starts at that change.
    """
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) * 1000


def month_span(year: int, month: int, zone: tzinfo | None) -> Span:
    """Return a calendar month. A zone of None is the machine's."""
    following = date(year + month // 12, month % 12 + 1, 1)
    return Span(None, midnight_unix_ms(date(year, month, 1), zone), midnight_unix_ms(following, zone))


def parse_month(text: str, zone: tzinfo | None) -> Span:
    """Parse a calendar month such as ``2026-11``. Raises NoMonth."""
    matched = _MONTH.fullmatch(text)
    if matched is None or not 1970 < int(matched[1]) < 9999:
        raise NoMonth(f"{text!r} is not a month. Example: 2026-11")
    return month_span(int(matched[1]), int(matched[2]), zone)


def split_into_days(since_unix_ms: int, until_unix_ms: int, zone: tzinfo | None) -> Iterator[Span]:
    """Split a time span at every midnight. Days of 23 or 25 hours are one span."""
    day = datetime.fromtimestamp(since_unix_ms / 1000, zone).date()
    start_unix_ms = since_unix_ms
    while start_unix_ms < until_unix_ms:
        next_day = day + timedelta(days=1)
        end_unix_ms = min(midnight_unix_ms(next_day, zone), until_unix_ms)
        yield Span(day, start_unix_ms, end_unix_ms)
        day, start_unix_ms = next_day, end_unix_ms
