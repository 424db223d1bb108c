"""Ends or hands back a worker's jobs when it must stop.

    not started                       ──at once──────────────────────────────> handed back
    running, ends before the limit    ──────────────────────────────────────> ended here
    running, may not end in time      ──another worker is there, or the limit is near──> handed back

A hand-back costs only the prefill of the prompt: the gateway holds the tokens. So a job is handed back early if another
worker can resume it, and otherwise runs here for as long as possible.
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
# Whether this process must stop, and by when.


class Stop:
    """The stop requested by signals and notices. The deadline is only ever moved closer."""

    def __init__(self, drain_s: float, signal_limit_s: float = math.inf) -> None:
        """Make a stop that is not requested. A drain lasts at most ``drain_s``; after a signal, ``signal_limit_s``."""
        self.requested = asyncio.Event()
        self.force_exit = asyncio.Event()  # by a second signal
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
        """Handle SIGTERM or SIGINT: the first requests a stop, each further one forces it at once."""
        if self._was_signalled:
            self.force_exit.set()
        self.request(0.0 if self._was_signalled else self._signal_limit_s)
        self._was_signalled = True


# --- drain ------------------------------------------------------------------------------------------------------------

DRAIN_CHECK_S: Final = 0.1  # how often a second signal, a new worker or a change of pace is noticed
HAND_BACK_MARGIN_S: Final = 0.5  # before the limit: time to send the last frames and records


class Drain:
    """Ends or hands back everything that an executor holds."""

    def __init__(self, executor: Executor, others_serving: Callable[[str], bool]) -> None:
        """Make a drain; ``others_serving`` reports whether another live worker of the same revision serves a model."""
        self._executor = executor
        self._others_serving = others_serving

    async def run(self, stop: Stop) -> None:
        """Return when the executor holds nothing."""
        executor = self._executor
        executor.stop_accepting()
        log.info("draining %d jobs for at most %.1f s", len(executor.held), stop.deadline_s - time.monotonic())
        executor.hand_back([attempt for attempt in executor.held if not attempt.holds_credit])
        while executor.held:
            now_s = time.monotonic()
            left_s = stop.deadline_s - HAND_BACK_MARGIN_S - now_s
            executor.hand_back([attempt for attempt in executor.held if self._should_hand_back(attempt, now_s, left_s)])
            await wait_for(executor.is_idle, DRAIN_CHECK_S)

    def _should_hand_back(self, attempt: Attempt, now_s: float, left_s: float) -> bool:
        if left_s <= 0:
            return True
        return attempt.remaining_s(now_s) > left_s and self._others_serving(attempt.job.model)
