"""Leader election by a lease: any number of controllers can run, one leads.

If two controllers briefly lead, there may be an extra machine. It has a row, and the next decision ends it.
"""

import logging
from typing import Final

from protocol import subjects
from protocol.errors import BusError
from protocol.nats.bus import Bus
from protocol.nats.lease import Lease

LEASE_S: Final = 15.0

log = logging.getLogger(__name__)


class Leadership:
    """This controller's view of the lease."""

    def __init__(self, bus: Bus, controller_id: str) -> None:
        self._lease = Lease(bus, subjects.FLEET_BUCKET, "leader", controller_id, lease_s=LEASE_S)

    @property
    def is_leader(self) -> bool:
        """True while this process certainly holds the lease."""
        return self._lease.is_held

    async def renew(self) -> bool:
        """Renew the lease, or take it if it is free; return ``is_leader``."""
        was_leader = self.is_leader
        try:
            if await self._lease.renew() and not was_leader:
                log.info("this controller is now the leader")
        except BusError as error:
            log.warning("cannot renew the leader's lease: %s", error)
        return self.is_leader

    async def release(self) -> None:
        """Release the lease, so that another controller can lead immediately. Raises BusError."""
        await self._lease.release()
