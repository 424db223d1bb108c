"""The viewer's choices: time span, filters and grouping from the URL; zone and colors from cookies."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final, cast, get_args
from urllib.parse import urlencode
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from starlette.requests import Request

from console.rules import person_of
from gateway.errors import InvalidParameter, UnknownObject
from ledger.days import NoMonth, parse_month
from ledger.queries.log import Tag
from ledger.queries.window import DIMENSIONS, NO_FILTERS, QUARTER_MS, Dimension, Filters, Step, Window
from ledger.rollups import MINUTES_KEPT_MS
from protocol.nats.clock import unix_now_ms
from protocol.usage import MAX_TAG_NAME_CHARS, MAX_TAG_VALUE_CHARS

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 24 * HOUR_MS
RANGES: Final = {
    "15m": 15 * MINUTE_MS,
    "1h": HOUR_MS,
    "6h": 6 * HOUR_MS,
    "24h": DAY_MS,
    "7d": 7 * DAY_MS,
    "30d": 30 * DAY_MS,
    "90d": 90 * DAY_MS,
}
REFRESH_S: Final = (10, 60)
DEFAULT_RANGE: Final = "24h"
MAX_SPAN_MS: Final = 400 * DAY_MS
MAX_VALUE_CHARS: Final = 300
ZONE_COOKIE: Final = "spillway_zone"
THEME_COOKIE: Final = "spillway_theme"
DEFAULT_ZONE: Final = "UTC"
TAG_SIGNS: Final = ":="  # between name and value
MAX_TAG_CHARS: Final = MAX_TAG_NAME_CHARS + 1 + MAX_TAG_VALUE_CHARS
THEMES: Final = ("light", "dark")

_MINUTES_UP_TO_MS: Final = 2 * HOUR_MS
_QUARTERS_UP_TO_MS: Final = 2 * DAY_MS  # steps of charts: about 200 points at most, up to two weeks
_HOURS_UP_TO_MS: Final = 14 * DAY_MS
_ZONE_NAME: Final = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+){0,2}")


@dataclass(frozen=True, slots=True)
class View:
    """One viewer's choices. ``query`` encodes them for links."""

    zone_name: str
    zone: ZoneInfo
    theme: str  # "" follows the system
    range: str  # of RANGES, "month" or "custom"
    since_unix_ms: int
    until_unix_ms: int
    where: dict[Dimension, str] = field(default_factory=dict)
    by: tuple[Dimension, ...] = ()
    refresh_s: int = 0  # of REFRESH_S; 0: the page stays as it is
    read_unix_ms: int = 0  # when this was read
    month: str = ""  # "2026-11", of the range "month"
    tag: str = ""  # "name:value" or "name=value"; single requests are filtered by it, sums are not
    teams: tuple[str, ...] | None = None  # ids of the teams that the viewer is limited to; None: not limited

    @property
    def months(self) -> tuple[str, str]:
        """The last two calendar months, the current one first."""
        today = datetime.fromtimestamp(unix_now_ms() / 1000, self.zone)
        return f"{today:%Y-%m}", f"{today.replace(day=1) - timedelta(days=1):%Y-%m}"

    @property
    def window(self) -> Window:
        """Time span as a window of the ledger's queries."""
        return self._window(self.since_unix_ms, self.until_unix_ms)

    @property
    def before(self) -> Window:
        """Time span of the same length just before."""
        return self._window(2 * self.since_unix_ms - self.until_unix_ms, self.since_unix_ms)

    def _window(self, since_unix_ms: int, until_unix_ms: int) -> Window:
        is_short = until_unix_ms - since_unix_ms <= _MINUTES_UP_TO_MS
        has_minutes = is_short and since_unix_ms >= self.read_unix_ms - MINUTES_KEPT_MS
        return Window(since_unix_ms, until_unix_ms, self.zone, MINUTE_MS if has_minutes else QUARTER_MS)

    @property
    def filters(self) -> Filters:
        """Filters of the ledger's queries."""
        return {**self.scope, **{dimension: (value,) for dimension, value in self.where.items()}}

    @property
    def tags(self) -> tuple[Tag, ...]:
        """The tags that ``tag`` may mean: a name may have a colon, too."""
        return _tags_of(self.tag)

    @property
    def scope(self) -> Filters:
        """Filters by the teams that this viewer may see."""
        return NO_FILTERS if self.teams is None else {"team": self.teams}

    def sees_team(self, team_id: str) -> bool:
        """Return whether this viewer may see a team's objects."""
        return self.teams is None or team_id in self.teams

    @property
    def step(self) -> Step:
        """Step of charts over this time span."""
        span_ms = self.until_unix_ms - self.since_unix_ms
        if self.window.grain_ms == MINUTE_MS:
            return "minute"
        if span_ms <= _QUARTERS_UP_TO_MS:
            return "quarter"
        return "hour" if span_ms <= _HOURS_UP_TO_MS else "day"

    def query(self, **changes: str | int | None) -> str:
        """Return the URL's query for this view with some parameters changed; None removes one."""
        fields: dict[str, str | int | None] = dict(self.where.items())
        fields["tag"] = self.tag
        if self.range == "custom":
            fields |= {"since": self.since_unix_ms, "until": self.until_unix_ms}
        elif self.range == "month":
            fields["month"] = self.month
        else:
            fields["range"] = self.range
        fields |= dict(zip(("by", "and"), self.by, strict=False))
        fields["refresh"] = self.refresh_s or None
        for name in ("range", "month", "since"):  # of these, a link has one
            if name in changes:
                fields |= {"range": None, "month": None, "since": None, "until": None}
        fields |= changes
        return urlencode({name: value for name, value in fields.items() if value not in {None, ""}})

    def usage_query(self, **fields: str) -> str:
        """Return the query of /admin/v1/usage for this time."""
        return urlencode({"from": self.since_unix_ms, "to": self.until_unix_ms, "timezone": self.zone_name, **fields})

    def local_input(self, unix_ms: int) -> str:
        """Format a moment for ``<input type="datetime-local">``."""
        return f"{datetime.fromtimestamp(unix_ms / 1000, self.zone):%Y-%m-%dT%H:%M}"


