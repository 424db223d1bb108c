"""The bucket of accounts: each is replaced only by who has read what is there."""

import base64
from datetime import datetime
from typing import Final

from gateway.settings import REACH_LIMIT_S
from protocol import subjects
from protocol.errors import BusError
from protocol.gateways import Account, decode_account, encode
from protocol.nats.bus import Bus

STREAM: Final = f"KV_{subjects.QUOTAS_BUCKET}"


async def created_s(bus: Bus) -> float:
    """Return when the bucket was made, by the queue server's clock: it is another one after a loss. Raises BusError."""
    info = await bus.api(f"STREAM.INFO.{STREAM}")
    try:
        return datetime.fromisoformat(info["created"]).timestamp()
    except (KeyError, ValueError) as error:
        raise BusError("the queue server does not tell when the accounts of limits were made") from error


class AccountStore:
    """The bucket, as one gateway uses it."""

    def __init__(self, bus: Bus, call_limit_s: float = REACH_LIMIT_S) -> None:
        self._bus = bus
        self._call_limit_s = call_limit_s

    async def load(self, account_id: str) -> tuple[Account, int] | None:
        """An account and the sequence of its entry; None: there is none. Raises BusError or ProtocolError."""
        found = await self._bus.get_message(STREAM, last_by_subj=self._subject(account_id))
        if found is None:
            return None
        return decode_account(base64.b64decode(found["data"])), int(found["seq"])

    async def store(self, account_id: str, account: Account, over: int) -> int | None:
        """Put an account in the place of the entry with sequence ``over`` (0: of none); returns the new sequence.

        None: another entry stands there. Raises BusError: nobody knows whether it was stored.
        """
        return await self._bus.compare_and_set(
            self._subject(account_id), encode(account), over, timeout_s=self._call_limit_s
        )

    def _subject(self, account_id: str) -> str:
        return subjects.kv_subject(subjects.QUOTAS_BUCKET, subjects.escape(account_id))
