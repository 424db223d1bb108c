"""Sends frames and acknowledgements: one message of frames per gateway and engine step, then acknowledgements.

Callers only add; one task sends, so that an attempt's frames leave in order. A message that cannot be sent is dropped:
the gateway notices the gap and asks for the frames again.
"""

import asyncio
import logging
from typing import Final

import msgspec

from protocol.errors import BusError
from protocol.job import PROTOCOL_VERSION, encode
from protocol.nats import pull
from protocol.nats.bus import HEADER_ROOM_BYTES, Bus
from protocol.nats.pull import Delivery

PACE_S: Final = (
    0.002  # between two messages: steps of a faster engine share one, since each message costs CPU in three processes
)
STEP_ROOM_BYTES: Final = 256  # of a StepFrame without its frames

log = logging.getLogger(__name__)


class _EncodedStep(msgspec.Struct, array_like=True):
    """A StepFrame with encoded frames; the same on the wire."""

    v: int
    worker_id: str
    frames: list[msgspec.Raw]


class Publisher:
    """Sends frames and acknowledgements while ``run`` is running."""

    def __init__(self, bus: Bus, worker_id: str) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._frames: dict[str, list[bytes]] = {}  # reply subject → encoded frames
        self._acks: list[Delivery] = []
        self._naks: list[tuple[Delivery, float]] = []
        self._sending = asyncio.Lock()  # held while sending, so that a flush ends when nothing is in flight
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._next_flush_s = 0.0  # the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._is_failing = False

    def send(self, reply_subject: str, frame: bytes) -> None:
        """Add a frame to the next message to ``reply_subject``. Call ``wake`` to send it."""
        frames = self._frames.get(reply_subject)
        if frames is None:
            self._frames[reply_subject] = [frame]
        else:
            frames.append(frame)

    def ack(self, delivery: Delivery) -> None:
        """Take a job off the queue after the frames added so far have been sent."""
        self._acks.append(delivery)

    def nak(self, delivery: Delivery, delay_s: float = 0.0) -> None:
        """Return a job to the queue, for delivery after ``delay_s``."""
        self._naks.append((delivery, delay_s))

    def wake(self, *, at_once: bool = False) -> None:
        """Send what has been added: now if ``at_once`` or ``PACE_S`` has passed since the last message.

        So a first frame is sent immediately, and a short answer ends without delay.
        """
        if at_once or self._loop.time() >= self._next_flush_s:
            self._wake.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._next_flush_s, self._wake.set)

    async def run(self) -> None:
        """Send until canceled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self.flush()

    async def flush(self) -> None:
        """Send what has been added."""
        async with self._sending:
            await self._flush()

    async def _flush(self) -> None:
        self._next_flush_s = self._loop.time() + PACE_S
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        frames, self._frames = self._frames, {}
        acks, self._acks = self._acks, []
        naks, self._naks = self._naks, []
        for reply_subject, encoded in frames.items():
            await self._send_steps(reply_subject, encoded)
        try:
            for delivery in acks:
                await pull.ack(self._bus, delivery)
            for delivery, delay_s in naks:
                await pull.nak(self._bus, delivery, delay_s)
        except BusError as error:  # the job is redelivered, here or to another worker, which the gateway stops
            self._note_failure(error)

    async def _send_steps(self, reply_subject: str, encoded: list[bytes]) -> None:
        limit = self._bus.client.max_payload - HEADER_ROOM_BYTES - STEP_ROOM_BYTES
        try:
            for part in split_frames(encoded, limit):
                step = _EncodedStep(PROTOCOL_VERSION, self._worker_id, list(map(msgspec.Raw, part)))
                await self._bus.publish(reply_subject, encode(step))
        except BusError as error:
            self._note_failure(error)
        else:
            self._is_failing = False

    def _note_failure(self, error: BusError) -> None:
        if not self._is_failing:
            log.warning("could not send frames; gateways will ask for them: %s", error)
        self._is_failing = True


def split_frames(encoded: list[bytes], limit_bytes: int) -> list[list[bytes]]:
    """Split a list of frames, in order, into parts of at most ``limit_bytes`` (or one frame, if that is larger)."""
    if sum(map(len, encoded)) <= limit_bytes:
        return [encoded]
    parts: list[list[bytes]] = [[]]
    room = limit_bytes
    for frame in encoded:
        if len(frame) > room and parts[-1]:
            parts.append([])
            room = limit_bytes
        parts[-1].append(frame)
        room -= len(frame)
    return parts
