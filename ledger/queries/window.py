"""The subject of a query: a time span in a viewer's zone, its steps, and filters."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from typing import Final, Literal

from ledger.days import midnight_unix_ms, month_span

MINUTE_MS: Final = 60_000
QUARTER_MS: Final = 900_000
HOUR_MS: Final = 3_600_000
DAY_MS: Final = 86_400_000
MAX_STEPS: Final = 4_000  # of one series: 166 days by the hour, ten years by the day

Dimension = Literal["model", "pool", "provider", "region", "tier", "team", "key", "endpoint", "outcome"]
DIMENSIONS: Final[tuple[Dimension, ...]] = (
    "model",
    "pool",
    "provider",
    "region",
    "tier",
    "team",
    "key",
    "endpoint",
    "outcome",
)
Step = Literal["minute", "quarter", "hour", "day", "month"]
_WIDTHS_MS: Final[Mapping[Step, int]] = {"minute": MINUTE_MS, "quarter": QUARTER_MS, "hour": HOUR_MS}  # others vary
Filters = Mapping[Dimension, Collection[str]]  # allowed values; a dimension that is missing allows all
NO_FILTERS: Final[Filters] = {}


class TooManySteps(ValueError):
    """The series would have more than MAX_STEPS points; ask for less time or longer steps."""


@dataclass(frozen=True, slots=True)
class Window:
    """A time span, [since, until), as a viewer in ``zone`` sees it.

    A span that begins or ends inside a grain is widened to all of it. Rollups have quarters of an hour permanently, and
    minutes for the last hours (ledger.rollups.MINUTES_KEPT_MS).
    """

    since_unix_ms: int
    until_unix_ms: int
    zone: tzinfo | None = UTC  # None: the machine's
    grain_ms: int = QUARTER_MS  # or MINUTE_MS

    def __post_init__(self) -> None:
        """Widen to whole grains."""
        object.__setattr__(self, "since_unix_ms", self.since_unix_ms // self.grain_ms * self.grain_ms)
        object.__setattr__(self, "until_unix_ms", -(-self.until_unix_ms // self.grain_ms) * self.grain_ms)

    @property
    def in_quarters(self) -> "Window":
        """The same span in quarters of an hour, for figures that have no minutes."""
        return Window(self.since_unix_ms, self.until_unix_ms, self.zone)

    def steps(self, step: Step) -> list["Window"]:
        """Split the window where the viewer's clock begins a new step. Raises TooManySteps.

        Days are from midnight to midnight there, of 23 or 25 hours where clocks change, and months from the first of
        one to the first of the next.
        """
        cuts: list[int] = []
        for cut in self._cuts(step):
            cuts.append(cut)
            if len(cuts) > MAX_STEPS:
                raise TooManySteps(f"more than {MAX_STEPS} steps. Choose a shorter period or longer steps")
        ends = [*cuts[1:], self.until_unix_ms]
        return [Window(start, end, self.zone, self.grain_ms) for start, end in zip(cuts, ends, strict=True)]

    def _cuts(self, step: Step) -> Iterator[int]:
        at = self.since_unix_ms
        while at < self.until_unix_ms:
            yield at
            at = self._next(at, step)

    def _next(self, at_unix_ms: int, step: Step) -> int:
        local = datetime.fromtimestamp(at_unix_ms / 1000, self.zone)
        day: date = local.date()
        if step == "day":
            return midnight_unix_ms(day + timedelta(days=1), self.zone)
        if step == "month":
            return month_span(day.year, day.month, self.zone).until_unix_ms
        width_ms = _WIDTHS_MS[step]
        # An hour begins by the local clock: at :30 of UTC in UTC+5:30.
        into_ms = (local.minute * 60_000 + local.second * 1000) % width_ms
        return at_unix_ms - into_ms + width_ms
