"""Usage and money by team, key, model, tag, day and month: one answer for the command, the API and the pages."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, cast, get_args

from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.queries.reading import Group
from ledger.queries.tags import TAG_DIMENSIONS, tag_totals
from ledger.queries.traffic import Traffic, totals_by_step
from ledger.queries.window import NO_FILTERS, Dimension, Filters, Step, Window

MAX_ROWS: Final = 100_000

UsageBy = Literal["team", "key", "model", "tag", "day", "month"]
USAGE_BY: Final[tuple[UsageBy, ...]] = get_args(UsageBy)
_DATES: Final = ("day", "month")


class UsageRefused(ValueError):
    """The groups do not go together, or there would be too many rows; the message says which."""


@dataclass(frozen=True, slots=True)
class Usage:
    """One group in one time span. Money in nano-USD."""

    since_unix_ms: int
    until_unix_ms: int
    day: str | None  # "2026-11-28"; this and what follows: None where it is not grouped by
    month: str | None  # "2026-11"
    team_id: str | None
    key_id: str | None
    model: str | None
    tag: str | None  # "name=value"
    sums: Traffic  # by tag: without outcomes, attempts and durations, which are not kept for each


async def usage(
    connection: AsyncConnection, window: Window, by: Sequence[UsageBy], *, where: Filters = NO_FILTERS
) -> list[Usage]:
    """Return all groups, ordered by time and group; without ``by`` there is exactly one row.

    Raises UsageRefused and TooManySteps.
    """
    step: Step | None = "day" if "day" in by else "month" if "month" in by else None
    steps = [window] if step is None else window.steps(step)
    dimensions = [cast("Dimension", name) for name in by if name not in {*_DATES, "tag"}]
    is_tagged = "tag" in by
    if is_tagged:
        strange = sorted({*dimensions, *where} - TAG_DIMENSIONS.keys())
        if strange:
            raise UsageRefused(f"by: tags can be combined only with team and key, not with {', '.join(strange)}")
        found = await tag_totals(connection, steps, where=where, by=dimensions)
    else:
        found = await totals_by_step(connection, steps, where=where, by=dimensions)
        if not by:
            found = found or {(): {0: Traffic(())}}
    rows = [
        _row(steps[number], by, dimensions, group, sums, is_tagged=is_tagged)
        for group, numbers in found.items()
        for number, sums in numbers.items()
    ]
    if len(rows) > MAX_ROWS:
        raise UsageRefused(f"more than {MAX_ROWS} rows. Choose a shorter period or fewer groups")
    return sorted(rows, key=lambda row: (row.since_unix_ms, row.sums.group))


def _row(
    step: Window,
    by: Sequence[UsageBy],
    dimensions: Sequence[Dimension],
    group: Group,
    sums: Traffic,
    *,
    is_tagged: bool,
) -> Usage:
    named = dict(zip(dimensions, group, strict=False))
    first = datetime.fromtimestamp(step.since_unix_ms / 1000, step.zone)
    return Usage(
        step.since_unix_ms,
        step.until_unix_ms,
        f"{first:%Y-%m-%d}" if "day" in by else None,
        f"{first:%Y-%m}" if "month" in by else None,
        named.get("team"),
        named.get("key"),
        named.get("model"),
        "=".join(group[-2:]) if is_tagged else None,
        sums,
    )
