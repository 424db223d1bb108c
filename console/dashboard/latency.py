"""Percentiles over time, in steps coarse enough to be meaningful."""

from typing import Any, Final, get_args

from sqlalchemy.ext.asyncio import AsyncConnection

from console.dashboard.charts import Chart, Line
from console.dashboard.view import DAY_MS, View
from gateway.errors import InvalidParameter
from ledger.histogram import Measure
from ledger.queries.distributions import Percentiles, percentile_series, percentiles
from ledger.queries.window import Step

MIN_VALUES: Final = 20  # with fewer, a percentile is meaningless and not shown
VALUES_PER_STEP: Final = 40  # on average; the minimum for a step to be wide enough
MIN_SPAN_BY_DAY_MS: Final = 3 * DAY_MS
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

    Raises InvalidParameter.
    """
    measure = next((measure for measure in TITLES if measure == name), None)
    if measure is None:
        raise InvalidParameter(f"measure: must be one of {', '.join(TITLES)}.", param="measure")
    (whole,) = await percentiles(connection, view.window, measure, where=view.filters)
    step = _step(view, whole.n)
    steps = view.window.steps(step)
    found = await percentile_series(connection, view.window, step, measure, where=view.filters)
    points = [shown(point) for point in found[0].points] if found else [(None,) * 3 for _ in steps]
    names = (("p50", 1), ("p95", 3), ("p99", 4))
    lines = [
        Line(name, [point[index] for point in points], colour, gaps=True) for index, (name, colour) in enumerate(names)
    ]
    return {"chart": Chart(TITLES[measure], "ms", steps, lines, view, whole=False, step=step)}


def _step(view: View, n: int) -> Step:
    steps: tuple[Step, ...] = get_args(Step)
    coarser = [step for step in steps[steps.index(view.step) :] if step != "day" or _is_long(view)]
    fine = (step for step in coarser if n >= VALUES_PER_STEP * len(view.window.steps(step)))
    return next(fine, coarser[-1])


def _is_long(view: View) -> bool:
    return view.until_unix_ms - view.since_unix_ms >= MIN_SPAN_BY_DAY_MS
