"""That this process shall stop, and by when."""

import asyncio
import math
import time


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
