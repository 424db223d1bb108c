"""Servers that ask clients to wait: for how long, by their answer, and the end of the request that they refused.

Servers report the time in different ways; the first one present counts:

    retry-after-ms            Azure OpenAI, OpenAI: milliseconds
    retry-after               seconds, or a date (RFC 9110)
    "retryDelay": "34s"       Google, in the body; "try again in 6.6s" is OpenAI's
    …ratelimit…reset…         when a limit resets: OpenAI ("6m0s"), Anthropic (a time), IETF's draft (seconds),
                              others (seconds since 1970, or milliseconds); of several, the exhausted ones count
"""

import datetime as dt
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

from engine.types import SequenceOutput

FIRST_DATE_S: Final = 1e9  # a larger number is a time since 1970, not a duration
FIRST_DATE_MS: Final = 1e12
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")
_IN_BODY: Final = re.compile(r'"retryDelay"\s*:\s*"([\d.smhd]+)"|try again in ([\d.smhd]+)', re.IGNORECASE)
_DRAFT: Final = re.compile(r"\bt=(\d+)")  # IETF's draft since its eighth version: `"default";r=0;t=30`


@dataclass(slots=True)
class Busy(SequenceOutput):
    """The end of a request that the server did not begin. Not a failure: the request waits again."""

    wait_s: float | None = None  # as the server asks; None: it gave no time

    @classmethod
    def of(cls, request_id: str, index: int, error: "ServerBusy") -> "Busy":
        """Return the end of one choice."""
        return cls(request_id, index, [], "", finish_reason="error", error=str(error), wait_s=error.wait_s)


class ServerBusy(Exception):
    """The server did not begin a request and asks to wait; ``wait_s``: for how long, if it gave a time."""

    def __init__(self, message: str, wait_s: float | None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def asked_wait_s(headers: Mapping[str, str], body: str, now_unix_s: float) -> float | None:
    """Return how long a busy server asks to wait; None if it gives no time. Header names are lower-case."""
    now_unix_s = _server_time(headers) or now_unix_s  # by the server's clock, which its dates are relative to
    for name, unit_s in (("retry-after-ms", 0.001), ("x-ms-retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if _NUMBER.fullmatch(value):
            return float(value) * unit_s
        wait_s = _duration_s(value) if value[-1:].isalpha() else None
        wait_s = _until(value, now_unix_s) if wait_s is None else wait_s
        if wait_s is not None:
            return wait_s
    found = _IN_BODY.search(body)
    if found is not None and (wait_s := _duration_s((found[1] or found[2]).rstrip("."))) is not None:
        return wait_s
    return _reset_s(headers, now_unix_s)


def _reset_s(headers: Mapping[str, str], now_unix_s: float) -> float | None:
    """Return when all exhausted limits have reset; if none is known to be exhausted, when the first limit resets."""
    resets = list(_resets(headers, now_unix_s))
    used_up = [wait_s for wait_s, is_used_up in resets if is_used_up]
    if used_up:
        return max(used_up)
    return min((wait_s for wait_s, _ in resets), default=None)


def _resets(headers: Mapping[str, str], now_unix_s: float) -> Iterator[tuple[float, bool]]:
    for name, value in headers.items():
        if "ratelimit" not in name:
            continue
        if "reset" in name:
            wait_s = _wait_of(value.strip(), now_unix_s)
            if wait_s is not None:
                yield wait_s, headers.get(name.replace("reset", "remaining"), "").strip() in {"0", "0.0"}
        elif name == "ratelimit":
            for part in value.split(","):
                if (found := _DRAFT.search(part)) is not None:
                    yield float(found[1]), "r=0" in part.split(";")


def _wait_of(value: str, now_unix_s: float) -> float | None:
    if not _NUMBER.fullmatch(value):
        duration_s = _duration_s(value)
        return _until(value, now_unix_s) if duration_s is None else duration_s
    number = float(value)
    if number < FIRST_DATE_S:
        return number
    return max(0.0, (number / 1000 if number >= FIRST_DATE_MS else number) - now_unix_s)


def _duration_s(value: str) -> float | None:
    if not _DURATION.fullmatch(value):
        return None
    return math.fsum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(value))


def _until(value: str, now_unix_s: float) -> float | None:
    """Return the seconds until a date in the format of RFC 9110 or RFC 3339."""
    try:
        time = dt.datetime.fromisoformat(value) if value[:4].isdigit() else parsedate_to_datetime(value)
        return max(0.0, _as_utc(time).timestamp() - now_unix_s)
    except (ValueError, OverflowError, TypeError):
        return None


def _server_time(headers: Mapping[str, str]) -> float | None:
    try:
        return _as_utc(parsedate_to_datetime(headers.get("date", ""))).timestamp()
    except (ValueError, OverflowError, TypeError):
        return None


def _as_utc(time: dt.datetime) -> dt.datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=dt.UTC)
