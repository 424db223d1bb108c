"""The log line of each request, and the latest failovers."""

import logging
from collections import deque
from dataclasses import dataclass
from typing import Final, Self

from gateway.dispatch.lifecycle import OpenRequest
from gateway.dispatch.observers import Observer
from protocol.nats.clock import unix_now_ms
from protocol.usage import RequestRecord

log = logging.getLogger(__name__)


# --- request log ------------------------------------------------------------------------------------------------------
#
# One log line for each ended request: its parameters, its usage, and its time by phase.


class RequestLog(Observer):
    """Logs requests as they end, without prompt, answer or key."""

    def ended(self, request: OpenRequest, record: RequestRecord) -> None:
        """Log a request that has ended."""
        if not log.isEnabledFor(logging.INFO):
            return
        fields = {
            "request_id": record.request_id,
            "endpoint": record.endpoint,
            "model": record.model,
            "key_name": record.key_name,
            "stream": record.stream,
            "status": record.http_status,
            "outcome": record.outcome,
            "error_code": record.error_code,
            "finish_reason": record.finish_reason,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "counted_by": record.counted_by,
            "attempts": record.attempts,
            "queue_ms": record.queue_ms,
            "engine_queue_ms": record.engine_queue_ms,
            "prefill_ms": record.prefill_ms,
            "decode_ms": record.decode_ms,
            "ttft_ms": record.ttft_ms,
            "total_ms": record.total_ms,
            "preemptions": record.preemptions,
            "pool": record.pool,
            "worker_id": request.accepted.worker_id if request.accepted else None,
        }
        trace = request.admission.arrival.trace
        if trace is not None:
            fields["trace_id"] = trace.trace_id
        log.info("request ended", extra={"fields": fields})


# --- failovers --------------------------------------------------------------------------------------------------------
#
# The latest failovers of this gateway, for the dashboard.

MAX_REMEMBERED: Final = 200


@dataclass(frozen=True, slots=True)
class Failover:
    """A failed attempt that was followed by another."""

    at_unix_ms: int
    request_id: str
    model: str
    attempt: int  # number of the next attempt
    worker_id: str | None  # of the failed attempt; None: none had accepted it
    code: str  # protocol.errors.ErrorCode of the failure
    tokens_kept: int  # output tokens that the next attempt resumes from

    @classmethod
    def of(cls, request: OpenRequest) -> Self:
        """Return a request's latest failover."""
        failed = request.log.failures[-1]
        return cls(
            unix_now_ms(),
            request.request_id,
            request.admission.model,
            request.attempt,
            failed.worker_id,
            failed.code,
            request.choices.held_tokens(),
        )


class RecentFailovers(Observer):
    """Keeps the latest failovers."""

    def __init__(self) -> None:
        self.latest: deque[Failover] = deque(maxlen=MAX_REMEMBERED)  # newest last

    def failed_over(self, request: OpenRequest) -> None:
        """Handle a failed attempt that is followed by another."""
        self.latest.append(Failover.of(request))
