"""Payloads: prompts and answers, stored only by consent of the key or team; docs/how-to/payloads.md.

endpoint ──Capture──> PayloadPublisher (assemble → redact → compress → seal, in a thread) ──PAYLOADS stream──>
ledger.payloads.writer ──> table ``payloads`` ──> ``spillway payloads``, ``spillway export finetune``
"""

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct
from pydantic import BaseModel

from db.accounts.checks import MAX_RETENTION_DAYS
from db.accounts.principal import Consent
from gateway.request.mailbox import Chunks
from ledger.payloads.end_user import stored_end_user
from ledger.payloads.redaction import Redactor, UnredactablePrompt
from ledger.payloads.sealing import Sealer, parse_keys
from ledger.settings import PayloadSettings
from protocol import subjects
from protocol.errors import BusError, PayloadTooLarge
from protocol.job import PROTOCOL_VERSION, Deltas, Part, Tokens
from protocol.nats.bus import Bus
from protocol.process import backoff_s
from protocol.usage import PayloadRecord, encode_payloads

log = logging.getLogger(__name__)


# --- answers ----------------------------------------------------------------------------------------------------------
#
# The answer of a request, recorded while it is written: its texts and the ids of its tool calls.

# Marks the start of a call with its id. Cannot occur inside a JSON string, where its quotes are escaped.
_CALLS: Final = b'"type":"function"'
_EVENT_START: Final = b"data: "
_EVENT_END: Final = b"\n\n"


class ChoiceEncoder(Protocol):
    """Encodes the text of a choice."""

    def choice(self, text: str, finish_reason: str, parts: Sequence[Part] = ()) -> dict[str, Any]:
        """Return the choice object of a complete answer without logprobs and token ids. ``parts`` follow the text."""
        ...


class RecordedAnswer:
    """Records an answer of up to ``max_chars``; a larger one is dropped."""

    def __init__(self, choices: int, max_chars: int) -> None:
        self.is_too_large = False
        self._max_chars = self._room_chars = max_chars
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._parts: list[list[Part]] = [[] for _ in range(choices)]  # from chat pools
        self._finish_reasons: list[str | None] = [None] * choices
        self._calls: list[bytes] = []  # JSON with ids of calls

    @property
    def is_complete(self) -> bool:
        """True if every choice has ended."""
        return None not in self._finish_reasons

    @property
    def chars(self) -> int:
        """Number of characters recorded."""
        return 0 if self.is_too_large else self._max_chars - self._room_chars

    def add(self, frame: Tokens | Deltas) -> None:
        """Add the frames of a step."""
        if isinstance(frame, Deltas):
            self._add(frame.index, "", frame.finish_reason, frame.parts)
        else:
            self._add(frame.index, frame.text, frame.finish_reason)

    def _add(self, index: int, text: str, finish_reason: str | None, parts: Sequence[Part] = ()) -> None:
        self._room_chars -= len(text) + sum(len(part.text) for part in parts)
        self._finish_reasons[index] = finish_reason
        if self._room_chars >= 0:
            self._texts[index].append(text)
            self._parts[index] += parts
        elif not self.is_too_large:
            self.is_too_large = True
            self._texts, self._parts = [[] for _ in self._texts], [[] for _ in self._parts]
            self._calls = []

    def add_events(self, events: bytes) -> None:
        """Add the events of a frame, for the ids of calls."""
        if _CALLS in events and events.startswith(_EVENT_START) and not self.is_too_large:
            self._calls += [event.removeprefix(_EVENT_START) for event in events.split(_EVENT_END) if _CALLS in event]

    def add_whole(self, choices: Iterable[tuple[str, str | None, Sequence[Part]]], body: bytes) -> None:
        """Add an answer that is not streamed: its choices (``answers.ChoiceContent``) and its body."""
        for index, (text, finish_reason, parts) in enumerate(choices):
            self._add(index, text, finish_reason, parts)
        if _CALLS in body and b'"choices":[' in body:  # other APIs have different bodies
            self._calls.append(body)

    def choices(self, encoder: ChoiceEncoder) -> list[dict[str, Any]]:
        """Return the choices of a complete answer."""
        ids = self._call_ids()
        choices = []
        rows = zip(self._texts, self._finish_reasons, self._parts, strict=True)
        for index, (texts, finish_reason, parts) in enumerate(rows):
            choice = {"index": index, **encoder.choice("".join(texts), finish_reason or "", parts)}
            for place, call in enumerate(choice.get("message", {}).get("tool_calls", ())):
                call["id"] = ids.get((index, place), call["id"])
            choices.append(choice)
        return choices

    def _call_ids(self) -> dict[tuple[int, int], str]:
        """Return the ids sent to the client, by choice and position."""
        ids = {}
        for reported in self._calls:
            for choice in msgspec.json.decode(reported)["choices"]:
                calls = (choice.get("delta") or choice["message"]).get("tool_calls", ())
                for place, call in enumerate(calls):
                    if "id" in call:
                        ids[choice["index"], call.get("index", place)] = call["id"]
        return ids


