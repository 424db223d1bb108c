"""The webhook tasks that run in the ledger writer's process."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from pydantic import SecretStr
from sqlalchemy.ext.asyncio import AsyncEngine

from db.set_aside import SetAside
from ledger.intake import Intake, Source
from ledger.webhooks.budgets import BudgetWatch
from ledger.webhooks.deliverer import Deliverer
from ledger.webhooks.deliveries import Deliveries
from ledger.webhooks.events import Event, decode_event
from ledger.webhooks.secrets import SecretBox
from ledger.webhooks.settings import WebhookSettings
from ledger.webhooks.state import StateTeller
from protocol import subjects
from protocol.nats.bus import Bus
from protocol.process import backoff_s, wait_for

RESTART_LONGEST_S: Final = 30.0
PULL_MESSAGES: Final = 100  # per pull, and so in one transaction

log = logging.getLogger(__name__)


async def run(
    bus: Bus, engine: AsyncEngine, stopping: asyncio.Event, settings: WebhookSettings, pepper: SecretStr
) -> None:
    """Receive events, deliver them, watch budgets and publish the state, until ``stopping`` is set.

    A part that fails is restarted and does not stop the ledger writer.
    """
    waiting = settings.max_waiting_per_endpoint
    deliveries = Deliveries(engine, max_waiting=waiting, retries_s=settings.retries_s)
    box, added = SecretBox(pepper), asyncio.Event()
    parts: dict[str, Callable[[], Awaitable[None]]] = {
        "webhook intake": lambda: Intake(bus, _events(deliveries, added), SetAside(engine), stopping).run(),
        "webhook deliverer": lambda: Deliverer(deliveries, settings, box, added, stopping).run(),
        "budget watch": lambda: BudgetWatch(bus, engine, settings.budget_check_s, stopping).run(),
        "webhook state": lambda: StateTeller(bus, deliveries, settings.state_s, stopping).run(),
    }
    async with asyncio.TaskGroup() as group:
        for name, part in parts.items():
            group.create_task(_kept(name, part, stopping), name=name)


def _events(deliveries: Deliveries, added: asyncio.Event) -> Source[Event]:
    """Return the stream of events, which become deliveries; ``added`` is set whenever there are new ones."""

    async def add(events: Sequence[Event]) -> None:
        if await deliveries.add(events):
            added.set()

    return Source(
        kind="webhook event",
        stream=subjects.WEBHOOKS_STREAM,
        consumer=subjects.WEBHOOKS_CONSUMER,
        pull_messages=PULL_MESSAGES,
        write_messages=PULL_MESSAGES,
        read=lambda payload: ([decode_event(payload)], []),
        write=add,
        name_and_owner=lambda event: (f"{event.type} {event.id}", event.team_id),
    )


async def _kept(name: str, part: Callable[[], Awaitable[None]], stopping: asyncio.Event) -> None:
    """Run a part until it has stopped; restart it if it fails."""
    for wait_s in backoff_s(RESTART_LONGEST_S):
        try:
            await part()
        except Exception:  # no error may stop the writing of usage
            log.exception("%s failed, restarting it", name)
        if await wait_for(stopping, wait_s):
            return
