"""Which workers are alive, by their heartbeats."""

import logging
import time
from collections.abc import Callable
from typing import Final

from nats.aio.msg import Msg

from protocol import subjects
from protocol.bus import Bus
from protocol.errors import ProtocolError
from protocol.messages import Heartbeat, decode_heartbeat
from protocol.topology import HEARTBEAT_LIMIT_S

FORGIVENESS_S: Final = 2.0  # how long a worker may take to come back after the queue server was away
FORGET_AFTER_S: Final = 60.0

log = logging.getLogger(__name__)


class WorkerRegistry:
    """Hears heartbeats and tells whether a worker still counts as alive."""

    def __init__(self, bus: Bus) -> None:
        self.on_beat: Callable[[Heartbeat], None] | None = None  # told of every heartbeat
        self._bus = bus
        self._heard_s: dict[str, float] = {}
        self._forgiven_until_s = 0.0

    async def start(self) -> None:
        """Listen to the heartbeats of all workers. Raises BusError."""
        await self._bus.subscribe(subjects.heartbeat_subject("*"), self._on_heartbeat)

    def heard(self, worker_id: str, now_s: float) -> None:
        """Any message of a worker is a sign of life."""
        self._heard_s[worker_id] = now_s

    def forgive(self, now_s: float) -> None:
        """Judge nobody for a while: silence was ours or the queue server's, not the workers'."""
        self._forgiven_until_s = now_s + FORGIVENESS_S

    def alive(self, worker_id: str, now_s: float) -> bool:
        """Whether the worker has been heard of within ``HEARTBEAT_LIMIT_S``, or is being forgiven."""
        if now_s < self._forgiven_until_s:
            return True
        return now_s - self._heard_s.get(worker_id, float("-inf")) <= HEARTBEAT_LIMIT_S

    def forget_dead(self, now_s: float) -> None:
        """Drop what is known of workers long gone, so that the registry does not grow for ever."""
        for worker_id in [w for w, heard_s in self._heard_s.items() if now_s - heard_s > FORGET_AFTER_S]:
            del self._heard_s[worker_id]

    async def _on_heartbeat(self, message: Msg) -> None:
        if not message.data:  # a deletion marker: the worker has signed off
            self._heard_s.pop(message.subject.rpartition(".")[2], None)
            return
        try:
            beat = decode_heartbeat(message.data)
        except ProtocolError as error:
            log.warning("heartbeat on %s: %s", message.subject, error)
            return
        self.heard(beat.worker_id, time.monotonic())
        if self.on_beat is not None:
            self.on_beat(beat)
