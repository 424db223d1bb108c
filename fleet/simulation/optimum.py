"""The lowest possible cost of the same work with perfect knowledge of the future: a linear program.

For each interval and place there are machines (as fractions, at most as many as could be had throughout), starts, batch
work done and tokens sent to the hosted API; starts cost their start-up time. Interactive work is served within its
interval, batch work by its deadline. Fractions, and bursts within an interval that cost nothing, make it a lower bound:
no schedule is cheaper. Solved by HiGHS.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fleet.simulation.market import Counts
from fleet.simulation.workload import Workload
from fleet.simulation.world import HostedApi, SimulatedPool

INTERVAL_S: Final = 300


class Unsolved(Exception):
    """The programme has no solution, or HiGHS did not find it."""


def least_usd(
    workload: Workload, pools: Sequence[SimulatedPool], market: Mapping[str, Counts], hosted: HostedApi | None
) -> float:
    """Return the lower bound of the cost in USD. Raises Unsolved, or ImportError without ``highspy``."""
    import highspy  # noqa: PLC0415  # an extra

    # Work is counted in what the fastest machine does in an interval: with tokens HiGHS loses its way in the digits.
    unit = max(pool.tokens_per_s for pool in pools) * INTERVAL_S
    intervals = workload.seconds // INTERVAL_S
    arriving = workload.tokens[: intervals * INTERVAL_S].reshape(intervals, INTERVAL_S).sum(axis=1) / unit
    places = [(pool, place) for pool in pools for place in pool.places]
    model = highspy.Highs()  # type: ignore[no-untyped-call]
    model.setOptionValue("output_flag", False)
    columns = _Columns(model)
    rows = _Rows(model)
    running = []
    for pool, place in places:
        most = np.full(intervals, float(pool.max_workers))
        if place in market:
            had = market[place][: intervals * INTERVAL_S].reshape(intervals, INTERVAL_S).min(axis=1)
            most = np.minimum(most, had)
        at_work = columns.add(pool.usd_per_hour * INTERVAL_S / 3600, most)
        starts = columns.add(pool.usd_per_hour * pool.start_s / 3600, np.full(intervals, np.inf))
        for now in range(intervals):
            before = [] if now == 0 else [(at_work[now - 1], 1.0)]
            rows.at_least(0.0, [(starts[now], 1.0), (at_work[now], -1.0), *before])
        running.append((pool, at_work))
    batch = columns.add(0.0, np.full(intervals, np.inf))
    bought = (
        None if hosted is None else columns.add(hosted.usd_per_million_tokens / 1e6 * unit, np.full(intervals, np.inf))
    )
    for now in range(intervals):
        speed = [(at_work[now], pool.tokens_per_s * INTERVAL_S / unit) for pool, at_work in running]
        rows.at_least(
            float(arriving[now]), [*speed, (batch[now], -1.0), *([] if bought is None else [(bought[now], 1.0)])]
        )
    for window in _windows(workload, intervals):
        rows.at_least(window[2] / unit, [(batch[now], 1.0) for now in range(window[0], window[1])])
    model.run()
    if model.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise Unsolved(f"HiGHS says {model.modelStatusToString(model.getModelStatus())}")
    return float(model.getInfo().objective_function_value)


def _windows(workload: Workload, intervals: int) -> list[tuple[int, int, float]]:
    """Return (first interval, end, tokens) for each pair of a submission and a deadline: what must be done between.

    That is sufficient: work whose windows all hold can be scheduled by deadlines.
    """
    begins = sorted({-(-job.at_s // INTERVAL_S) for job in workload.batch})
    ends = sorted({min(intervals, job.due_s // INTERVAL_S) for job in workload.batch})
    found = []
    for begin in begins:
        for end in ends:
            inside = [
                job.tokens
                for job in workload.batch
                if -(-job.at_s // INTERVAL_S) >= begin and min(intervals, job.due_s // INTERVAL_S) <= end
            ]
            if begin < end and inside:
                found.append((begin, end, float(sum(inside))))
    return found


class _Columns:
    def __init__(self, model: Any) -> None:  # noqa: ANN401  # highspy has no types
        self._model = model
        self._count = 0

    def add(self, usd: float, most: np.ndarray) -> range:
        """Add a variable for each interval, from 0 to ``most``; returns their numbers."""
        numbers = range(self._count, self._count + len(most))
        for bound in most:
            self._model.addCol(usd, 0.0, float(bound), 0, [], [])
        self._count += len(most)
        return numbers


class _Rows:
    def __init__(self, model: Any) -> None:  # noqa: ANN401  # highspy has no types
        self._model = model

    def at_least(self, least: float, terms: Sequence[tuple[int, float]]) -> None:
        columns = [column for column, _ in terms]
        self._model.addRow(least, np.inf, len(columns), columns, [factor for _, factor in terms])
