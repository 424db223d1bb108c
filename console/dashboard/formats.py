"""Formats of numbers, times and money on the pages."""

from datetime import datetime, tzinfo
from typing import Final

from db.money import NANO_USD

NOTHING: Final = "–"
NO_PRICE: Final = "no price"
COMPACT_FROM: Final = 10_000
_SCALES: Final = ((1e9, "B"), (1e6, "M"))


def count(value: float | None) -> str:
    """Format a whole number, with separators between thousands: ``1,234,567``."""
    return NOTHING if value is None else f"{value:,.0f}"


def compact(value: float | None) -> str:
    """Format large numbers with three significant digits: ``1.23 M``; ``9,876`` stays."""
    if value is None:
        return NOTHING
    for scale, letter in _SCALES:
        # 999,999 is 1.00 M, not 1,000 K.
        if abs(value) >= scale * 0.9995:
            return f"{_three_digits(value / scale)} {letter}"
    if abs(value) >= COMPACT_FROM:
        return f"{_three_digits(value / 1e3)} K"
    return count(value)


def duration(ms: float | None) -> str:
    """Format milliseconds in the most readable unit: ``0.42 ms``, ``87 ms``, ``1.32 s``, ``4 min 10 s``."""
    if ms is None:
        return NOTHING
    if ms < 999.5:
        return f"{_three_digits(ms)} ms" if ms < 100 else f"{ms:.0f} ms"
    if ms < 119_950:
        return f"{_three_digits(ms / 1000)} s"
    minutes, seconds = divmod(round(ms / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def money(nano_usd: float | None) -> str:
    """Format dollars; small amounts keep two significant digits: ``$1,234.50``, ``$0.0042``."""
    if nano_usd is None:
        return NOTHING
    usd = nano_usd / NANO_USD
    if usd and abs(usd) < 0.995:
        return f"{'-' if usd < 0 else ''}${_two_significant(abs(usd))}"
    return f"{'-' if usd < 0 else ''}${abs(usd):,.2f}"


def charged(nano_usd: int | None, unpriced_tokens: int = 0) -> str:
    """Format a charge; tokens without a price are not $0.00: ``$1.20``, ``no price``, ``$1.20 + no price``."""
    if nano_usd is None or (unpriced_tokens and not nano_usd):
        return NO_PRICE
    return f"{money(nano_usd)} + {NO_PRICE}" if unpriced_tokens else money(nano_usd)


def share(value: float | None) -> str:
    """Format a share as a percentage: ``12.3 %``; values just above 0 or below 100 do not round to these."""
    if value is None:
        return NOTHING
    percent = value * 100
    if 0 < percent < 0.1:
        return "< 0.1 %"
    if 99.9 < percent < 100:
        return "> 99.9 %"
    return f"{percent:.0f} %" if percent in {0, 100} else f"{percent:.1f} %"


def moment(unix_ms: int | None, zone: tzinfo) -> str:
    """Format a moment on the viewer's clock: ``2026-03-01 14:05:09``."""
    return NOTHING if unix_ms is None else f"{datetime.fromtimestamp(unix_ms / 1000, zone):%Y-%m-%d %H:%M:%S}"


def _three_digits(value: float) -> str:
    size = abs(value)
    decimals = 0 if size >= 99.95 or size == 0 else 1 if size >= 9.995 else 2
    return f"{value:,.{decimals}f}"


def _two_significant(value: float) -> str:
    for decimals in range(2, 10):
        if round(value, decimals) >= 10 ** (1 - decimals):
            return f"{value:.{decimals}f}"
    return f"{value:.9f}"
