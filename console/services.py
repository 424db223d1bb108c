"""The services that the pages and the admin API use."""

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncEngine

from console.dashboard.reader import Reader
from console.login.login import Login
from console.settings import ConsoleSettings
from db.accounts.keyring import KeyRing
from gateway.mount import GatewayParts
from protocol.nats.bus import Bus


@dataclass(frozen=True, slots=True)
class ConsoleServices:
    """The parts of a process that serves the console, all of them started."""

    settings: ConsoleSettings
    bus: Bus
    keys: KeyRing
    database: AsyncEngine
    login: Login
    reader: Reader  # the ledger, for the dashboard
    gateway: GatewayParts  # its memory, for the live numbers
