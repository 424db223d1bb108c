"""The stream RES: what is kept of responses, each message with a time to live of its own.

    res.<tenant>.<id>.run          Run: while it is made in the background
    res.<tenant>.<id>.events       EventsPart, …: what its readers get, in order
    res.<tenant>.<id>.cancel       empty: it is to be cancelled
    res.<tenant>.<id>.done.<KiB>   StoredResponse

Whoever makes a response owns its ``run``, which others take over by compare and set once that gateway is gone. The
fence is on the events: each part names the sequence number of the last one, so a gateway that has been taken for dead
adds nothing to what another one makes. Sizes stand in subjects, so that the server can count what a tenant has.
"""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

from nats.aio.msg import Msg

from ledger.payloads.errors import PayloadError
from ledger.payloads.sealing import Part, Sealer
from protocol import subjects
from protocol.bus import Bus
from protocol.errors import ProtocolError
from response_store.records import EventsPart, Run, StoredResponse, decode_part, decode_run, decode_stored, encode
from response_store.settings import ResponseSettings

STORE_LIMIT_S: Final = 2.0
RUN_TTL_S: Final = 48 * 3600  # longer than anything may take: a run that nobody can end goes away
THREADED_BYTES: Final = 64 * 1024  # from here on, a message is sealed in a thread
USAGE_AGE_S: Final = 10.0  # how old a tenant's usage may be
MAX_USAGES: Final = 1000  # tenants whose usage is remembered
KIB: Final = 1024
_ALL: Final = "res.*.*.run"


class NotKept(Exception):
    """What was to be kept is too large, or there is no room for it."""


class Key(NamedTuple):
    """Whose response, and which."""

    tenant: str
    response_id: str


class Found(NamedTuple):
    """A message and its sequence number."""

    payload: bytes
    sequence: int


class Usage(NamedTuple):
    """What a tenant has stored."""

    responses: int
    size_bytes: int


