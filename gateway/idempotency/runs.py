"""Running and ended requests with a key on this gateway.

begin ──> RUNNING ──success──> KEPT ──after keep_s, or no memory──> forgotten
             │
             ├── failed, refused ──> forgotten: the next request with the key runs again
             └── no reader for ``reattach_s``: canceled, forgotten
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.idempotency.recording import Recording
from gateway.settings import IdempotencySettings


class Run:
    """A request with a key, since its first arrival."""

    def __init__(self, name: str, fingerprint: str, claim_sequence: int | None, runs: "Runs") -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.claim_sequence = claim_sequence  # of the bucket's entry; None: not in the bucket
        self.recording = Recording(lambda count_bytes: runs.make_room(self, count_bytes))
        self.readers = 0
        self.abandoned = asyncio.Event()
        self._runs = runs
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def reading(self) -> Iterator[Recording]:
        """Count as a reader: the run is not abandoned during the block."""
        self.readers += 1
        if not self.recording.ended:
            self.stop_timer()
        try:
            yield self.recording
        finally:
            self.readers -= 1
            if not self.readers and not self.recording.ended:
                self._runs.abandon_later(self)

    def start_timer(self, delay_s: float, action: "Callable[[Run], None]") -> None:
        """Call ``action`` after ``delay_s``, and cancel the previous timer."""
        self.stop_timer()
        self._timer = asyncio.get_running_loop().call_later(delay_s, action, self)

    def stop_timer(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Runs:
    """All runs of this gateway by the key's name. ``release`` gets the claims of forgotten runs."""

    def __init__(self, settings: IdempotencySettings, release: Callable[[int], None]) -> None:
        self._settings = settings
        self._release = release
        self._runs: dict[str, Run] = {}
        self._kept: dict[str, Run] = {}  # ended runs, oldest first
        self._claiming: Counter[str] = Counter()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def find(self, name: str) -> Run | None:
        """Return the run of a key, or None."""
        return self._runs.get(name)

    def claimed(self, run: Run, claim_sequence: int) -> None:
        """Store the run's entry in the bucket."""
        if self._runs.get(run.name) is run:
            run.claim_sequence = claim_sequence
        else:  # it was forgotten during the claim
            self._release(claim_sequence)

    @contextmanager
    def claiming(self, name: str) -> Iterator[None]:
        """Mark the key as being claimed: requests that find its claim in the bucket wait for the run."""
        self._claiming[name] += 1
        try:
            yield
        finally:
            self._claiming[name] -= 1
            if not self._claiming[name]:
                del self._claiming[name]

    def is_claiming(self, name: str) -> bool:
        """Return whether the key is being claimed."""
        return name in self._claiming

    def begin(self, name: str, fingerprint: str, claim_sequence: int | None) -> Run:
        """Begin a run. The caller must call ``ended``."""
        run = self._runs[name] = Run(name, fingerprint, claim_sequence, self)
        self.abandon_later(run)  # unless a reader attaches
        return run

    def ended(self, run: Run) -> None:
        """End a run: keep its answer, or release its key."""
        run.stop_timer()
        run.recording.end()
        if self._runs.get(run.name) is not run:
            return
        if run.recording.can_be_replayed:
            self._kept[run.name] = run
            run.start_timer(self._settings.keep_s, self._forget)
            self.make_room(run, 0)
        else:
            self._forget(run)

    def abandon_later(self, run: Run) -> None:
        """Cancel the run after ``reattach_s`` without a reader."""
        run.start_timer(self._settings.reattach_s, self._abandon)

    def make_room(self, run: Run, count_bytes: int) -> None:
        """Account for ``count_bytes`` more of ``run``. Above the limits, forget the oldest ended runs."""
        if self._runs.get(run.name) is not run:
            return
        self._bytes += count_bytes
        while self._kept and (self._bytes > self._settings.max_bytes or len(self._runs) > self._settings.max_runs):
            self._forget(next(iter(self._kept.values())))
        excess_bytes = min(self._bytes - self._settings.max_bytes, run.recording.kept_bytes)
        if excess_bytes > 0 and self._runs.get(run.name) is run:
            run.recording.forget_front(excess_bytes)
            self._bytes -= excess_bytes

    def _abandon(self, run: Run) -> None:
        self._forget(run)
        run.abandoned.set()

    def _forget(self, run: Run) -> None:
        run.stop_timer()
        del self._runs[run.name]
        self._kept.pop(run.name, None)
        self._bytes -= run.recording.kept_bytes
        if run.claim_sequence is not None:
            self._release(run.claim_sequence)
