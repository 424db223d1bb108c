"""What a gateway's process serves besides, such as the console. It is given from above: no arrow leads there."""

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
    """The parts of a gateway that others may read, all of them started. Only the event loop touches them."""

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
    """What is served beside the API."""

    routers: Sequence[APIRouter]
    bodies: Sequence[type[Body]]  # that the OpenAPI description has besides FastAPI's own
    add_answers: Callable[[FastAPI], None]  # to errors, and pages that need the application


Mount = Callable[[GatewayParts], AbstractAsyncContextManager[Mounted]]
