"""Parts of the gateway that the HTTP edge works with."""

from collections.abc import Callable
from dataclasses import dataclass

from db.accounts.keyring import KeyRing
from db.set_aside import SetAside
from gateway.admission.control import AdmissionControl
from gateway.batches.series import BatchSeries
from gateway.dispatch.dispatcher import Dispatcher
from gateway.http.body import BodyReader
from gateway.http.exchange import Exchange
from gateway.http.refusals import RefusalLog
from gateway.idempotency.keyed import KeyedRequests
from gateway.limits.leases import Quotas
from gateway.limits.prices import CurrentPrices
from gateway.payloads import PayloadPublisher
from gateway.request.request import Trace
from gateway.responses.runs import BackgroundRuns
from gateway.responses.store import ResponseStore
from gateway.settings import GatewaySettings
from gateway.telemetry.metrics import RequestSeries
from gateway.tokenizing.catalog import ModelCatalog
from ledger.webhooks.state import StateView
from protocol.nats.bus import Bus


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
    payloads: PayloadPublisher
    webhooks: StateView
    responses: ResponseStore
    background_runs: BackgroundRuns
    batches: BatchSeries
    set_aside: SetAside
    started_unix_s: int
    begin_trace: Callable[[Exchange], Trace] | None = None  # None: traces are off
