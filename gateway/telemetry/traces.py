"""The spans of one gateway's requests; imported only if traces are enabled.

    POST /v1/chat/completions          received → answered, in the client's trace
    ├── queue                          published → accepted by a worker, one per attempt, linked to the previous one
    │   └── chat <model>               the worker's (``pool_worker.traces``); the job carries its parent
    └── queue …

A completion with several prompts has a ``prompt`` span for each, the parent of its queue spans.

No work is done per token, and no span contains a prompt, an answer or a key.
"""

import time
from collections.abc import Mapping
from typing import Final

from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.util.types import AttributeValue

from db.accounts.masking import masked
from gateway.api.errors import form_of
from gateway.dispatch.lifecycle import OpenRequest
from gateway.dispatch.observers import Observer
from gateway.errors import Refused
from gateway.request.request import Admission
from protocol import trace_names as names
from protocol.tracing import Tracing, context_of, trace_id_of, traceparent_of
from protocol.usage import RequestRecord

PROVIDER: Final = "spillway"
_NANOS: Final = 1_000_000_000
_PROPAGATED: Final = (b"traceparent", b"tracestate")


class RequestTraces(Observer):
    """Begins the trace of each request, and forwards events to it."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def begin(self, request_id: str, method: str, path: str, headers: Mapping[bytes, bytes]) -> "RequestTrace":
        """Begin the trace of a request that has arrived."""
        known = {name.decode(): headers[name].decode("latin-1") for name in _PROPAGATED if name in headers}
        path = masked(path)
        span = self._tracing.tracer.start_span(
            f"{method} {path}",
            context_of(known),
            SpanKind.SERVER,
            {
                names.HTTP_METHOD: method,
                names.HTTP_ROUTE: path,
                names.URL_PATH: path,
                names.REQUEST_ID: request_id,
            },
        )
        return RequestTrace(self._tracing, span)

    def admitted(self, admission: Admission) -> None:
        """Note that a request was admitted."""
        if isinstance(admission.arrival.trace, RequestTrace):
            admission.arrival.trace.admitted(admission)

    def queued(self, request: OpenRequest, after_s: float) -> None:
        """Note that an attempt will be published after a pause."""
        if isinstance(request.admission.arrival.trace, RequestTrace):
            request.admission.arrival.trace.queued(request, after_s)

    def accepted(self, request: OpenRequest) -> None:
        """Note that a worker has accepted the current attempt."""
        if isinstance(request.admission.arrival.trace, RequestTrace):
            request.admission.arrival.trace.accepted(request)

    def ended(self, request: OpenRequest, record: RequestRecord) -> None:
        """End a request's trace with its record."""
        if isinstance(request.admission.arrival.trace, RequestTrace):
            request.admission.arrival.trace.ended(request, record)