def view_of(request: Request) -> View:
    """Read a view from a request, limited to the person's teams. Raises InvalidParameter and UnknownObject."""
    view, teams = make_view(request.query_params, request.cookies), person_of(request).team_ids
    chosen = view.where.get("team")
    if teams is not None and chosen is not None and chosen not in teams:
        raise UnknownObject("You are not a member of this team.", param="team")
    return replace(view, teams=teams)


def make_view(params: Mapping[str, str], cookies: Mapping[str, str], now_unix_ms: int | None = None) -> View:
    """Read a view from a query and cookies. Raises InvalidParameter."""
    zone_name, zone = _zone_of(cookies)
    theme = cookies.get(THEME_COOKIE, "")
    now_unix_ms = now_unix_ms or unix_now_ms()
    chosen, since_unix_ms, until_unix_ms = _span(params, zone, now_unix_ms)
    month = params.get("month", "") if chosen == "month" else ""
    return View(
        zone_name=zone_name,
        zone=zone,
        theme=theme if theme in THEMES else "",
        range=chosen,
        since_unix_ms=since_unix_ms,
        until_unix_ms=until_unix_ms,
        where={name: params[name][:MAX_VALUE_CHARS] for name in DIMENSIONS if params.get(name)},
        by=_grouping(params),
        refresh_s=_refresh_s(params),
        read_unix_ms=now_unix_ms,
        month=month,
        tag=_tag(params),
    )


def _tag(params: Mapping[str, str]) -> str:
    tag = params.get("tag", "").strip()[:MAX_TAG_CHARS]
    if tag and not _tags_of(tag):
        raise InvalidParameter("tag: must be a name and a value, as in app:search.", param="tag")
    return tag


def _tags_of(text: str) -> tuple[Tag, ...]:
    ends = [index for index, char in enumerate(text) if char in TAG_SIGNS and 0 < index <= MAX_TAG_NAME_CHARS]
    return tuple((text[:end], text[end + 1 :]) for end in ends)


def _refresh_s(params: Mapping[str, str]) -> int:
    text = params.get("refresh") or "0"
    if text not in {"0", *map(str, REFRESH_S)}:
        raise InvalidParameter(
            f"refresh: must be one of 0, {', '.join(map(str, REFRESH_S))} (seconds).", param="refresh"
        )
    return int(text)


def find_zone(name: str) -> ZoneInfo | None:
    """Return an IANA time zone by its name; None: unknown name."""
    if len(name) > 60 or not _ZONE_NAME.fullmatch(name):
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, OSError, ValueError):
        return None


def _zone_of(cookies: Mapping[str, str]) -> tuple[str, ZoneInfo]:
    name = cookies.get(ZONE_COOKIE, DEFAULT_ZONE).replace("%2F", "/")
    zone = find_zone(name)
    return (DEFAULT_ZONE, ZoneInfo(DEFAULT_ZONE)) if zone is None else (name, zone)


def _span(params: Mapping[str, str], zone: ZoneInfo, now_unix_ms: int) -> tuple[str, int, int]:
    if params.get("since"):
        since = parse_moment("since", params["since"], zone)
        until = parse_moment("until", params["until"], zone) if params.get("until") else now_unix_ms
        if not since < until <= since + MAX_SPAN_MS:
            raise InvalidParameter("until: must be later than since, by at most 400 days.", param="until")
        return "custom", since, until
    if params.get("month"):
        try:
            month = parse_month(params["month"], zone)
        except NoMonth as error:
            raise InvalidParameter(f"month: {error}.", param="month") from error
        return "month", month.since_unix_ms, month.until_unix_ms
    chosen = params.get("range") or DEFAULT_RANGE
    if chosen not in RANGES:
        raise InvalidParameter(f"range: must be one of {', '.join(RANGES)}.", param="range")
    return chosen, now_unix_ms - RANGES[chosen], now_unix_ms


def parse_moment(name: str, text: str, zone: ZoneInfo) -> int:
    """Parse a moment, given as milliseconds since 1970 or as a date and time on the viewer's clock.

    Raises InvalidParameter for ``name``.
    """
    try:
        if text.isascii() and text.isdigit():
            unix_ms = int(text[:16])
        else:
            local = datetime.fromisoformat(text)
            unix_ms = int((local if local.tzinfo else local.replace(tzinfo=zone)).timestamp() * 1000)
        datetime.fromtimestamp(unix_ms / 1000, zone)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidParameter(f"{name}: not a date and time.", param=name) from error
    return unix_ms


def _grouping(params: Mapping[str, str]) -> tuple[Dimension, ...]:
    named = list(dict.fromkeys(params[name] for name in ("by", "and") if params.get(name)))
    for name in named:
        if name not in get_args(Dimension):
            raise InvalidParameter(f"by: must be one of {', '.join(DIMENSIONS)}.", param="by")
    return cast("tuple[Dimension, ...]", tuple(named))
