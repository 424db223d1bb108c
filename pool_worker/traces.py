"""The spans of one worker's attempts. Imported only if traces are on.

    chat <model>              accepted → ended, in the trace that the job names
    ├── engine queue
    ├── prefill
    └── decode

All spans are created when the attempt ends. A killed worker leaves no spans of running attempts: the gateway records
them as events "attempt failed".
"""

import time
from collections.abc import Iterator
from typing import Final

from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from pool_worker.attempt import Attempt
from pool_worker.settings import WorkerSettings
from protocol import trace_names as names
from protocol.job import Timings
from protocol.tracing import Tracing, context_of

PROVIDER: Final = "spillway"
_NANOS_PER_MS: Final = 1_000_000


class AttemptTraces:
    """Makes the spans of attempts."""

    def __init__(self, tracing: Tracing, settings: WorkerSettings) -> None:
        self._tracing = tracing
        self._attributes: dict[str, AttributeValue] = {
            names.PROVIDER: PROVIDER,
            names.MESSAGING_SYSTEM: "nats",
            names.MESSAGING_OPERATION: "process",
            names.WORKER_ID: settings.worker_id,
            names.POOL: settings.pool,
            names.MACHINE_PROVIDER: settings.provider,
            names.REGION: settings.region,
            names.TIER: settings.tier,
        }

    def ended(self, attempt: Attempt, outcome: str, error_code: str | None) -> None:
        """Record the end of an attempt."""
        job = attempt.job
        end_ns = time.time_ns()
        start_ns = end_ns - int(attempt.elapsed_ms() * _NANOS_PER_MS)
        endpoint = job.origin.endpoint if job.origin is not None else "chat.completions"
        operation = names.OPERATIONS.get(endpoint, endpoint)
        span = self._tracing.tracer.start_span(
            f"{operation} {job.model}",
            context_of({} if job.traceparent is None else {"traceparent": job.traceparent}),
            SpanKind.CONSUMER,
            start_time=start_ns,
        )
        if not span.is_recording():
            return
        timings = attempt.engine_timings()
        span.set_attributes(self._attributes)
        span.set_attributes(
            {
                names.OPERATION: operation,
                names.REQUEST_MODEL: job.model,
                names.REQUEST_ID: job.request_id,
                names.ATTEMPT: job.attempt,
                names.DELIVERIES: attempt.deliveries,
                names.OUTCOME: outcome,
                names.INPUT_TOKENS: attempt.prompt_tokens,
                names.CACHED_TOKENS: attempt.cached_tokens,
                names.OUTPUT_TOKENS: attempt.completion_tokens,
                names.RESUMED_TOKENS: sum(len(point.token_ids) // 4 for point in job.resume),
                names.PREEMPTIONS: timings.preemptions if timings is not None else 0,
            }
        )
        if attempt.ttft_ms is not None:
            span.set_attribute(names.TTFT_S, attempt.ttft_ms / 1000)
        if error_code is not None:
            span.set_attribute(names.ERROR_TYPE, error_code)
            span.set_status(Status(StatusCode.ERROR, error_code))
        inside = set_span_in_context(span)
        if timings is not None:
            for name, phase_start_ns, phase_end_ns in phases(attempt, timings, start_ns, end_ns):
                phase = self._tracing.tracer.start_span(name, inside, start_time=phase_start_ns)
                phase.end(phase_end_ns)
        span.end(end_ns)


def phases(attempt: Attempt, timings: Timings, start_ns: int, end_ns: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, end) of each phase in the engine, which reports only durations.

    Phases are aligned at the first token, or at the end if there was none. They are clipped to the attempt's span:
    the engine's clock may differ by some microseconds.
    """
    if attempt.ttft_ms is not None:
        at_ns = start_ns + int(attempt.ttft_ms * _NANOS_PER_MS)
    else:
        at_ns = end_ns - int(timings.decode_ms * _NANOS_PER_MS)
    at_ns -= int((timings.engine_queue_ms + timings.prefill_ms) * _NANOS_PER_MS)
    lengths_ms = (timings.engine_queue_ms, timings.prefill_ms, timings.decode_ms)
    for name, length_ms in zip(("engine queue", "prefill", "decode"), lengths_ms, strict=True):
        phase_end_ns = at_ns + int(length_ms * _NANOS_PER_MS)
        if length_ms > 0:
            yield name, min(max(at_ns, start_ns), end_ns), min(max(phase_end_ns, start_ns), end_ns)
        at_ns = phase_end_ns