class RequestTrace:
    """The spans of one request, from arrival to end."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._queue: Span | None = None  # of the current attempt
        self._traced_failures = 0

    @property
    def trace_id(self) -> str:
        """Id of the trace: the client's, or a new one."""
        return trace_id_of(self._span)

    @property
    def traceparent(self) -> str:
        """Trace context of the current attempt's job."""
        return traceparent_of(self._queue or self._span)

    def part(self, request_id: str) -> "RequestTrace":
        """Begin the trace of one of several requests of one call."""
        span = self._tracing.tracer.start_span(
            "prompt", set_span_in_context(self._span), SpanKind.INTERNAL, {names.REQUEST_ID: request_id}
        )
        return RequestTrace(self._tracing, span)

    # --- events, in order ---------------------------------------------------------------------------------------------

    def refused(self, status: int | None, error: Refused | None) -> None:
        """End the trace of a refused request; ``error`` is None if the client disconnected before."""
        if status is not None:
            self._span.set_attribute(names.HTTP_STATUS, status)
        if error is not None:
            error_status = form_of(error).status
            self._span.set_attribute(names.ERROR_TYPE, error.code or str(error_status))
            if error_status >= 500:
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def parts_ended(self, status: int | None) -> None:
        """End the trace after all its parts have ended. ``status`` is None if the client disconnected before."""
        if status is not None:
            self._span.set_attribute(names.HTTP_STATUS, status)
            if status >= 500:
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def admitted(self, admission: Admission) -> None:
        """Begin the spans of an admitted request."""
        model = admission.model
        self._span.set_attributes(
            {
                names.OPERATION: names.OPERATIONS.get(admission.endpoint, admission.endpoint),
                names.PROVIDER: PROVIDER,
                names.REQUEST_MODEL: model,
                names.REQUEST_STREAM: admission.prompt.stream,
                names.INPUT_TOKENS: admission.prompt.tokens,
            }
        )
        if admission.prompt.pooling is None:
            self._span.set_attribute(names.REQUEST_MAX_TOKENS, admission.prompt.sampling.max_tokens)
            self._span.set_attribute(names.REQUEST_CHOICES, admission.prompt.sampling.n)

    def queued(self, request: OpenRequest, after_s: float) -> None:
        """Note that an attempt will be published after a pause."""
        self._trace_failures(request)
        links = []
        if self._queue is not None:
            links.append(Link(self._queue.get_span_context(), {names.ATTEMPT: request.attempt - 1}))
            self._end_queue("never accepted")
        self._queue = self._tracing.tracer.start_span(
            "queue",
            set_span_in_context(self._span),
            SpanKind.PRODUCER,
            {
                names.MESSAGING_SYSTEM: "nats",
                names.MESSAGING_OPERATION: "send",
                names.REQUEST_ID: request.request_id,
                names.ATTEMPT: request.attempt,
                names.RESUMED_TOKENS: request.current.tokens_before,
            },
            links,
            start_time=time.time_ns() + int(after_s * _NANOS),
        )

    def accepted(self, request: OpenRequest) -> None:
        """Note that a worker has accepted the current attempt."""
        accepted = request.current.accepted
        if self._queue is not None and accepted is not None:
            self._queue.set_attributes(
                {
                    names.WORKER_ID: accepted.worker_id,
                    names.POOL: accepted.pool,
                    names.MACHINE_PROVIDER: accepted.provider,
                    names.REGION: accepted.region,
                }
            )
            self._queue.end()

    def ended(self, request: OpenRequest, record: RequestRecord) -> None:
        """End the spans with the request's record."""
        self._trace_failures(request)
        self._end_queue(record.error_code or record.outcome)
        self._span.set_attributes(_result(request, record))
        if record.error_code is not None:
            self._span.set_attribute(names.ERROR_TYPE, record.error_code)
        if record.outcome == "failed" and not 400 <= record.http_status < 500:
            self._span.set_status(Status(StatusCode.ERROR, record.error_code))
        self._span.end()

    def _end_queue(self, error: str) -> None:
        """End the current attempt's span if no worker has accepted it."""
        if self._queue is not None and self._queue.is_recording():
            self._queue.set_attribute(names.ERROR_TYPE, error)
            self._queue.end()

    def _trace_failures(self, request: OpenRequest) -> None:
        for failure in request.log.failures[self._traced_failures :]:
            self._span.add_event(
                names.ATTEMPT_FAILED,
                {
                    names.ATTEMPT: failure.attempt,
                    names.ERROR_CODE: failure.code,
                    **({names.WORKER_ID: failure.worker_id} if failure.worker_id else {}),
                },
            )
        self._traced_failures = len(request.log.failures)


def _result(request: OpenRequest, record: RequestRecord) -> dict[str, AttributeValue]:
    result: dict[str, AttributeValue] = {
        names.HTTP_STATUS: record.http_status,
        names.OUTCOME: record.outcome,
        names.ATTEMPTS: record.attempts,
        names.OUTPUT_TOKENS: record.completion_tokens,
        names.CACHED_TOKENS: record.cached_tokens,
    }
    if request.admission.prompt.pooling is None:
        reasons = [request.choices[index].finish_reason for index in range(len(request.choices))]
        result[names.FINISH_REASONS] = [reason for reason in reasons if reason is not None]
    if record.pool is not None:
        result[names.RESPONSE_MODEL] = record.model
        result[names.POOL] = record.pool
    if record.ttft_ms is not None:
        result[names.TTFT_S] = record.ttft_ms / 1000
    return result
