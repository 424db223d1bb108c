"""Charts: lines over time for the browser to draw, and shapes that the server draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from console.dashboard import formats
from console.dashboard.view import View
from db.money import NANO_USD
from ledger.queries.distributions import LengthHistogram
from ledger.queries.window import Window

HEAT_SHADES: Final = 10  # CSS classes h0 (nothing) to h9
LINE_COLORS: Final = 6  # CSS variables --series-1 to --series-6
BAR_HEIGHT_PX: Final = 21
WEEKDAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart, with a value for each step."""

    name: str
    values: Values
    color: int  # of LINE_COLORS, from 1
    bars: bool = False
    fill: bool = False
    gaps: bool = False  # single points between gaps are drawn
    stacked: bool = False  # on those before it
    stepped: bool = False  # constant over each step, where several steps share a value


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment that a chart points at."""

    at_unix_ms: int
    text: str


@dataclass(frozen=True, slots=True)
class NumberRow:
    """One step of a chart, as numbers."""

    since: int
    until: int
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over time. A click on a step opens its requests."""

    title: str
    unit: str  # "ms", "USD", or what is counted
    steps: Sequence[Window]
    lines: Sequence[Line]
    view: View
    whole: bool = True  # only whole numbers on the axis
    path: str = "/dashboard/requests"  # of the page that a click opens
    marks: Sequence[Mark] = ()  # machines that were lost

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to draw."""
        return not any(value for line in self.lines for value in line.values)

    def data(self) -> dict[str, Any]:
        """Return the data for dashboard.js."""
        edges = [step.since_unix_ms for step in self.steps] + [self.steps[-1].until_unix_ms]
        fields = ("name", "values", "color", "bars", "fill", "gaps", "stacked", "stepped")
        return {
            "unit": self.unit,
            "whole": self.whole,
            "step": self.view.step,
            "edges": edges,
            "drill": f"{self.path}?"
            + self.view.query(range=None, since=None, until=None, by=None, refresh=None, **{"and": None}),
            "lines": [{name: getattr(line, name) for name in fields} for line in self.lines],
            "marks": [mark.at_unix_ms for mark in self.marks],
        }

    def rows(self) -> list[NumberRow]:
        """Return the same data as numbers, without empty steps."""
        rows = []
        for step, values in zip(self.steps, zip(*(line.values for line in self.lines), strict=True), strict=True):
            if any(values):
                texts = tuple(write(value, self.unit) for value in values)
                rows.append(NumberRow(step.since_unix_ms, step.until_unix_ms, texts))
        return rows


def write(value: float | None, unit: str) -> str:
    """Format a value with its unit, where it has one."""
    if unit == "ms":
        return formats.duration(value)
    return formats.money(None if value is None else value * NANO_USD) if unit == "USD" else formats.count(value)


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a distribution."""

    label: str
    count: int
    width: float  # percent of the greatest
    y: int
    title: str


@dataclass(frozen=True, slots=True)
class Bars:
    """A distribution, from the shortest to the longest."""

    bars: Sequence[Bar]
    summary: str

    @property
    def height(self) -> int:
        """Height in pixels."""
        return len(self.bars) * BAR_HEIGHT_PX + 4


def distribution(histogram: LengthHistogram, what: str) -> Bars:
    """Draw the bars of a histogram, without its empty ends."""
    used = [index for index, count in enumerate(histogram.counts) if count]
    if not used:
        return Bars((), "")
    total, greatest = sum(histogram.counts), max(histogram.counts)
    bars = []
    for row, index in enumerate(range(used[0], used[-1] + 1)):
        least, most, count = histogram.edges[index], histogram.edges[index + 1], histogram.counts[index]
        label = formats.count(most) if most <= least + 1 else f"{formats.count(least + 1)}–{formats.count(most)}"
        title = f"{label} {what}: {formats.count(count)} requests ({formats.share(count / total)})"
        bars.append(Bar(label, count, round(count / greatest * 100, 2), row * BAR_HEIGHT_PX, title))
    summary = "; ".join(f"{bar.label}: {formats.share(bar.count / total)}" for bar in bars if bar.count)
    return Bars(bars, f"Distribution of {what}. {summary}")


@dataclass(frozen=True, slots=True)
class Cell:
    """One hour of the week."""

    x: float  # percent
    y: int
    shade: int
    title: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A figure by hour and weekday; positions are percent across and pixels down."""

    cells: Sequence[Cell]
    hours: Sequence[tuple[float, str]]
    days: Sequence[tuple[int, str]]
    greatest: int
    summary: str


HEAT_LEFT: Final = 9.0  # percent, for the weekdays' names
HEAT_CELL: Final = (100 - HEAT_LEFT) / 24
HEAT_TOP_PX: Final = 18
HEAT_ROW_PX: Final = 26


def heat_map(rows: Sequence[Sequence[int]], what: str) -> HeatMap:
    """Draw ``rows``, 7 weekdays (Monday first) of 24 hours each."""
    greatest = max(max(row) for row in rows)
    cells = [
        Cell(
            round(HEAT_LEFT + hour * HEAT_CELL, 3),
            HEAT_TOP_PX + weekday * HEAT_ROW_PX,
            _shade(value, greatest),
            f"{WEEKDAYS[weekday]} {hour:02}:00–{(hour + 1) % 24:02}:00: {formats.count(value)} {what}",
        )
        for weekday, row in enumerate(rows)
        for hour, value in enumerate(row)
    ]
    hours = [(round(HEAT_LEFT + hour * HEAT_CELL, 3), f"{hour:02}") for hour in range(0, 24, 3)]
    days = [(HEAT_TOP_PX + index * HEAT_ROW_PX + 17, name) for index, name in enumerate(WEEKDAYS)]
    busiest = max(cells, key=lambda cell: cell.shade).title if greatest else "nothing"
    return HeatMap(cells, hours, days, greatest, f"{what.capitalize()} by weekday and hour; the most: {busiest}")


def _shade(value: int, greatest: int) -> int:
    return 0 if not value else max(1, min(HEAT_SHADES - 1, -(-value * (HEAT_SHADES - 1) // greatest)))
