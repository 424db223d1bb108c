"""Tracks which worker runs which request, and its tokens, from jobs, the workers' frames and their heartbeats."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nats.aio.msg import Msg

from protocol import subjects
from protocol.job import Accepted, Heartbeat, Job, Tokens, decode_heartbeat, decode_job, decode_step, unpack_token_ids
from protocol.nats.bus import Bus

JOB_SUBJECTS = "rq.>"


@dataclass(frozen=True, slots=True)
class Run:
    """One acceptance of a request by a worker."""

    at_s: float  # monotonic
    worker_id: str
    attempt: int


class HandoverBroken(Exception):
    """An attempt goes on from other tokens than those before it have made; the message says which."""


@dataclass(slots=True)
class Made:
    """The tokens that the attempts at one request started from, and generated."""

    prompt_ids: list[int] = field(default_factory=list)
    _resumed: dict[int, dict[int, list[int]]] = field(default_factory=dict)  # by attempt and choice
    _frames: dict[int, dict[int, Tokens]] = field(default_factory=dict)  # by attempt and number: some are sent twice

    def add_job(self, job: Job) -> None:
        """Note what an attempt goes on from."""
        self.prompt_ids = unpack_token_ids(job.prompt_ids)
        self._resumed[job.attempt] = {point.index: unpack_token_ids(point.token_ids) for point in job.resume}

    def add_frame(self, frame: Tokens) -> None:
        """Note what an attempt has made."""
        self._frames.setdefault(frame.attempt, {})[frame.seq] = frame

    def token_ids(self, choice: int) -> list[int]:
        """All tokens of a choice. Raises HandoverBroken."""
        ids: list[int] = []
        for attempt, resumed in sorted(self._resumed.items()):
            begun = resumed.get(choice, [])
            if begun != ids[: len(begun)]:
                raise HandoverBroken(f"attempt {attempt} goes on from {begun[-9:]} instead of {ids[-9:]}")
            frames = sorted(self._frames.get(attempt, {}).items())
            ids = begun + [id_ for _, frame in frames if frame.index == choice for id_ in frame.token_ids]
        return ids


@dataclass(slots=True)
class Watcher:
    """``runs`` holds every acceptance of every request, in the order in which they were heard."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    gateways: dict[str, str] = field(default_factory=dict)  # the id of the one that holds it, by accepted request
    made: dict[str, Made] = field(default_factory=dict)  # by request; empty without ``watch_tokens``
    _keeps_tokens: bool = False
    _beats: dict[str, tuple[float, Heartbeat]] = field(default_factory=dict)

    async def start(self, urls: list[str], options: Mapping[str, Any] | None = None) -> Bus:
        """Listen; the caller closes the bus."""
        bus = await Bus.connect(urls, name="chaos-watcher", options=options)
        await bus.subscribe(subjects.frames_subject(">"), self._on_step)
        await bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)
        return bus

    async def watch_tokens(self, bus: Bus) -> None:
        """Keep what each attempt goes on from, and what it makes."""
        self._keeps_tokens = True
        await bus.subscribe(JOB_SUBJECTS, self._on_job)

    def worker_of(self, request_id: str) -> str | None:
        """Return the worker that runs a request, if known."""
        runs = self.runs.get(request_id)
        return runs[-1].worker_id if runs else None

    def moved_at_s(self, request_id: str, after_s: float, away_from: str) -> float | None:
        """Return when a worker other than ``away_from`` accepted the request after that time; None if none did."""
        for run in self.runs.get(request_id, ()):
            if run.at_s >= after_s and run.worker_id != away_from:
                return run.at_s
        return None

    def has_beaten(self, worker_id: str) -> bool:
        """Report whether the worker has ever sent a heartbeat."""
        return worker_id in self._beats

    def beat_of(self, worker_id: str) -> Heartbeat:
        """Return the worker's last heartbeat, which must exist."""
        return self._beats[worker_id][1]

    def busy_sequences(self, worker_ids: set[str]) -> int:
        """Return the number of requests that these workers report."""
        return sum(beat.running for worker_id, (_, beat) in self._beats.items() if worker_id in worker_ids)

    async def wait_until_idle(self, worker_ids: set[str], limit_s: float) -> int:
        """Wait until none of these workers holds anything; returns how many requests they still hold at the limit."""
        since_s = time.monotonic()
        while time.monotonic() - since_s < limit_s:
            heard = all(self._beats.get(w, (0.0,))[0] > since_s for w in worker_ids)
            if heard and not self.busy_sequences(worker_ids):
                return 0
            await asyncio.sleep(0.05)
        return self.busy_sequences(worker_ids)

    async def _on_step(self, message: Msg) -> None:
        now_s = time.monotonic()
        for frame in decode_step(message.data).frames:
            if isinstance(frame, Accepted):
                self.runs.setdefault(frame.request_id, []).append(Run(now_s, frame.worker_id, frame.attempt))
                self.gateways[frame.request_id] = message.subject.split(".")[1]
            elif self._keeps_tokens and isinstance(frame, Tokens):
                self.made.setdefault(frame.request_id, Made()).add_frame(frame)

    async def _on_job(self, message: Msg) -> None:
        job = decode_job(message.data)
        self.made.setdefault(job.request_id, Made()).add_job(job)

    async def _on_heartbeat(self, message: Msg) -> None:
        worker_id = subjects.worker_of_heartbeat(message.subject)
        if not message.data:
            self._beats.pop(worker_id, None)
            return
        with contextlib.suppress(ValueError):
            self._beats[worker_id] = (time.monotonic(), decode_heartbeat(message.data))