class RecordedChunks:
    """``Chunks`` that record what they encode."""

    def __init__(self, inner: Chunks, answer: RecordedAnswer) -> None:
        self.usage = inner.usage
        self._inner = inner
        self._answer = answer

    def of(self, frame: Tokens | Deltas) -> bytes:
        """Implement ``Chunks``."""
        events = self._inner.of(frame)
        self._answer.add(frame)
        self._answer.add_events(events)
        return events


# --- publisher --------------------------------------------------------------------------------------------------------
#
# Publishing payloads to the PAYLOADS stream, off the hot path: ``take`` only queues.
#
# take ──> queue (bounded; overflow is dropped and counted) ──> assembled, redacted, sealed in a thread ──> stored

MESSAGE_BYTES: Final = 1024 * 1024  # per message before compression; a single payload may be larger
MESSAGE_PAYLOADS: Final = 64
MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
DAY_MS: Final = 24 * 3600 * 1000


class CapturedCall(ChoiceEncoder, Protocol):
    """A call whose payload is stored."""

    name: str

    @property
    def request(self) -> BaseModel:
        """The body."""
        ...


class Capture(Struct, frozen=True):
    """A request and its answer."""

    request_id: str
    received_unix_ms: int
    model: str
    key_id: str
    team_id: str
    end_user: str | None
    consent: Consent
    call: CapturedCall
    body_bytes: int  # of the request, as received
    answer: RecordedAnswer


