"""Finds jobs that vanished from the queue although no worker has accepted them.

Workers acknowledge a job when they accept it. If one dies between its acknowledgement and its first frame, or that
frame is lost with it, the gateway waits for a job that nobody has. So jobs that have waited for long are looked up, a
few at a time, those looked at longest ago first; one that is missing twice is gone.
"""

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from nats.aio.msg import Msg

from gateway.dispatch.request import OpenRequest
from gateway.request.states import State
from protocol import subjects
from protocol.errors import BusError
from protocol.nats.bus import Bus
from protocol.nats.topology import oldest_job

QUIET_S: Final = 2.0  # for which a job has waited before it is looked up; longer than topology.ACK_WAIT_S
LOOK_GAP_S: Final = 1.0  # between two looks at the same job
ROUND_PERIOD_S: Final = 0.5
LOOKS_PER_ROUND: Final = 50  # some 0.2 ms of the server's time each, so at most 2% of it

log = logging.getLogger(__name__)


class JobLookups:
    """Times of each waiting job's last look-up, and the jobs that were missing then."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._looked_s: dict[tuple[str, int], float] = {}
        self._missing: set[tuple[str, int]] = set()

    async def start(self) -> None:
        """Answer workers that ask for a lane's oldest job. Raises BusError."""
        await self._bus.subscribe(subjects.OLDEST_JOBS, self._on_question)

    async def _on_question(self, message: Msg) -> None:
        """Tell when the stream took the oldest job of a lane, and nothing else of it; empty where it has none."""
        _, queue, lane = message.subject.split(".")
        try:
            stored = await oldest_job(self._bus, f"rq.{queue}.{lane}")
            await self._bus.publish(message.reply, stored.encode())
        except BusError as error:
            log.debug("the oldest job of %s is not known: %s", message.subject, error)

    async def run(self, requests: Callable[[], Iterable[OpenRequest]]) -> None:
        """Look up open requests, round after round; never returns."""
        while True:
            await asyncio.sleep(ROUND_PERIOD_S)
            if not self._bus.connected:
                continue
            try:
                await self.look(requests())
            except BusError as error:
                log.debug("waiting jobs could not be looked up: %s", error)

    async def look(self, requests: Iterable[OpenRequest]) -> None:
        """Make one round over all open requests. Raises BusError if the server does not answer."""
        now_s = time.monotonic()
        waiting = {(r.request_id, r.attempt): r for r in requests if _is_due(r, now_s)}
        self._looked_s = {key: looked_s for key, looked_s in self._looked_s.items() if key in waiting}
        self._missing &= waiting.keys()
        due = [key for key in waiting if now_s - self._looked_s.get(key, float("-inf")) >= LOOK_GAP_S]
        due.sort(key=lambda key: (key not in self._missing, self._looked_s.get(key, float("-inf"))))
        for key in due[:LOOKS_PER_ROUND]:
            self._looked_s[key] = now_s
            await self._look_at(key, waiting[key])

    async def _look_at(self, key: tuple[str, int], request: OpenRequest) -> None:
        request_id, attempt = key
        sequence = request.current.stream_sequence
        if sequence is None or not request.waits_for_worker(attempt):
            return
        if await self.is_stored(f"{request_id}.{attempt}", sequence):
            self._missing.discard(key)
        elif key not in self._missing:
            self._missing.add(key)
        elif request.current.stream_sequence == sequence:  # not taken for lost by a reconnect meanwhile
            request.job_vanished(attempt, time.monotonic())

    async def is_stored(self, message_id: str, sequence: int) -> bool:
        """Return whether the message is still in the stream. Raises BusError where that is unknown."""
        message = await self._bus.get_message(subjects.INTERACTIVE_STREAM, seq=sequence)
        if message is None:
            return False
        # A memory stream that was lost counts from 1 again: then the number is another job's.
        return message_id.encode() in base64.b64decode(message.get("hdrs", ""))


def _is_due(request: OpenRequest, now_s: float) -> bool:
    current = request.current
    is_queued = request.state is State.QUEUED and current.stream_sequence is not None
    return is_queued and now_s - current.queued_s >= QUIET_S
