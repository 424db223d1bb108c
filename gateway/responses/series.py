"""The series of responses in the background in a gateway's ``/metrics``."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric


class RunSeries:
    """Counts since this gateway started. Only the event loop touches it."""

    def __init__(self) -> None:
        self.running = 0  # that are made here
        self.unreadable = 0  # whose run cannot be read here
        self.taken_over = 0
        self.given_up = 0  # since every try to make them failed

    def families(self) -> Iterator[Metric]:
        """Return all series."""
        for name, meaning, value in (
            ("spillway_background_responses", "Responses in the background that are made here.", self.running),
            ("spillway_background_unreadable", "Responses in the background that cannot be read.", self.unreadable),
        ):
            yield GaugeMetricFamily(name, meaning, value=value)
        for name, meaning, count in (
            ("spillway_background_takeovers", "Responses in the background that were taken over.", self.taken_over),
            ("spillway_background_given_up", "Responses in the background that failed too often.", self.given_up),
        ):
            yield CounterMetricFamily(name, meaning, value=count)
