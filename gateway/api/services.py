"""What the HTTP side works with."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.admission.control import AdmissionControl
from gateway.api.keyed import KeyedRequests
from gateway.api.refusals import RefusalLog
from gateway.auth.keyring import KeyRing
from gateway.dashboard.reader import Reader
from gateway.dispatch.dispatcher import Dispatcher
from gateway.limits.body_reader import BodyReader
from gateway.metrics.requests import RequestSeries
from gateway.payloads.publisher import PayloadPublisher
from gateway.quotas.prices import CurrentPrices
from gateway.quotas.quotas import Quotas
from gateway.settings import GatewaySettings
from gateway.tokens.catalog import ModelCatalog
from gateway.web.login import Login
from protocol.bus import Bus

if TYPE_CHECKING:
    from gateway.traces import RequestTraces


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one gateway process, all of them started."""

    settings: GatewaySettings
    bus: Bus
    keys: KeyRing
    catalog: ModelCatalog
    dispatcher: Dispatcher
    admission_control: AdmissionControl
    bodies: BodyReader
    keyed: KeyedRequests
    series: RequestSeries
    refusals: RefusalLog
    quotas: Quotas
    prices: CurrentPrices
    database: AsyncEngine  # for pages and the admin API; no generating request waits for it
    login: Login
    payloads: PayloadPublisher
    reader: Reader  # the ledger, for the dashboard
    started_unix_s: int
    traces: "RequestTraces | None" = None  # None: they are off
