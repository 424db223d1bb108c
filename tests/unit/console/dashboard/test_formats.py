from zoneinfo import ZoneInfo

import pytest

from console.dashboard import formats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (9_876, "9,876"),
        (12_345, "12.3 K"),
        (999_999, "1.00 M"),
        (1_234_567, "1.23 M"),
        (5e9, "5.00 B"),
    ],
)
def test_large_counts_keep_three_digits(value: float | None, text: str) -> None:
    assert formats.compact(value) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "–"),
        (0, "0 ms"),
        (0.42, "0.42 ms"),
        (87.31, "87.3 ms"),
        (842.4, "842 ms"),
        (999.7, "1.00 s"),
        (1320, "1.32 s"),
        (250_000, "4 min 10 s"),
        (7_260_000, "2 h 1 min"),
    ],
)
def test_durations_have_a_unit_that_fits(ms: float | None, text: str) -> None:
    assert formats.duration(ms) == text


@pytest.mark.parametrize(
    ("nano_usd", "text"),
    [
        (None, "–"),
        (0, "$0.00"),
        (1_234_500_000_000, "$1,234.50"),
        (4_200_000, "$0.0042"),
        (12_340_000_000, "$12.34"),
        (-4_200_000, "-$0.0042"),
        (1, "$0.000000001"),
    ],
)
def test_small_money_keeps_its_digits(nano_usd: int | None, text: str) -> None:
    assert formats.money(nano_usd) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(None, "–"), (0, "0 %"), (1, "100 %"), (0.0001, "< 0.1 %"), (0.9999, "> 99.9 %"), (0.1234, "12.3 %")],
)
def test_what_is_not_quite_nothing_or_all_stays_so(share: float | None, text: str) -> None:
    assert formats.share(share) == text


def test_moments_are_on_the_viewers_clock() -> None:
    just_before_midnight_utc = 1_772_236_799_000  # 2026-02-27 23:59:59
    assert formats.moment(just_before_midnight_utc, ZoneInfo("UTC")) == "2026-02-27 23:59:59"
    assert formats.moment(just_before_midnight_utc, ZoneInfo("Asia/Kolkata")) == "2026-02-28 05:29:59"


@pytest.mark.parametrize(
    ("nano_usd", "unpriced_tokens", "text"),
    [
        (0, 0, "$0.00"),
        (1_200_000_000, 0, "$1.20"),
        (0, 5, "no price"),
        (None, 0, "no price"),
        (1_200_000_000, 5, "$1.20 + no price"),
    ],
)
def test_tokens_without_a_price_are_not_free(nano_usd: int | None, unpriced_tokens: int, text: str) -> None:
    assert formats.charged(nano_usd, unpriced_tokens) == text
