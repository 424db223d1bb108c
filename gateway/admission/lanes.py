"""Lanes of a queue: the choice of a lane for each tenant, and the lanes in use at other gateways."""

import logging
import time
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import Final

from nats.aio.msg import Msg

from protocol import subjects
from protocol.errors import BusError, ProtocolError
from protocol.gateways import LaneInUse, LanesInUse, decode_lanes, encode
from protocol.nats.bus import Bus

# --- shards -----------------------------------------------------------------------------------------------------------
#
# Shuffle sharding: the choice of a tenant's high lane.
#
# Each tenant has two candidate lanes, the same at all gateways. Workers serve the lanes fairly, so a tenant with a
# backlog slows down only tenants whose two candidates are both crowded.

log = logging.getLogger(__name__)


CACHED_TENANTS: Final = 65_536


def _score(tenant: str, lane: str) -> bytes:
    return blake2b(f"{lane}\0{tenant}".encode(), digest_size=8).digest()


@lru_cache(maxsize=CACHED_TENANTS)
def candidate_lanes(tenant: str) -> tuple[str, str]:
    """Return the two lanes of a tenant, by rendezvous hashing: a new lane moves only the tenants that choose it."""
    first, second = sorted(subjects.HIGH_LANES, key=lambda lane: _score(tenant, lane), reverse=True)[:2]
    return first, second


def choose_lane(candidates: tuple[str, str], waiting: tuple[int, int], current: str | None) -> str:
    """Return the lane for a tenant's next job.

    ``waiting``: the jobs in each candidate; ``current``: the lane in which jobs of the tenant already wait, at any
    gateway. The tenant stays in it, because a second lane would give it a second share.
    """
    if current is not None:
        return current
    return candidates[1] if waiting[1] < waiting[0] else candidates[0]


# --- peer lanes -------------------------------------------------------------------------------------------------------
#
# Lanes in which jobs of a tenant wait at other gateways. Gateways report them to each other.

VALID_S: Final = 2.0  # several reporting periods: one lost message does no harm
MAX_TOLD: Final = 4096  # lanes in use in one message, some 100 bytes each


class PeerLanes:
    """Recent reports of other gateways."""

    def __init__(self, bus: Bus, gateway_id: str) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._reports: dict[str, tuple[float, frozenset[LaneInUse]]] = {}  # by gateway, with the time of arrival
        self._has_reported = False

    async def start(self) -> None:
        """Subscribe. Raises BusError."""
        await self._bus.subscribe(subjects.LANES_IN_USE, self._on_message)

    async def _on_message(self, message: Msg) -> None:
        try:
            reported = decode_lanes(message.data)
        except ProtocolError as error:
            log.warning("cannot read another gateway's lanes: %s", error)
            return
        if reported.gateway_id != self._gateway_id:
            self._reports[reported.gateway_id] = time.monotonic(), frozenset(reported.lanes)

    async def publish(self, in_use: Iterable[LaneInUse]) -> None:
        """Report this gateway's lanes. An empty report is sent once; after it, silence means none."""
        lanes = tuple(islice(in_use, MAX_TOLD))
        if lanes or self._has_reported:
            try:
                await self._bus.publish(subjects.LANES_IN_USE, encode(LanesInUse(self._gateway_id, lanes)))
            except BusError as error:  # the next report follows soon
                log.debug("cannot publish the lanes in use: %s", error)
        self._has_reported = bool(lanes)

    def use(self, tenant: str, queue: str, lane: str) -> bool:
        """Return whether jobs of this tenant wait in the lane at another gateway."""
        if not self._reports:
            return False
        in_use = LaneInUse(tenant, queue, lane)
        return any(in_use in lanes for _, lanes in self._reports.values())

    def forget_old(self, now_s: float) -> None:
        """Drop expired reports."""
        for gateway_id in [one for one, (last_seen_s, _) in self._reports.items() if now_s - last_seen_s > VALID_S]:
            del self._reports[gateway_id]
