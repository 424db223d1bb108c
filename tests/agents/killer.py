"""SIGKILLs workers in the middle of tool calls, as seen in the frames they send."""

import random
import signal
from dataclasses import dataclass, field

from nats.aio.msg import Msg

from protocol import subjects
from protocol.job import Accepted, Tokens, decode_step
from tests.chaos.system import System

CALL_BEGINS = "<tool_call>"
CALL_ENDS = "</tool_call>"
CALL_CHARS = (10, 40)  # of a call that are made before the next strike: no call of a play is shorter than the lower


@dataclass
class Killer:
    """Strikes each request ``kills`` times, each time in a call that its worker is writing."""

    system: System
    rng: random.Random
    kills: int
    strikes: dict[str, list[str]] = field(default_factory=dict)  # the workers killed, by request
    calling: set[str] = field(default_factory=set)  # the requests whose answers call
    _texts: dict[str, str] = field(default_factory=dict)  # of each attempt's new tokens, after those before it
    _due: dict[str, int] = field(default_factory=dict)  # characters of the call at which a request is struck

    async def start(self) -> None:
        """Listen, and strike from now on."""
        self._subscription = await self.system.bus.subscribe(subjects.frames_subject(">"), self._on_step)

    async def stop(self) -> None:
        """Leave everybody alone."""
        await self._subscription.unsubscribe()

    async def _on_step(self, message: Msg) -> None:
        for frame in decode_step(message.data).frames:
            if isinstance(frame, Tokens):
                self._texts[frame.request_id] = self._texts.get(frame.request_id, "") + frame.text
                self._strike_if_due(frame.request_id)
            elif isinstance(frame, Accepted):
                self._due[frame.request_id] = self._due.get(frame.request_id, 0) + self.rng.randint(*CALL_CHARS)

    def _strike_if_due(self, request_id: str) -> None:
        _, begins, call = self._texts[request_id].rpartition(CALL_BEGINS)
        if not begins or CALL_ENDS in call:
            return
        self.calling.add(request_id)
        struck = self.strikes.setdefault(request_id, [])
        worker = self.system.farm.live.get(self.system.watcher.worker_of(request_id) or "")
        if (
            len(call) < self._due[request_id]
            or len(struck) >= self.kills
            or worker is None
            or worker.worker_id in struck
        ):
            return
        struck.append(worker.worker_id)
        worker.send(signal.SIGKILL)

    def moves(self, request_id: str) -> int:
        """Return how often the request has gone on at another worker."""
        return len({run.attempt for run in self.system.watcher.runs[request_id]}) - 1
