"""Parts that a gateway process serves beside the API, such as the console. Passed in: the gateway imports none."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI
from sqlalchemy.ext.asyncio import AsyncEngine

from db.accounts.keyring import KeyRing
from gateway.admission.control import AdmissionControl
from gateway.api.fields import Body
from gateway.dispatch.dispatcher import Dispatcher
from gateway.settings import GatewaySettings
from gateway.telemetry.log import RecentFailovers
from gateway.telemetry.metrics import RequestSeries
from gateway.tokenizing.catalog import ModelCatalog
from protocol.nats.bus import Bus


@dataclass(frozen=True, slots=True)
class GatewayParts:
    """The started parts of a gateway that mounted parts may read. Only used in the event loop."""

    settings: GatewaySettings
    bus: Bus
    keys: KeyRing
    database: AsyncEngine
    catalog: ModelCatalog
    dispatcher: Dispatcher
    admission_control: AdmissionControl
    series: RequestSeries
    failovers: RecentFailovers


@dataclass(frozen=True, slots=True)
class Mounted:
    """Routes served beside the API."""

    routers: Sequence[APIRouter]
    bodies: Sequence[type[Body]]  # schemas to add to the OpenAPI description
    add_answers: Callable[[FastAPI], None]  # adds error handlers and pages that need the application


Mount = Callable[[GatewayParts], AbstractAsyncContextManager[Mounted]]
