"""Claims of keys by gateways: entries of a key-value bucket, written by compare-and-set."""

import asyncio
import base64
import logging
from typing import Final

from msgspec import Struct

from protocol import subjects
from protocol.errors import BusError, ProtocolError
from protocol.gateways import Claim, decode_claim, encode
from protocol.nats.bus import Bus

CLAIM_LIMIT_S: Final = 1.0  # beyond it, the queue server counts as unavailable
STREAM: Final = f"KV_{subjects.IDEMPOTENCY_BUCKET}"

log = logging.getLogger(__name__)


class HeldClaim(Struct, frozen=True):
    """The current claim of a key."""

    gateway_id: str
    sequence: int | None  # of its entry; None: the bucket is unavailable
    is_new: bool  # the caller has just written it


class Claims:
    """A gateway's access to the bucket. While the bucket is unavailable, keys apply to a single gateway."""

    def __init__(self, bus: Bus, gateway_id: str) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._releases: set[asyncio.Task[None]] = set()

    async def take(self, name: str, fingerprint: str, *, over: int | None) -> HeldClaim | None:
        """Claim a key for this gateway, unless it has another claim than the one with sequence ``over`` (None: none).

        Return None if the claim changed concurrently; try again.
        """
        if not self._bus.connected:
            return self._for_this_gateway_only()
        try:
            async with asyncio.timeout(CLAIM_LIMIT_S):
                return await self._put(name, fingerprint, over or 0) or await self._read(name)
        except (BusError, ProtocolError, TimeoutError) as error:
            reason = str(error) or "too slow"
            log.warning("the idempotency bucket is unavailable; keys apply to this gateway only: %s", reason)
            return self._for_this_gateway_only()

    def _for_this_gateway_only(self) -> HeldClaim:
        return HeldClaim(self._gateway_id, None, is_new=True)

    async def _put(self, name: str, fingerprint: str, last_sequence: int) -> HeldClaim | None:
        subject = subjects.kv_subject(subjects.IDEMPOTENCY_BUCKET, name)
        claim = encode(Claim(self._gateway_id, fingerprint))
        sequence = await self._bus.compare_and_set(subject, claim, last_sequence, timeout_s=CLAIM_LIMIT_S)
        return None if sequence is None else HeldClaim(self._gateway_id, sequence, is_new=True)

    async def _read(self, name: str) -> HeldClaim | None:
        subject = subjects.kv_subject(subjects.IDEMPOTENCY_BUCKET, name)
        found = await self._bus.get_message(STREAM, last_by_subj=subject)
        if found is None:
            return None
        claim = decode_claim(base64.b64decode(found["data"]))
        return HeldClaim(claim.gateway_id, int(found["seq"]), is_new=False)

    def release(self, sequence: int) -> None:
        """Remove a claim of this gateway by its sequence, unless it was taken over. Does not wait."""
        if self._bus.connected:
            task = asyncio.create_task(self._release(sequence))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, sequence: int) -> None:
        try:
            await self._bus.delete_message(STREAM, sequence)
        except BusError as error:  # other gateways ask this one, learn that it has no run, and take over the claim
            log.debug("claim %d could not be removed: %s", sequence, error)
