"""One log line for each request at its end: what it was, what it used, and where its time went."""

import logging

from gateway.dispatch.lifecycle import OpenRequest
from gateway.dispatch.observers import Observer
from protocol.usage import RequestRecord

log = logging.getLogger(__name__)


class RequestLog(Observer):
    """Logs requests as they end. Never the prompt or the answer, nor the key itself."""

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
        trace = request.admission.trace
        if trace is not None:
            fields["trace_id"] = trace.trace_id
        log.info("request ended", extra={"fields": fields})
