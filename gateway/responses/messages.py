"""Messages of the stream RES: writes, reads, and removes them.

Messages are compressed, and decompression can expand them a thousandfold. A header contains the original size, and
decompression stops there.
"""

import asyncio
import base64
import re
from functools import partial
from typing import Any, Final, NamedTuple

from ledger.payloads.errors import PayloadError, TooLargeToOpen
from ledger.payloads.sealing import Part, Sealer
from protocol import subjects
from protocol.errors import PayloadTooLarge, ProtocolError
from protocol.nats.bus import Bus

STORE_LIMIT_S: Final = 2.0
THREADED_BYTES: Final = 64 * 1024  # larger messages are sealed and opened in a thread
KIB: Final = 1024
OPENED_BYTES: Final = "Spillway-Opened-Bytes"  # header: decompressed size of a message
_OPENED_BYTES: Final = re.compile(rb"^Spillway-Opened-Bytes: *(\d{1,12})\r?$", re.MULTILINE)


class NotKept(Exception):
    """A message cannot be stored: it is too large, or there is no space."""


class Unreadable(ProtocolError):
    """A stored message is too large or invalid. A retry does not help."""


class Key(NamedTuple):
    """A tenant's response."""

    tenant: str
    response_id: str

    @classmethod
    def of(cls, subject: str) -> "Key":
        """Return the key of a message."""
        _, tenant, response_id, *_ = subject.split(".")
        return cls(subjects.unescape(tenant), subjects.unescape(response_id))


class Found(NamedTuple):
    """A message, as received from the queue server."""

    data: str  # base64; decoded when opened
    sequence: int
    opened_bytes: int | None  # None: stored by an older release

    @property
    def size_bytes(self) -> int:
        """Size in the stream."""
        return len(self.data) * 3 // 4

    def most_bytes(self, max_bytes: int) -> int:
        """Return its maximum decompressed size, limited to ``max_bytes``."""
        return max_bytes if self.opened_bytes is None else min(max_bytes, self.opened_bytes)


class Placed(NamedTuple):
    """Sequence and size of a message in the stream."""

    sequence: int
    size_bytes: int