class PayloadPublisher:
    """Publishes payloads, with retries. ``run`` must be running."""

    def __init__(self, bus: Bus, settings: PayloadSettings) -> None:
        """Raises BadPayloadKey."""
        self.outcomes: Counter[str] = Counter()  # "published" | "too_large" | "not_redactable" | "lost"
        self._bus = bus
        self._settings = settings
        self._sealer = Sealer(parse_keys(settings.key))
        self._waiting: deque[Capture] = deque()
        self._waiting_bytes = 0  # including the message in progress
        self._has_waiting = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def new_answer(self, choices: int) -> RecordedAnswer:
        """Return a recorder for an answer."""
        return RecordedAnswer(choices, self._settings.max_payload_bytes)

    def take(self, capture: Capture) -> None:
        """Queue a payload. Never waits: without space the payload is dropped."""
        if self._waiting_bytes + self._size(capture) > MAX_WAITING_BYTES:
            self._lose(1, "too many are waiting to be stored")
            return
        self._waiting_bytes += self._size(capture)
        self._waiting.append(capture)
        self._has_waiting.set()
        self._is_empty.clear()

    def _size(self, capture: Capture) -> int:
        return capture.body_bytes + capture.answer.chars

    async def run(self) -> None:
        """Publish until canceled."""
        while True:
            await self._has_waiting.wait()
            await self._publish_next()  # in a function, so that its locals do not keep payloads alive
            if not self._waiting:
                self._is_empty.set()

    async def flush(self, limit_s: float) -> None:
        """Wait until everything is stored, at most ``limit_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._is_empty.wait()
        if not self._is_empty.is_set():
            log.error("some payloads were not stored within %g s and are lost", limit_s)

    async def _publish_next(self) -> None:
        captures = self._next()
        records = await asyncio.to_thread(self._records, captures)
        if records:
            await self._publish_until_stored(records)
        self._waiting_bytes -= sum(map(self._size, captures))

    def _next(self) -> list[Capture]:
        """Return the payloads of the next message, at least one."""
        captures = [self._waiting.popleft()]
        room_bytes = MESSAGE_BYTES - self._size(captures[0])
        while self._waiting and len(captures) < MESSAGE_PAYLOADS and self._size(self._waiting[0]) <= room_bytes:
            captures.append(self._waiting.popleft())
            room_bytes -= self._size(captures[-1])
        if not self._waiting:
            self._has_waiting.clear()
        return captures

    async def _publish_until_stored(self, records: Sequence[PayloadRecord]) -> None:
        message_id = f"payload.{records[0].request_id}+{len(records) - 1}"
        message = encode_payloads(records)
        for wait_s in backoff_s():
            try:
                await self._bus.publish_durable(subjects.PAYLOAD_SUBJECT, message, message_id=message_id)
            except PayloadTooLarge as error:
                self._lose(len(records), str(error))
                return
            except BusError as error:
                log.debug("payloads could not be stored, retrying: %s", error)
            else:
                return
            await asyncio.sleep(wait_s)

    def _lose(self, count: int, why: str) -> None:
        if not self.outcomes["lost"]:
            log.error("payloads are lost (the metrics count all of them): %s", why)
        self.outcomes["lost"] += count

    # --- in a thread --------------------------------------------------------------------------------------------------

    def _records(self, captures: Sequence[Capture]) -> list[PayloadRecord]:
        records = []
        for capture in captures:
            try:
                records.append(self._record(capture))
            except Exception:
                log.exception("the payload of %s is lost", capture.request_id)
                self.outcomes["lost"] += 1
        return records

    def _record(self, capture: Capture) -> PayloadRecord:
        parts: Mapping[str, Any] = {}
        outcome = "published"
        try:
            request, answer = self._contents(capture)
            if len(request) + len(answer) > self._settings.max_payload_bytes:
                outcome = "too_large"
            else:
                parts = {
                    "request": self._sealer.seal(request, capture.request_id, "request"),
                    "answer": self._sealer.seal(answer, capture.request_id, "answer"),
                }
        except UnredactablePrompt:
            outcome = "not_redactable"
        self.outcomes[outcome] += 1
        return self._labelled(capture, parts)

    def _contents(self, capture: Capture) -> tuple[bytes, bytes]:
        """Return request and answer as JSON, redacted if configured; placeholders if they are too large."""
        if capture.answer.is_too_large or capture.body_bytes > 2 * self._settings.max_payload_bytes:
            return b"", bytes(self._settings.max_payload_bytes + 1)
        request: Any = capture.call.request.model_dump(mode="json", by_alias=True, exclude_none=True)
        choices: Any = capture.answer.choices(capture.call)
        if capture.consent.redact:
            redactor = Redactor()
            request, choices = redactor.request(request), redactor.value(choices)
        return msgspec.json.encode(request), msgspec.json.encode({"choices": choices})

    def _labelled(self, capture: Capture, parts: Mapping[str, Any]) -> PayloadRecord:
        consent = capture.consent
        days = self._settings.retention_days if consent.retention_days is None else consent.retention_days
        return PayloadRecord(
            v=PROTOCOL_VERSION,
            request_id=capture.request_id,
            received_unix_ms=capture.received_unix_ms,
            model=capture.model,
            endpoint=capture.call.name,
            key_id=capture.key_id,
            team_id=capture.team_id,
            end_user=stored_end_user(capture.end_user),
            train_ok=consent.train_ok,
            redacted=consent.redact,
            expires_unix_ms=capture.received_unix_ms + min(days, MAX_RETENTION_DAYS) * DAY_MS,
            encoding=self._sealer.encoding,
            dropped=not parts,
            **parts,
        )
