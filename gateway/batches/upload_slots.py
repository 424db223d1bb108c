"""The slots in which a gateway receives uploads: how they are shared between tenants, and how fast a client must be.

Pure: no I/O, no clock.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gateway.errors import RETRY_SOON_S, BodyTooLarge, Overloaded, RateLimitExceeded, RequestTooSlow

TOO_MANY_UPLOADS: Final = "too_many_uploads"


class UploadSlots:
    """The slots of one gateway. Only the event loop touches it.

    A tenant may hold as many as it leaves free, and one in any case: others find a slot, however many it wants.
    """

    def __init__(self, max_uploads: int) -> None:
        self._free = max_uploads
        self._held: Counter[str] = Counter()  # by tenant
        self._bytes: Counter[str] = Counter()  # by tenant: written, and not a file yet

    @contextmanager
    def hold(self, tenant: str) -> Iterator["Slot"]:
        """Hold a slot. Raises Overloaded, and RateLimitExceeded for more than the tenant's share."""
        if not self._free:
            raise Overloaded("This gateway receives as many uploads as it can at the moment.")
        held = self._held[tenant]
        if held and held + 1 >= self._free:
            message = f"{held} uploads of this key or its team are under way at this gateway: wait for one to end."
            error = RateLimitExceeded(message, code=TOO_MANY_UPLOADS)
            error.retry_after_s = RETRY_SOON_S
            raise error
        self._free -= 1
        self._held[tenant] += 1
        slot = Slot(self._bytes, tenant)
        try:
            yield slot
        finally:
            self._free += 1
            self._held -= Counter({tenant: 1})  # which drops what has come to nothing
            self._bytes -= Counter({tenant: slot.written_bytes})


class Slot:
    """One upload's slot, which counts what is written."""

    def __init__(self, by_tenant: Counter[str], tenant: str) -> None:
        self.written_bytes = 0
        self._by_tenant = by_tenant
        self._tenant = tenant

    def count(self, size_bytes: int, room_bytes: int) -> None:
        """Count what is about to be written. Raises BodyTooLarge where all of the tenant's uploads have no room."""
        self.written_bytes += size_bytes
        self._by_tenant[self._tenant] += size_bytes
        if self._by_tenant[self._tenant] > room_bytes:
            raise BodyTooLarge(f"The uploads of this key or its team may have {room_bytes} more bytes together.")


class Pace:
    """How fast an upload comes. Only time that was spent waiting for the client counts."""

    def __init__(self, min_bytes_per_s: int, window_s: float) -> None:
        self._min_bytes_per_s = min_bytes_per_s
        self._window_s = window_s
        self._bytes = 0
        self._waited_s = 0.0

    def note(self, size_bytes: int, waited_s: float) -> None:
        """Note what has come after a wait. Raises RequestTooSlow at the end of a window in which too little came."""
        self._bytes += size_bytes
        self._waited_s += waited_s
        if self._waited_s < self._window_s:
            return
        if self._bytes < self._min_bytes_per_s * self._waited_s:
            raise RequestTooSlow(
                f"{self._bytes} bytes of the upload have come in {self._waited_s:.1f} s:"
                f" at least {self._min_bytes_per_s} bytes a second must."
            )
        self._bytes, self._waited_s = 0, 0.0
