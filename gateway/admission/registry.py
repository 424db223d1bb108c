"""The registry of live workers: by heartbeats, and by what the loss detector finds out."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from nats.aio.msg import Msg

from protocol import subjects
from protocol.errors import ErrorCode, ProtocolError
from protocol.job import Heartbeat, decode_heartbeat
from protocol.nats.bus import Bus
from protocol.nats.topology import HEARTBEAT_LIMIT_S

EXCUSED_SILENCE_S: Final = 2.0  # how long a worker may take to come back after the queue server was away
FORGET_AFTER_S: Final = 60.0

log = logging.getLogger(__name__)

OnLost = Callable[[str, ErrorCode, str, float], None]  # worker id, code and reason of the loss, time


class WorkerRegistry:
    """Hears heartbeats and tells who is alive. A worker that was lost and is heard of again is simply alive."""

    def __init__(self, bus: Bus, silence_limit_s: float = HEARTBEAT_LIMIT_S) -> None:
        self._silence_limit_s = silence_limit_s
        self.on_beat: Callable[[Heartbeat], None] | None = None  # told of every heartbeat
        self.on_lost: OnLost | None = None  # told at once
        self._bus = bus
        self._last_seen_s: dict[str, float] = {}
        self._beats: dict[str, tuple[float, Heartbeat]] = {}  # with the time each came
        self._silence_excused_until_s = float("-inf")
        self._excused_until_s: dict[str, float] = {}

    async def start(self) -> None:
        """Listen to the heartbeats of all workers. Raises BusError."""
        await self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)

    def seen(self, worker_id: str, now_s: float) -> None:
        """Any message of a worker is a sign of life."""
        self._last_seen_s[worker_id] = now_s

    def knows(self, worker_id: str) -> bool:
        """Return whether it has sent a heartbeat and has not been lost since."""
        return worker_id in self._last_seen_s

    def last_beat(self, worker_id: str) -> Heartbeat | None:
        """Return its last heartbeat, alive or not."""
        _, beat = self._beats.get(worker_id, (0.0, None))
        return beat

    def live_beats(self, now_s: float) -> list[Heartbeat]:
        """Return the last heartbeat of each live worker."""
        return [
            beat
            for worker_id, (_, beat) in self._beats.items()
            if self.knows(worker_id) and self.alive(worker_id, now_s)
        ]

    def silence_s(self, worker_id: str, now_s: float) -> float:
        """For how long it has not been heard of."""
        return now_s - self._last_seen_s.get(worker_id, float("-inf"))

    def reset_silence(self, now_s: float) -> None:
        """Judge nobody for a while: silence was ours or the queue server's, not the workers'."""
        self._silence_excused_until_s = now_s + EXCUSED_SILENCE_S

    def excuse(self, worker_id: str, now_s: float) -> None:
        """Do not judge this worker for a while: the queue server has cut it off, and it will be back."""
        self._excused_until_s[worker_id] = now_s + EXCUSED_SILENCE_S

    def _is_excused(self, worker_id: str, now_s: float) -> bool:
        return now_s < max(self._silence_excused_until_s, self._excused_until_s.get(worker_id, float("-inf")))

    def alive(self, worker_id: str, now_s: float) -> bool:
        """Return whether the worker has sent something within ``silence_limit_s``, or its silence is excused."""
        return self._is_excused(worker_id, now_s) or self.silence_s(worker_id, now_s) <= self._silence_limit_s

    def lose(self, worker_id: str, code: ErrorCode, reason: str, now_s: float) -> None:
        """The worker is gone: what runs there is to go on elsewhere. Unless it is excused, or has said so itself."""
        is_lost = code is ErrorCode.WORKER_LOST
        if is_lost and self._is_excused(worker_id, now_s):
            return
        if self._last_seen_s.pop(worker_id, None) is not None and is_lost:
            log.warning("worker %s is lost: %s", worker_id, reason)
        if self.on_lost is not None:
            self.on_lost(worker_id, code, f"worker {worker_id} is lost: {reason}", now_s)

    def lose_silent(self, worker_ids: Iterable[str], now_s: float) -> None:
        """Give up those whose heartbeats are missing."""
        for worker_id in worker_ids:
            if not self.alive(worker_id, now_s):
                self.lose(worker_id, ErrorCode.WORKER_LOST, "it is silent", now_s)

    def forget_dead(self, now_s: float) -> None:
        """Drop what is known of workers long gone, so that the registry does not grow for ever."""
        for worker_id in [w for w, until_s in self._excused_until_s.items() if until_s < now_s]:
            del self._excused_until_s[worker_id]
        for worker_id in [w for w, last_seen_s in self._last_seen_s.items() if now_s - last_seen_s > FORGET_AFTER_S]:
            del self._last_seen_s[worker_id]
        for worker_id in [w for w, (came_s, _) in self._beats.items() if now_s - came_s > FORGET_AFTER_S]:
            del self._beats[worker_id]

    async def _on_heartbeat(self, message: Msg) -> None:
        now_s = time.monotonic()
        worker_id = subjects.worker_of_heartbeat(message.subject)
        if "Status" in (message.headers or {}):  # an answer of the server that somebody has led here
            return
        if not message.data:  # a deletion marker: the worker has signed off
            self.lose(worker_id, ErrorCode.WORKER_DRAINING, "it has signed off", now_s)
            return
        try:
            beat = decode_heartbeat(message.data)
        except ProtocolError as error:  # of a newer worker, which lives all the same
            if not self.knows(worker_id):
                log.warning("heartbeat on %s: %s", message.subject, error)
            self.seen(worker_id, now_s)
            return
        if beat.worker_id != worker_id:
            log.warning("a heartbeat of %s is dropped: it calls itself %s", worker_id, beat.worker_id)
            return
        self.seen(worker_id, now_s)
        self._beats[worker_id] = (now_s, beat)
        if self.on_beat is not None:
            self.on_beat(beat)
