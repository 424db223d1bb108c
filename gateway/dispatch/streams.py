"""Creates the streams at the start, after each reconnect, and as soon as one is missing."""

import asyncio
import logging
from typing import Final

from gateway.settings import GatewaySettings
from protocol import subjects
from protocol.errors import BusError
from protocol.nats import topology
from protocol.nats.bus import Bus
from protocol.process import backoff_s

MIB: Final = 1024 * 1024
REPAIR_PERIOD_S: Final = 1.0  # one that is deleted again and again is made so often
LONGEST_REPAIR_WAIT_S: Final = 5.0  # between two tries where the server refuses

log = logging.getLogger(__name__)


class Streams:
    """Topology of one gateway's queue server, applied by one task at a time."""

    def __init__(self, bus: Bus, settings: GatewaySettings) -> None:
        queue = settings.queue
        self._bus = bus
        self._queues = settings.queues
        self._hosted_lanes = [
            (model, subjects.hosted_lane(name)) for name, pool in settings.hosted.items() for model in pool.models
        ]
        self._bounds = topology.QueueBounds(
            max_jobs=queue.max_jobs,
            max_bytes=queue.max_mib * MIB,
            max_usage_bytes=queue.usage_max_mib * MIB,
            replicas=queue.replicas,
        )
        self._missed = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()

    async def start(self) -> None:
        """Create what is missing. Raises BusError."""
        await self._apply(topology.FIRST_APPLY_LIMIT_S)
        self._bus.on_stream_missed(self._missed.set)

    async def _apply(self, limit_s: float) -> None:
        lanes = self._hosted_lanes
        await topology.apply(self._bus, self._queues, self._bounds, further_lanes=lanes, limit_s=limit_s)

    async def run(self) -> None:
        """Create streams again that were found missing; never returns."""
        while True:
            await self._missed.wait()
            log.warning("a stream is missing: what is not there is made")
            for wait_s in backoff_s(LONGEST_REPAIR_WAIT_S):
                if await self.restore():
                    break
                await asyncio.sleep(wait_s)
            await asyncio.sleep(REPAIR_PERIOD_S)

    async def restore(self) -> bool:
        """Create what is missing, as far as the server allows; return whether all exist. ``run`` keeps trying."""
        async with self._one_at_a_time:
            try:
                await self._apply(0.0)
            except BusError as error:
                log.warning("the streams are not all there: %s", error)
                self._missed.set()
                return False
            self._missed.clear()  # also what has been missed meanwhile: it is there now
            return True
