from datetime import datetime
from urllib.parse import parse_qsl
from zoneinfo import ZoneInfo

import pytest

from console.dashboard.view import DAY_MS, HOUR_MS, View, make_view
from gateway.errors import InvalidParameter

NOW_MS = 1_800_000_000_000


def view(cookies: dict[str, str] | None = None, /, **params: str) -> View:
    return make_view(params, cookies or {}, NOW_MS)


def test_a_link_leads_to_the_same_view() -> None:
    first = view(range="7d", model="a b&c", outcome="failed", by="team", **{"and": "model"})
    again = make_view(dict(parse_qsl(first.query())), {}, NOW_MS)
    assert again == first
    assert first.filters == {"model": ("a b&c",), "outcome": ("failed",)}
    assert first.by == ("team", "model")
    assert first.until_unix_ms - first.since_unix_ms == 7 * DAY_MS


def test_a_link_with_changes() -> None:
    first = view(model="m", since="1799990000000", until="1799999000000")
    assert first.range == "custom"
    assert parse_qsl(first.query(range="24h", model=None)) == [("range", "24h")]
    assert parse_qsl(view(range="7d").query(since=5, until=6)) == [("since", "5"), ("until", "6")]


def test_a_tag_is_a_name_and_a_value() -> None:
    assert view().tags == ()
    assert view(tag=" app:search ").tags == view(tag="app=search").tags == (("app", "search"),)
    assert view(tag="a:b:c").tags == (("a", "b:c"), ("a:b", "c"))
    assert parse_qsl(view(range="7d", tag="app:search").query()) == [("tag", "app:search"), ("range", "7d")]
    for wrong in ("app", ":search", "=x", "n" * 65 + ":x"):
        with pytest.raises(InvalidParameter, match="name and a value"):
            view(tag=wrong)


@pytest.mark.parametrize(
    ("params", "step", "steps"),
    [
        ({"range": "15m"}, "minute", 15),
        ({"range": "1h"}, "minute", 60),
        ({"range": "6h"}, "quarter", 24),
        ({"since": str(NOW_MS - 3 * HOUR_MS), "until": str(NOW_MS - HOUR_MS)}, "minute", 120),
        ({"since": str(NOW_MS - 4 * HOUR_MS), "until": str(NOW_MS - 3 * HOUR_MS)}, "quarter", 4),  # minutes are deleted
    ],
)
def test_short_times_are_in_minutes_as_long_as_there_are_any(params: dict[str, str], step: str, steps: int) -> None:
    chosen = view(**params)
    assert (chosen.step, len(chosen.window.steps(chosen.step))) == (step, steps)
    assert chosen.before.until_unix_ms >= chosen.window.since_unix_ms


def test_a_page_is_refreshed_as_its_link_says() -> None:
    first = view(range="1h", refresh="10")
    assert first.refresh_s == 10
    assert parse_qsl(first.query()) == [("range", "1h"), ("refresh", "10")]
    assert parse_qsl(first.query(refresh=None)) == [("range", "1h")]


def test_local_times_are_read_in_the_viewers_zone_across_a_change_of_clocks() -> None:
    # On 2026-03-29 clocks in Berlin went from 02:00 to 03:00.
    berlin = {"spillway_zone": "Europe/Berlin"}
    day = view(berlin, since="2026-03-29T00:00", until="2026-03-30T00:00")
    assert day.until_unix_ms - day.since_unix_ms == 23 * 3_600_000
    assert [len(day.window.steps("hour")), day.local_input(day.since_unix_ms)] == [23, "2026-03-29T00:00"]


@pytest.mark.parametrize("cookie", ["", "Nowhere/Land", "../../etc/passwd", "/etc/passwd", "a" * 200, "Europe"])
def test_a_zone_that_is_none_is_utc(cookie: str) -> None:
    assert view({"spillway_zone": cookie}).zone_name == "UTC"


def test_the_cookie_of_a_browser_names_the_zone_and_the_colours() -> None:
    seen = view({"spillway_zone": "Asia/Kolkata", "spillway_theme": "dark"})
    assert (seen.zone_name, seen.zone.key, seen.theme) == ("Asia/Kolkata", "Asia/Kolkata", "dark")
    assert view({"spillway_theme": '"><script>'}).theme == ""


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"range": "3d"}, "range"),
        ({"since": "yesterday"}, "since"),
        ({"since": "9" * 16}, "since"),
        ({"since": "1800000000000", "until": "1799999999999"}, "until"),
        ({"since": "1", "until": "1800000000000"}, "until"),
        ({"by": "secret"}, "by"),
        ({"refresh": "1"}, "refresh"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(params: dict[str, str], named: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        view(**params)
    assert refused.value.param == named


def test_charts_are_cut_into_a_bearable_number_of_steps() -> None:
    for name in ("6h", "24h", "7d", "30d", "90d"):
        seen = view(range=name)
        assert 20 <= len(seen.window.steps(seen.step)) <= 200


def test_a_calendar_month_is_a_range_of_the_viewers_zone() -> None:
    november = make_view({"month": "2026-11", "by": "team"}, {"spillway_zone": "Europe/Berlin"}, NOW_MS)
    assert (november.range, november.month) == ("month", "2026-11")
    begin, end = (
        int(datetime(2026, month, 1, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()) * 1000 for month in (11, 12)
    )
    assert (november.since_unix_ms, november.until_unix_ms, november.step) == (begin, end, "day")
    assert parse_qsl(november.query()) == [("month", "2026-11"), ("by", "team")]
    assert parse_qsl(november.query(range="7d", by=None)) == [("range", "7d")]
    assert parse_qsl(view(range="7d").query(month="2026-11")) == [("month", "2026-11")]
    assert parse_qsl(november.query(since=5, until=6, by=None)) == [("since", "5"), ("until", "6")]


@pytest.mark.parametrize("month", ["2026-13", "2026-1", "11-2026", "0000-01", "9999-12"])
def test_what_is_no_month_is_refused(month: str) -> None:
    with pytest.raises(InvalidParameter, match="is not a month. Example: 2026-11"):
        view(month=month)
