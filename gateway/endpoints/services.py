"""Dependencies of the routes off the hot path."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from db.accounts.keyring import KeyRing
from db.set_aside import SetAside
from gateway.admission.control import AdmissionControl
from gateway.core import Core
from gateway.dispatch.dispatcher import Dispatcher
from gateway.http.body import BodyReader
from gateway.limits.leases import Quotas
from gateway.payloads import PayloadPublisher
from gateway.settings import GatewaySettings
from gateway.telemetry.metrics import RequestSeries
from gateway.tokenizing.catalog import ModelCatalog
from protocol.nats.bus import Bus


@dataclass(frozen=True, slots=True)
class Services:
    """The started parts of one gateway process."""

    settings: GatewaySettings
    bus: Bus
    keys: KeyRing
    catalog: ModelCatalog
    core: Core
    dispatcher: Dispatcher
    admission_control: AdmissionControl
    bodies: BodyReader
    series: RequestSeries
    quotas: Quotas
    payloads: PayloadPublisher
    set_aside: SetAside
    started_unix_s: int
    further_series: tuple[Callable[[], Iterable[Metric]], ...]  # of webhooks, batches and responses
