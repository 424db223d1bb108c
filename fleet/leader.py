"""One controller leads, by a lease in NATS' key-value store; any number may run.

The lease is an entry with its holder and its end by the queue server's clock, replaced only by whoever has read what is
there. A leader that cannot renew it in time stops acting before another may begin. What that does not catch, a leader
that is frozen between its look at the lease and the provider's answer, costs a machine too many, which is in the books
and is ended by the next decision.
"""

import base64
import logging
import time
from typing import Final

import msgspec

from protocol import subjects
from protocol.bus import Bus
from protocol.errors import BusError

LEASE_S: Final = 15.0
SLACK_S: Final = 3.0  # between the end of a lease for its holder and for others
CALL_LIMIT_S: Final = 2.0
STREAM: Final = f"KV_{subjects.FLEET_BUCKET}"
SUBJECT: Final = subjects.kv_subject(subjects.FLEET_BUCKET, "leader")

log = logging.getLogger(__name__)


class Lease(msgspec.Struct, frozen=True):
    """The entry."""

    holder: str
    until_unix_s: float


class Leadership:
    """This controller's view of the lease."""

    def __init__(self, bus: Bus, controller_id: str) -> None:
        self._bus = bus
        self._controller_id = controller_id
        self._until_s = 0.0  # monotonic clock

    @property
    def is_leader(self) -> bool:
        """True while the lease is surely ours."""
        return time.monotonic() < self._until_s

    async def renew(self) -> bool:
        """Renew the lease, or take it if it is free; return ``is_leader``."""
        began_s = time.monotonic()
        try:
            taken = await self._take()
        except BusError as error:
            log.warning("the fleet's lease cannot be renewed: %s", error)
            return self.is_leader
        if taken:
            if not self.is_leader:
                log.info("this controller leads the fleet")
            self._until_s = began_s + LEASE_S
        return self.is_leader

    async def release(self) -> None:
        """Let another controller lead at once."""
        if self.is_leader:
            self._until_s = 0.0
            await self._bus.publish(SUBJECT, msgspec.json.encode(Lease("", 0.0)))

    async def _take(self) -> bool:
        found = await self._bus.get_message(STREAM, last_by_subj=SUBJECT)
        now_s = self._bus.clock.now_s()
        sequence = 0
        if found is not None:
            sequence = int(found["seq"])
            lease = msgspec.json.decode(base64.b64decode(found["data"]), type=Lease)
            if lease.holder not in ("", self._controller_id) and lease.until_unix_s + SLACK_S > now_s:
                return False
        mine = msgspec.json.encode(Lease(self._controller_id, now_s + LEASE_S))
        return await self._bus.compare_and_set(SUBJECT, mine, sequence, timeout_s=CALL_LIMIT_S) is not None
