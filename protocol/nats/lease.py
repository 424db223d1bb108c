"""A lease that one of several processes holds, as an entry of a NATS key-value bucket.

The entry has its holder and its end on the queue server's clock, and is replaced by compare-and-set. A holder that
cannot renew it in time stops acting before another may begin. A holder that freezes between checking the lease and
acting is not covered: actions must tolerate that once.
"""

import base64
import time
from typing import Final

import msgspec

from protocol import subjects
from protocol.errors import STREAM_NOT_FOUND, ApiError
from protocol.nats.bus import Bus

SLACK_S: Final = 3.0  # between the end of a lease for its holder and its end for others
CALL_LIMIT_S: Final = 2.0


class LeaseEntry(msgspec.Struct, frozen=True):
    """The entry."""

    holder: str
    until_unix_s: float


_decode_entry: Final = msgspec.json.Decoder(LeaseEntry).decode


class Lease:
    """One process's view of a lease."""

    def __init__(self, bus: Bus, bucket: str, key: str, holder: str, *, lease_s: float) -> None:
        self._bus = bus
        self._stream = f"KV_{bucket}"
        self._subject = subjects.kv_subject(bucket, key)
        self._holder = holder
        self._lease_s = lease_s
        self._until_s = 0.0  # monotonic clock

    @property
    def is_held(self) -> bool:
        """True while this process surely holds the lease."""
        return time.monotonic() < self._until_s

    async def renew(self) -> bool:
        """Renew the lease, or take it if it is free; return False if another process holds it. Raises BusError."""
        began_s = time.monotonic()
        taken = await self._take()
        if taken:
            self._until_s = began_s + self._lease_s
        return taken

    async def release(self) -> None:
        """Give up the lease, so that another process can take it at once. Raises BusError."""
        if self.is_held:
            self._until_s = 0.0
            await self._bus.publish(self._subject, msgspec.json.encode(LeaseEntry("", 0.0)))

    async def _take(self) -> bool:
        found = await self._bus.get_message(self._stream, last_by_subj=self._subject)
        now_s = self._bus.clock.now_s()
        sequence = 0
        if found is not None:
            sequence = int(found["seq"])
            entry = _decode_entry(base64.b64decode(found["data"]))
            if entry.holder not in ("", self._holder) and entry.until_unix_s + SLACK_S > now_s:
                return False
        mine = msgspec.json.encode(LeaseEntry(self._holder, now_s + self._lease_s))
        return await self._bus.compare_and_set(self._subject, mine, sequence, timeout_s=CALL_LIMIT_S) is not None


async def lease_holder(bus: Bus, bucket: str, key: str) -> str | None:
    """Return the holder of a lease, or None. Raises BusError."""
    try:
        found = await bus.get_message(f"KV_{bucket}", last_by_subj=subjects.kv_subject(bucket, key))
    except ApiError as error:
        if error.code == STREAM_NOT_FOUND:
            return None
        raise
    if found is None:
        return None
    entry = _decode_entry(base64.b64decode(found["data"]))
    return entry.holder if entry.holder and entry.until_unix_s + SLACK_S > bus.clock.now_s() else None
