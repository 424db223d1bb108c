"""The latency charts: percentiles over time, with steps widened until each has enough requests."""

from bisect import bisect_right
from typing import Any, Final, get_args

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.charts import Chart, Line
from console.dashboard.view import DAY_MS, View
from gateway.errors import InvalidParameter
from ledger.histogram import Measure
from ledger.queries.distributions import Percentiles, percentile_series, percentiles
from ledger.queries.window import Step

MIN_VALUES: Final = 20  # with fewer, a percentile is meaningless and not shown
VALUES_PER_STEP: Final = 25  # on average; the minimum for a step to be wide enough
MIN_SPAN_BY_DAY_MS: Final = 3 * DAY_MS
STEP_NAMES: Final[dict[Step, str]] = {"quarter": "quarter of an hour", "hour": "hour", "day": "day", "month": "month"}
TITLES: Final[dict[Measure, str]] = {
    "ttft_ms": "Time to first token (TTFT)",
    "tpot_ms": "Time per output token (TPOT)",
    "queue_ms": "Queue wait",
    "total_ms": "End to end",
}


def shown(percentiles: Percentiles) -> tuple[float | None, ...]:
    """Return the values, or None for each if there are too few."""
    return percentiles.values if percentiles.n >= MIN_VALUES else (None,) * len(percentiles.values)


async def latency_chart(connection: AsyncConnection, view: View, name: str) -> dict[str, Any]:
    """Return the values of chart.html: p50, p95 and p99 of a measure over time, with gaps where values are too few.

    Its steps are the view's, as in all charts of a page. Where these have too few values, several share the percentiles
    of a wider step, which the title names.

    Raises InvalidParameter.
    """
    measure = next((measure for measure in TITLES if measure == name), None)
    if measure is None:
        raise InvalidParameter(f"measure: must be one of {', '.join(TITLES)}.", param="measure")
    (whole,) = await percentiles(connection, view.window, measure, where=view.filters)
    wide = _step(view, whole.n)
    found = await percentile_series(connection, view.window, wide, measure, where=view.filters)
    steps = view.window.steps(view.step)
    of_wide: list[tuple[float | None, ...]] = [shown(point) for point in found[0].points] if found else [(None,) * 3]
    starts = [step.since_unix_ms for step in view.window.steps(wide)] if found else [view.window.since_unix_ms]
    points = [of_wide[bisect_right(starts, step.since_unix_ms) - 1] for step in steps]
    is_wide = wide != view.step
    lines = [
        Line(name, [point[index] for point in points], color, gaps=not is_wide, stepped=is_wide)
        for index, (name, color) in enumerate((("p50", 1), ("p95", 3), ("p99", 4)))
    ]
    by = f"by {STEP_NAMES[wide]}" if len(of_wide) > 1 else "whole period"
    title = f"{TITLES[measure]}, {by}" if is_wide else TITLES[measure]
    return {"chart": Chart(title, "ms", steps, lines, view, whole=False)}


def _step(view: View, n: int) -> Step:
    """Return the finest step with enough values on average."""
    steps: tuple[Step, ...] = get_args(Step)
    coarser = [step for step in steps[steps.index(view.step) :] if step != "day" or _is_long(view)]
    fine = (step for step in coarser if n >= VALUES_PER_STEP * len(view.window.steps(step)))
    return next(fine, coarser[-1])


def _is_long(view: View) -> bool:
    return view.until_unix_ms - view.since_unix_ms >= MIN_SPAN_BY_DAY_MS
