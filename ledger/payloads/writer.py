"""The payload writer: writes payloads from the PAYLOADS stream to SQL, and deletes expired ones.

Runs beside the ledger writer. While SQL is down, payloads wait in the stream, which drops its oldest when it is full.
"""

import asyncio
import logging
from functools import partial
from typing import Final

from sqlalchemy.ext.asyncio import AsyncEngine

from db.engine import SQL_ERRORS, describe
from db.set_aside import SetAside
from ledger.intake import Intake, Source
from ledger.payloads.store import DELETE_ROWS, delete_expired, store_payloads
from protocol import subjects
from protocol.nats.bus import Bus
from protocol.process import wait_for
from protocol.usage import read_payloads

PULL_MESSAGES: Final = 8  # per pull: of at most 8 MB each, and usually far less
EXPIRY_PERIOD_S: Final = 60.0
EXPIRY_PAUSE_S: Final = 0.5  # between batches, so that other writers can write

log = logging.getLogger(__name__)


async def run(bus: Bus, engine: AsyncEngine, stopping: asyncio.Event) -> None:
    """Write payloads and delete expired ones until ``stopping`` is set."""
    source = Source(
        kind="payload",
        stream=subjects.PAYLOADS_STREAM,
        consumer=subjects.PAYLOADS_CONSUMER,
        pull_messages=PULL_MESSAGES,
        write_messages=1,
        read=read_payloads,
        write=partial(store_payloads, engine),
        name_and_owner=lambda record: (record.request_id, record.key_id),
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(Intake(bus, source, SetAside(engine), stopping).run(), name="payload intake")
        group.create_task(_delete_expired(engine, stopping), name="expiry of payloads")


async def _delete_expired(engine: AsyncEngine, stopping: asyncio.Event) -> None:
    """Delete expired payloads, every minute, and sooner while there are more."""
    deleted = DELETE_ROWS
    while not await wait_for(stopping, EXPIRY_PAUSE_S if deleted == DELETE_ROWS else EXPIRY_PERIOD_S):
        try:
            deleted = await delete_expired(engine)
        except SQL_ERRORS as error:
            log.warning("cannot delete expired payloads, will retry: %s", describe(error))
            deleted = 0
