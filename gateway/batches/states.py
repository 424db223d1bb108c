"""A batch's states, and whose API made it.

    validating ──> in_progress ──> finalizing ──> completed
        │               │ ├── its time is up ───> expired
        │               │ └── its key is revoked ─> failed, with what is done
        │               └──── cancelling ───────> cancelled
        └── a line is wrong ─────────────────────> failed

Only the gateway that feeds it moves it on, but for ``cancelling``, which the client asks for.
"""

from enum import StrEnum
from typing import Final


class Status(StrEnum):
    """Where a batch stands."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


OPENAI: Final = "openai"
ANTHROPIC: Final = "anthropic"
OVER: Final = (Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED)
