"""What the HTTP side works with."""

from dataclasses import dataclass

from gateway.admission.control import AdmissionControl
from gateway.api.keyed import KeyedRequests
from gateway.auth.keyring import KeyRing
from gateway.dispatch.dispatcher import Dispatcher
from gateway.metrics.requests import RequestSeries
from gateway.settings import GatewaySettings
from gateway.tokens.catalog import ModelCatalog
from protocol.bus import Bus


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one gateway process, all of them started."""

    settings: GatewaySettings
    bus: Bus
    keys: KeyRing
    catalog: ModelCatalog
    dispatcher: Dispatcher
    admission_control: AdmissionControl
    keyed: KeyedRequests
    series: RequestSeries
    started_unix_s: int
