"""All of webhooks that runs beside the ledger writer, in its process."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from db.set_aside import SetAside
from ledger.webhooks.budgets import BudgetWatch
from ledger.webhooks.deliverer import Deliverer
from ledger.webhooks.deliveries import Deliveries
from ledger.webhooks.intake import Intake
from ledger.webhooks.secrets import SecretBox
from ledger.webhooks.settings import WebhookSettings
from ledger.webhooks.state import StateTeller
from protocol.nats.bus import Bus
from protocol.process import backoff_s, wait_for

RESTART_LONGEST_S: Final = 30.0

log = logging.getLogger(__name__)


async def run(
    bus: Bus, engine: AsyncEngine, stopping: asyncio.Event, settings: WebhookSettings, pepper: SecretStr
) -> None:
    """Take events, deliver them, watch budgets, and tell how it goes, until ``stopping`` is set.

    A part that fails begins again: the ledger writer beside it goes on.
    """
    waiting = settings.max_waiting_per_endpoint
    deliveries = Deliveries(engine, max_waiting=waiting, retries_s=settings.retries_s)
    box, added = SecretBox(pepper), asyncio.Event()
    parts: dict[str, Callable[[], Awaitable[None]]] = {
        "webhook intake": lambda: Intake(bus, deliveries, SetAside(engine), added, stopping).run(),
        "webhook deliverer": lambda: Deliverer(deliveries, settings, box, added, stopping).run(),
        "budget watch": lambda: BudgetWatch(bus, engine, settings.budget_check_s, stopping).run(),
        "webhook state": lambda: StateTeller(bus, deliveries, settings.state_s, stopping).run(),
    }
    async with asyncio.TaskGroup() as group:
        for name, part in parts.items():
            group.create_task(_kept(name, part, stopping), name=name)


async def _kept(name: str, part: Callable[[], Awaitable[None]], stopping: asyncio.Event) -> None:
    """Run a part until it has stopped, again whenever it fails."""
    for wait_s in backoff_s(RESTART_LONGEST_S):
        try:
            await part()
        except Exception:  # whatever it is, usage must be written on
            log.exception("%s failed and begins again", name)
        if await wait_for(stopping, wait_s):
            return
