"""The states of an admitted request.

                 publish                  Accepted                       Finished
(admitted) ────────────────> QUEUED ──────────────────> RUNNING ─────────────────────────> ENDED ok
                              ^   │                      │    │
                              │   │  Failed(retryable),  │    │
                              └───┴─ worker silent/lost ─┘    │
                              attempt + 1, resuming           │
                                  │                           │
           refused, failed for good, attempts exhausted ──────┴─────────────────────────> ENDED failed
                                  │                           │
              caller left, or one of the timeouts             │
                                  v                           v
                              STOPPING: the caller has his verdict; the worker's exact ─> ENDED cancelled
                              token counts are waited for, but not for long                or failed
"""

from enum import Enum


class State(Enum):
    """State of a request; drawn above."""

    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"
