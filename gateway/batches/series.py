"""Metrics of batches on this gateway."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.batches.store import OVER, Counts


class Fed(Protocol):
    """A batch being fed."""

    @property
    def open_lines(self) -> int:
        """Number of open lines."""
        ...

    @property
    def left_lines(self) -> int:
        """Number of incomplete lines, including open ones."""
        ...


class BatchSeries:
    """Counts since this gateway started. Use only from the event loop."""

    def __init__(self) -> None:
        self.open_batches = 0  # in progress on all gateways, at the last poll
        self._fed: list[Fed] = []
        self._lines = Counter[str]()
        self._ended = Counter[str]()

    @contextmanager
    def feeding(self, fed: Fed) -> Iterator[None]:
        """Register a batch during the block."""
        self._fed.append(fed)
        try:
            yield
        finally:
            self._fed.remove(fed)

    def committed(self, counts: Counts) -> None:
        """Count committed results."""
        self._lines.update(answered=counts.completed, failed=counts.failed - counts.given_up, given_up=counts.given_up)

    def ended(self, status: str) -> None:
        """Count an ended batch."""
        self._ended[status] += 1

    def families(self) -> Iterator[Metric]:
        """Return all metrics."""
        open_lines = sum(fed.open_lines for fed in self._fed)
        left = sum(fed.left_lines for fed in self._fed)
        for name, meaning, value in (
            ("spillway_batches_open", "Batches in progress, across all gateways.", self.open_batches),
            ("spillway_batches_fed", "Batches that this gateway feeds.", len(self._fed)),
            ("spillway_batch_lines_open", "Batch lines in progress as requests.", open_lines),
            (
                "spillway_batch_lines_waiting",
                "Lines of fed batches that are neither completed nor in progress.",
                left - open_lines,
            ),
        ):
            yield GaugeMetricFamily(name, meaning, value=value)
        lines = CounterMetricFamily("spillway_batch_lines", "Lines whose results are committed.", labels=("outcome",))
        for outcome in ("answered", "failed", "given_up"):
            lines.add_metric((outcome,), self._lines[outcome])
        yield lines
        ended = CounterMetricFamily("spillway_batches", "Batches that have ended.", labels=("status",))
        for status in OVER:
            ended.add_metric((status,), self._ended[status])
        yield ended
