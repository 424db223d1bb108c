"""Counting values in buckets, and showing the counts."""

import itertools
from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import INF, floatToGoString

from protocol.job import Histogram


class Buckets:
    """Counts of values; each bucket has an upper bound that belongs to it, and the last one has none."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Histogram:
        """Return what has been counted so far."""
        return Histogram(self._bounds, tuple(self._counts), self._total)


def add_histogram(family: HistogramMetricFamily, labels: Sequence[str], histogram: Histogram) -> None:
    """Show a histogram: Prometheus' buckets hold what is below them as well."""
    names = map(floatToGoString, (*histogram.bounds, INF))
    buckets = list(zip(names, itertools.accumulate(histogram.counts), strict=True))
    family.add_metric(labels, buckets=buckets, sum_value=histogram.total)
