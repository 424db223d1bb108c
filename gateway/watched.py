"""This gateway's memory, as the console watches it (``console.dashboard.live.Gateway``)."""

from collections.abc import Mapping, Sequence

from gateway.admission.control import AdmissionControl
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.failovers import Failover, RecentFailovers
from gateway.metrics.requests import RequestSeries
from protocol.messages import Heartbeat
from tokens.catalog import ModelCatalog


class WatchedGateway:
    """Reads what the parts of a gateway know. Only the event loop touches it."""

    def __init__(
        self,
        catalog: ModelCatalog,
        dispatcher: Dispatcher,
        admission_control: AdmissionControl,
        series: RequestSeries,
        failovers: RecentFailovers,
    ) -> None:
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._series = series
        self._failovers = failovers
        self.queues: Sequence[str] = admission_control.queues
        self.waiting_by_lane = admission_control.waiting_by_lane
        self.jobs_per_s = admission_control.jobs_per_s

    @property
    def models(self) -> Sequence[str]:
        """The configured models."""
        return list(self._catalog.models)

    @property
    def unusable(self) -> Mapping[str, str]:
        """The models whose cards cannot be used, and why."""
        return self._catalog.unusable

    @property
    def in_flight(self) -> int:
        """Requests that it holds."""
        return self._dispatcher.in_flight

    @property
    def draining(self) -> bool:
        """True once it is shutting down."""
        return self._dispatcher.draining

    @property
    def clock_skew_s(self) -> float:
        """Seconds that its clock is ahead of the queue server's."""
        return self._dispatcher.clock_skew_s

    @property
    def ended_requests(self) -> int:
        """Requests that have ended so far."""
        return self._series.ended_requests()

    @property
    def failovers(self) -> Sequence[Failover]:
        """The latest ones, the last one last."""
        return self._failovers.latest

    def live_workers(self) -> Sequence[Heartbeat]:
        """The last heartbeat of each live worker."""
        return self._dispatcher.live_workers()
