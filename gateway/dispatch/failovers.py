"""The failovers that this gateway has just seen, for people who watch."""

from dataclasses import dataclass
from typing import Final

MAX_REMEMBERED: Final = 200


@dataclass(frozen=True, slots=True)
class Failover:
    """An attempt that failed and was followed by another."""

    at_unix_ms: int
    request_id: str
    model: str
    attempt: int  # the one that follows
    worker_id: str | None  # which the failed one was on; None: it was on none
    code: str  # protocol.errors.ErrorCode of its failure
    tokens_kept: int  # output tokens that the next attempt begins with
