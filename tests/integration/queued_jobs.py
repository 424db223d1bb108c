"""The jobs that wait for workers, as the queue server counts them."""

from functools import partial

from protocol import subjects
from protocol.nats.bus import Bus
from tests.waiting import until


async def queued_jobs(bus: Bus) -> int:
    """Return how many jobs wait. Raises BusError."""
    info = await bus.api(f"STREAM.INFO.{subjects.INTERACTIVE_STREAM}")
    return int(info["state"]["messages"])


async def until_queued(bus: Bus, jobs: int) -> None:
    """Return once so many jobs wait."""
    await until(partial(_are_queued, bus, jobs))


async def _are_queued(bus: Bus, jobs: int) -> bool:
    return await queued_jobs(bus) == jobs