class ResponseStore:
    """Reads and writes the stream. Methods raise BusError; those that read raise ProtocolError, too."""

    def __init__(self, bus: Bus, settings: ResponseSettings, sealer: Sealer) -> None:
        self._bus = bus
        self._settings = settings
        self._sealer = sealer
        self._usages: dict[str, tuple[float, Usage]] = {}  # by tenant, with the time that it was read

    # --- responses in the background ----------------------------------------------------------------------------------

    async def begin(self, run: Run) -> int:
        """Store a new run; return its sequence number. Raises NotKept."""
        key = Key(run.tenant, run.response_id)
        return await self._set_run(key, await self._sealed_run(key, run), 0) or 0

    async def own(self, key: Key, run: Run, sequence: int) -> int | None:
        """Replace a run whose sequence number is known; return the new one. None: somebody else was quicker."""
        return await self._set_run(key, await self._sealed_run(key, run), sequence)

    async def run_of(self, key: Key) -> tuple[Run, int] | None:
        """Return the run of a response, and its sequence number; None: it is not being made."""
        found = await self._last(key, "run")
        return None if found is None else (decode_run(await self._opened(found, key, "request")), found.sequence)

    async def running(self) -> list[Key]:
        """Return all responses that are being made, by whichever gateway."""
        subjects_found = await self._count(_ALL)
        return [_key_of(subject) for subject in subjects_found]

    async def forget_run(self, key: Key) -> None:
        """Remove the run of a response that has ended."""
        await self._purge(key, "run")

    async def add_part(self, key: Key, part: EventsPart, last_sequence: int) -> int | None:
        """Add events behind those with this sequence number; return the new one. None: somebody else goes on.

        Raises NotKept.
        """
        payload = await self._sealed(encode(part), key, "answer")
        subject, ttl_s = self._subject(key, "events"), int(self._settings.events_s)
        sequence = await self._bus.compare_and_set(
            subject, payload, last_sequence, timeout_s=STORE_LIMIT_S, ttl_s=ttl_s
        )
        if sequence is not None:
            return sequence
        last = await self._last(key, "events")  # it may be ours: stored, and only the answer was lost
        is_ours = last is not None and decode_part(await self._opened(last, key, "answer")) == part
        return last.sequence if last is not None and is_ours else None

    async def parts(self, key: Key, after_sequence: int = 0) -> AsyncIterator[tuple[EventsPart, int]]:
        """Iterate over the parts that are there, each with its sequence number."""
        while True:
            stream, subject = subjects.RESPONSES_STREAM, self._subject(key, "events")
            found = _found(await self._bus.get_message(stream, seq=after_sequence + 1, next_by_subj=subject))
            if found is None:
                return
            after_sequence = found.sequence
            yield decode_part(await self._opened(found, key, "answer")), found.sequence

    async def last_part(self, key: Key) -> EventsPart | None:
        """Return the last part that is there."""
        found = await self._last(key, "events")
        return None if found is None else decode_part(await self._opened(found, key, "answer"))

    @asynccontextmanager
    async def listening(self, key: Key) -> AsyncIterator[asyncio.Event]:
        """Set the event whenever a part may have been added."""
        added = asyncio.Event()

        async def on_part(_message: Msg) -> None:
            added.set()

        subscription = await self._bus.subscribe(self._subject(key, "events"), on_part)
        try:
            yield added
        finally:
            if self._bus.connected:
                await subscription.unsubscribe()

    async def cancel(self, key: Key) -> None:
        """Ask whoever makes a response to cancel it."""
        await self._put(key, "cancel", b"", ttl_s=RUN_TTL_S)

    async def is_cancelled(self, key: Key) -> bool:
        """Return whether that has been asked for."""
        return await self._last(key, "cancel") is not None

    async def on_cancel(self, handle: Callable[[Key], None]) -> None:
        """Call back for each response that is to be cancelled."""

        async def on_message(message: Msg) -> None:
            handle(_key_of(message.subject))

        await self._bus.subscribe("res.*.*.cancel", on_message)

    # --- responses that have ended ------------------------------------------------------------------------------------

    async def put(self, key: Key, stored: StoredResponse) -> None:
        """Store a response that has ended. Raises NotKept."""
        payload = await self._sealed(encode(stored), key, "answer")
        size = -(-len(payload) // KIB)
        await self._put(key, f"done.{size}", payload, ttl_s=int(self._settings.keep_s))
        if (known := self._usages.get(key.tenant)) is not None:
            usage = Usage(known[1].responses + 1, known[1].size_bytes + size * KIB)
            self._usages[key.tenant] = (known[0], usage)

    async def get(self, key: Key) -> StoredResponse | None:
        """Return a response that has ended."""
        found = await self._last(key, "done.*")
        return None if found is None else decode_stored(await self._opened(found, key, "answer"))

    async def delete(self, key: Key) -> None:
        """Remove all that is kept of a response."""
        await self._purge(key, ">")
        self._usages.pop(key.tenant, None)

    async def why_full(self, tenant: str) -> str | None:
        """Return why a tenant may not store another response; None: it may."""
        usage, settings = await self._usage(tenant), self._settings
        if usage.responses < settings.max_tenant_responses and usage.size_bytes < settings.max_tenant_bytes:
            return None
        return f"{usage.responses} responses of {usage.size_bytes} bytes are stored for this key or its team"

    async def _usage(self, tenant: str) -> Usage:
        read_s, usage = self._usages.get(tenant, (float("-inf"), Usage(0, 0)))
        if time.monotonic() - read_s < USAGE_AGE_S:
            return usage
        found = await self._count(f"res.{subjects.escape(tenant)}.*.done.*")
        sizes = [int(subject.rpartition(".")[2]) * KIB for subject in found]
        usage = Usage(len(sizes), sum(sizes))
        if len(self._usages) >= MAX_USAGES:
            self._usages.clear()
        self._usages[tenant] = (time.monotonic(), usage)
        return usage

    # --- messages -----------------------------------------------------------------------------------------------------

    def _subject(self, key: Key, what: str) -> str:
        return subjects.response_subject(key.tenant, key.response_id, what)

    async def _sealed_run(self, key: Key, run: Run) -> bytes:
        return await self._sealed(encode(run), key, "request")

    async def _set_run(self, key: Key, payload: bytes, sequence: int) -> int | None:
        subject = self._subject(key, "run")
        return await self._bus.compare_and_set(subject, payload, sequence, timeout_s=STORE_LIMIT_S, ttl_s=RUN_TTL_S)

    async def _put(self, key: Key, what: str, payload: bytes, *, ttl_s: int) -> None:
        subject, identity = self._subject(key, what), f"{key.response_id}.{what}"
        await self._bus.publish_durable(subject, payload, message_id=identity, ttl_s=ttl_s, timeout_s=STORE_LIMIT_S)

    async def _last(self, key: Key, what: str) -> Found | None:
        subject = self._subject(key, what)
        return _found(await self._bus.get_message(subjects.RESPONSES_STREAM, last_by_subj=subject))

    async def _count(self, subjects_filter: str) -> dict[str, int]:
        """Return the subjects that have messages. Pages of 100,000; there are fewer."""
        info = await self._bus.api(f"STREAM.INFO.{subjects.RESPONSES_STREAM}", {"subjects_filter": subjects_filter})
        return dict(info["state"].get("subjects") or {})

    async def _purge(self, key: Key, what: str) -> None:
        await self._bus.api(f"STREAM.PURGE.{subjects.RESPONSES_STREAM}", {"filter": self._subject(key, what)})

    async def _sealed(self, data: bytes, key: Key, part: Part) -> bytes:
        sealed = await _in_thread_if_large(data, lambda: self._sealer.seal(data, key.response_id, part))
        if len(sealed) > self._settings.max_response_bytes:
            limit = self._settings.max_response_bytes
            raise NotKept(f"{len(sealed)} bytes are more than a response may have that is kept ({limit})")
        return b"%b\n%b" % (self._sealer.encoding.encode(), sealed)

    async def _opened(self, found: Found, key: Key, part: Part) -> bytes:
        encoding, _, sealed = found.payload.partition(b"\n")
        try:
            return await _in_thread_if_large(
                sealed, lambda: self._sealer.open(sealed, encoding.decode("latin-1"), key.response_id, part)
            )
        except PayloadError as error:
            raise ProtocolError(f"what is kept of {key.response_id} cannot be read: {error}") from error


def _key_of(subject: str) -> Key:
    _, tenant, response_id, *_ = subject.split(".")
    return Key(subjects.unescape(tenant), subjects.unescape(response_id))


def _found(message: dict[str, Any] | None) -> Found | None:
    if message is None:
        return None
    return Found(base64.b64decode(message.get("data", "")), int(message["seq"]))


async def _in_thread_if_large(data: bytes, work: Callable[[], bytes]) -> bytes:
    return await asyncio.to_thread(work) if len(data) >= THREADED_BYTES else work()
