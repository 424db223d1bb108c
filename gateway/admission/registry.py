"""The registry of live workers, from heartbeats and the loss detector."""

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

EXCUSED_SILENCE_S: Final = 2.0  # for a worker to reconnect after a queue server outage
FORGET_AFTER_S: Final = 60.0

log = logging.getLogger(__name__)

OnLost = Callable[[str, ErrorCode, str, float], None]  # worker id, code, reason, time


class WorkerRegistry:
    """Tracks which workers are alive. A lost worker that sends a message is alive again."""

    def __init__(self, bus: Bus, silence_limit_s: float = HEARTBEAT_LIMIT_S) -> None:
        self._silence_limit_s = silence_limit_s
        self.on_beat: Callable[[Heartbeat], None] | None = None  # called with every heartbeat
        self.on_lost: OnLost | None = None  # called when a worker is lost
        self._bus = bus
        self._last_seen_s: dict[str, float] = {}
        self._beats: dict[str, tuple[float, Heartbeat]] = {}  # with the time of arrival
        self._silence_excused_until_s = float("-inf")
        self._excused_until_s: dict[str, float] = {}

    async def start(self) -> None:
        """Subscribe to the heartbeats of all workers. Raises BusError."""
        await self._bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)

    def seen(self, worker_id: str, now_s: float) -> None:
        """Note a message of a worker: it is alive."""
        self._last_seen_s[worker_id] = now_s

    def knows(self, worker_id: str) -> bool:
        """Return whether the worker has sent a heartbeat and was not lost since."""
        return worker_id in self._last_seen_s

    def last_beat(self, worker_id: str) -> Heartbeat | None:
        """Return the worker's last heartbeat, even if it is lost."""
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
        """Return the time since the worker's last message."""
        return now_s - self._last_seen_s.get(worker_id, float("-inf"))

    def reset_silence(self, now_s: float) -> None:
        """Excuse all workers' silence for a while: this gateway or the queue server was silent, not the workers."""
        self._silence_excused_until_s = now_s + EXCUSED_SILENCE_S

    def excuse(self, worker_id: str, now_s: float) -> None:
        """Excuse a worker's silence for a while: the queue server disconnected it, and it will reconnect."""
        self._excused_until_s[worker_id] = now_s + EXCUSED_SILENCE_S

    def _is_excused(self, worker_id: str, now_s: float) -> bool:
        return now_s < max(self._silence_excused_until_s, self._excused_until_s.get(worker_id, float("-inf")))

    def alive(self, worker_id: str, now_s: float) -> bool:
        """Return whether the worker sent a message within ``silence_limit_s``, or its silence is excused."""
        return self._is_excused(worker_id, now_s) or self.silence_s(worker_id, now_s) <= self._silence_limit_s

    def lose(self, worker_id: str, code: ErrorCode, reason: str, now_s: float) -> None:
        """Report a worker as lost, so that its requests continue elsewhere. Ignored while its silence is excused."""
        is_lost = code is ErrorCode.WORKER_LOST
        if is_lost and self._is_excused(worker_id, now_s):
            return
        if self._last_seen_s.pop(worker_id, None) is not None and is_lost:
            log.warning("worker %s is lost: %s", worker_id, reason)
        if self.on_lost is not None:
            self.on_lost(worker_id, code, f"worker {worker_id} is lost: {reason}", now_s)

    def lose_silent(self, worker_ids: Iterable[str], now_s: float) -> None:
        """Report workers whose heartbeats are missing as lost."""
        for worker_id in worker_ids:
            if not self.alive(worker_id, now_s):
                self.lose(worker_id, ErrorCode.WORKER_LOST, "its heartbeats stopped", now_s)

    def forget_dead(self, now_s: float) -> None:
        """Forget workers that were lost long ago, to bound the registry."""
        for worker_id in [w for w, until_s in self._excused_until_s.items() if until_s < now_s]:
            del self._excused_until_s[worker_id]
        for worker_id in [w for w, last_seen_s in self._last_seen_s.items() if now_s - last_seen_s > FORGET_AFTER_S]:
            del self._last_seen_s[worker_id]
        for worker_id in [w for w, (came_s, _) in self._beats.items() if now_s - came_s > FORGET_AFTER_S]:
            del self._beats[worker_id]

    async def _on_heartbeat(self, message: Msg) -> None:
        now_s = time.monotonic()
        worker_id = subjects.worker_of_heartbeat(message.subject)
        if "Status" in (message.headers or {}):  # a server's reply that was redirected here
            return
        if not message.data:  # a deletion marker: the worker signed off
            self.lose(worker_id, ErrorCode.WORKER_DRAINING, "it signed off", now_s)
            return
        try:
            beat = decode_heartbeat(message.data)
        except ProtocolError as error:  # from a worker of a newer release, which is alive
            if not self.knows(worker_id):
                log.warning("cannot read the heartbeat on %s: %s", message.subject, error)
            self.seen(worker_id, now_s)
            return
        if beat.worker_id != worker_id:
            log.warning("dropped a heartbeat on the subject of %s: it names worker %s", worker_id, beat.worker_id)
            return
        self.seen(worker_id, now_s)
        self._beats[worker_id] = (now_s, beat)
        if self.on_beat is not None:
            self.on_beat(beat)