class Sealed(NamedTuple):
    """A message ready to be stored."""

    payload: bytes
    opened_bytes: int

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the message."""
        return {OPENED_BYTES: str(self.opened_bytes)}

    @property
    def size_kib(self) -> int:
        """Size in the stream."""
        return -(-len(self.payload) // KIB)


_EMPTY: Final = Sealed(b"", 0)


class Messages:
    """Reads and writes messages. Methods raise BusError."""

    def __init__(self, bus: Bus, sealer: Sealer, max_sealed_bytes: int) -> None:
        self._bus = bus
        self._sealer = sealer
        self._max_sealed_bytes = max_sealed_bytes

    def subject(self, key: Key, what: str) -> str:
        """Return the subject of one kind of a response's messages."""
        return subjects.response_subject(key.tenant, key.response_id, what)

    async def set(self, key: Key, what: str, sealed: Sealed, sequence: int, *, ttl_s: int) -> int | None:
        """Replace the last message if its sequence matches (0: if there is none); return the new sequence.

        None: the sequence does not match. Raises NotKept.
        """
        try:
            return await self._bus.compare_and_set(
                self.subject(key, what),
                sealed.payload,
                sequence,
                timeout_s=STORE_LIMIT_S,
                ttl_s=ttl_s,
                headers=sealed.headers,
            )
        except PayloadTooLarge as error:
            raise NotKept(str(error)) from error

    async def put(self, key: Key, what: str, sealed: Sealed, *, ttl_s: int) -> None:
        """Store a message exactly once. Raises NotKept."""
        try:
            await self._publish(self.subject(key, what), sealed, f"{key.response_id}.{what}", ttl_s)
        except PayloadTooLarge as error:
            raise NotKept(str(error)) from error

    async def mark(self, key: Key, what: str, *, ttl_s: int, identity: str = "") -> None:
        """Store an empty message. ``identity``: distinguishes it from an equal message that was removed."""
        await self._publish(self.subject(key, what), _EMPTY, identity or f"{key.response_id}.{what}", ttl_s)

    async def _publish(self, subject: str, sealed: Sealed, identity: str, ttl_s: int) -> None:
        await self._bus.publish_durable(
            subject,
            sealed.payload,
            message_id=identity,
            ttl_s=ttl_s,
            headers=sealed.headers,
            timeout_s=STORE_LIMIT_S,
        )

    async def last(self, key: Key, what: str) -> Found | None:
        """Return the last message of one kind."""
        return await self._find(last_by_subj=self.subject(key, what))

    async def next(self, key: Key, what: str, after_sequence: int) -> Found | None:
        """Return the first message of one kind after a sequence number."""
        return await self._find(seq=after_sequence + 1, next_by_subj=self.subject(key, what))

    async def _find(self, **query: int | str) -> Found | None:
        message = await self._bus.get_message(subjects.RESPONSES_STREAM, **query)
        if message is None:
            return None
        opened_bytes = _OPENED_BYTES.search(base64.b64decode(message.get("hdrs", "")))
        size = None if opened_bytes is None else int(opened_bytes[1])
        return Found(message.get("data", ""), int(message["seq"]), size)

    async def count(self, subjects_filter: str) -> dict[str, int]:
        """Return the subjects that have messages. One page of 100,000 is enough."""
        info = await self._bus.api(f"STREAM.INFO.{subjects.RESPONSES_STREAM}", {"subjects_filter": subjects_filter})
        return dict(info["state"].get("subjects") or {})

    async def purge(self, key: Key, what: str, *, keep: int = 0) -> None:
        """Remove messages. ``keep``: number of last messages to keep."""
        wanted: dict[str, Any] = {"filter": self.subject(key, what)}
        await self._bus.api(f"STREAM.PURGE.{subjects.RESPONSES_STREAM}", wanted | ({"keep": keep} if keep else {}))

    async def sealed(self, data: bytes, key: Key, part: Part, max_bytes: int) -> Sealed:
        """Seal data within the size limit. Raises NotKept."""
        if len(data) > max_bytes:
            raise NotKept(f"{len(data)} bytes exceed the limit of a stored response ({max_bytes})")
        sealed = await self.sealed_again(data, key, part)
        if len(sealed.payload) > self._max_sealed_bytes:
            message = f"{len(sealed.payload)} compressed bytes exceed the limit of a stored response"
            raise NotKept(f"{message} ({self._max_sealed_bytes})")
        return sealed

    async def sealed_again(self, data: bytes, key: Key, part: Part) -> Sealed:
        """Seal data that is already stored, of any size."""
        seal = partial(self._sealer.seal, data, key.response_id, part)
        sealed = await asyncio.to_thread(seal) if len(data) >= THREADED_BYTES else seal()
        return Sealed(b"%b\n%b" % (self._sealer.encoding.encode(), sealed), len(data))

    async def opened(self, found: Found, key: Key, part: Part, max_bytes: int) -> bytes:
        """Open a message for this gateway, in a thread if it is large. Raises like ``open``."""
        work = partial(self.open, found, key, part, max_bytes)
        return await asyncio.to_thread(work) if found.most_bytes(max_bytes) >= THREADED_BYTES else work()

    def open(self, found: Found, key: Key, part: Part, max_bytes: int) -> bytes:
        """Open a message; decompress at most ``max_bytes``. Raises ProtocolError or Unreadable."""
        encoding, _, sealed = base64.b64decode(found.data).partition(b"\n")
        most = found.most_bytes(max_bytes)
        try:
            return self._sealer.open(sealed, encoding.decode("latin-1"), key.response_id, part, most)
        except TooLargeToOpen as error:
            raise Unreadable(f"the stored data of {key.response_id} is larger than {most} bytes") from error
        except PayloadError as error:
            raise ProtocolError(f"the stored data of {key.response_id} cannot be read: {error}") from error
