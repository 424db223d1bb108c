"""Ends or hands back a worker's jobs when it must stop.

    not begun                         ──at once──────────────────────────────> handed back
    running, ends before the limit    ──────────────────────────────────────> ended here
    running, cannot be sure to        ──another worker is there, or the limit is near──> handed back

A job that is handed back loses nothing but the time of its prompt's computation: its gateway holds the tokens. So it
goes early where somebody takes it on, and otherwise is worked on as long as that lasts.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Final

from pool_worker.attempt import Attempt
from pool_worker.executor import Executor
from protocol.process import wait_for

log = logging.getLogger(__name__)


# --- stopping ---------------------------------------------------------------------------------------------------------
#
# That this process shall stop, and by when.


class Stop:
    """The stop requested by signals and notices; the deadline only ever comes nearer."""

    def __init__(self, drain_s: float, signal_limit_s: float = math.inf) -> None:
        """Nobody has asked yet. No drain lasts longer than ``drain_s``, one after a signal ``signal_limit_s``."""
        self.requested = asyncio.Event()
        self.hurried = asyncio.Event()  # by a second signal
        self.deadline_s = math.inf  # monotonic clock
        self._drain_s = drain_s
        self._signal_limit_s = signal_limit_s
        self._was_signalled = False

    def request(self, limit_s: float = math.inf) -> None:
        """Stop within ``limit_s``."""
        limit_s = max(0.0, min(limit_s, self._drain_s))
        self.deadline_s = min(self.deadline_s, time.monotonic() + limit_s)
        self.requested.set()

    def on_signal(self) -> None:
        """Take SIGTERM or SIGINT: the first asks to stop, every further one to do so at once."""
        if self._was_signalled:
            self.hurried.set()
        self.request(0.0 if self._was_signalled else self._signal_limit_s)
        self._was_signalled = True


# --- drain ------------------------------------------------------------------------------------------------------------

DRAIN_CHECK_S: Final = 0.1  # how often a second signal, a new worker or a change of pace is noticed
HAND_BACK_MARGIN_S: Final = 0.5  # before the limit: for the last frames and records to leave


class Drain:
    """Ends or hands back everything that an executor holds."""

    def __init__(self, executor: Executor, others_serving: Callable[[str], bool]) -> None:
        """Make a drain; ``others_serving`` reports whether another live worker of the same revision serves a model."""
        self._executor = executor
        self._others_serving = others_serving

    async def run(self, stop: Stop) -> None:
        """Return when nothing is held any more."""
        executor = self._executor
        executor.stop_accepting()
        log.info("draining %d jobs, for at most %.1f s", len(executor.held), stop.deadline_s - time.monotonic())
        executor.hand_back([attempt for attempt in executor.held if not attempt.holds_credit])
        while executor.held:
            now_s = time.monotonic()
            left_s = stop.deadline_s - HAND_BACK_MARGIN_S - now_s
            executor.hand_back([attempt for attempt in executor.held if self._shall_go(attempt, now_s, left_s)])
            await wait_for(executor.is_idle, DRAIN_CHECK_S)

    def _shall_go(self, attempt: Attempt, now_s: float, left_s: float) -> bool:
        if left_s <= 0:
            return True
        return attempt.remaining_s(now_s) > left_s and self._others_serving(attempt.job.model)
