"""The ledger's backlog in the queue server: unwritten messages, and parked records."""

import asyncio
from typing import Any, Final

from protocol import subjects
from protocol.errors import BusError
from protocol.nats.bus import Bus

INFO_LIMIT_S: Final = 0.5  # for the queue server's answer


async def unwritten_messages(bus: Bus) -> int | None:
    """Return the number of unwritten messages; None if the queue server does not answer quickly."""
    info = await _info(bus, f"CONSUMER.INFO.{subjects.USAGE_STREAM}.{subjects.LEDGER_CONSUMER}")
    return None if info is None else int(info["num_pending"]) + int(info["num_ack_pending"])


async def parked_messages(bus: Bus) -> int | None:
    """Return the number of parked records (``ledger.parked``); None if the queue server does not answer quickly."""
    info = await _info(bus, f"STREAM.INFO.{subjects.PARKED_STREAM}")
    return None if info is None else int(info["state"]["messages"])


async def _info(bus: Bus, subject: str) -> dict[str, Any] | None:
    if not bus.connected:
        return None
    try:
        async with asyncio.timeout(INFO_LIMIT_S):
            return await bus.api(subject)
    except (BusError, TimeoutError):
        return None
