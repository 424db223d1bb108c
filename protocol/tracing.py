"""Export of spans to a collector, for processes that are configured for it.

This module loads the OpenTelemetry SDK: it is imported only if ``TelemetrySettings.otlp_endpoint`` is set. A thread
exports spans in batches; a slow or unavailable collector loses spans, but never delays a request.
"""

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from protocol import trace_names as names
from protocol.process import TelemetrySettings

EXPORT_PERIOD_S: Final = 1.0
SPANS_PER_EXPORT: Final = 512
FLUSH_LIMIT_S: Final = 3.0  # at shutdown
MAX_EVENTS: Final = 64  # of one span
MAX_ATTRIBUTE_CHARS: Final = 1024
TRACES_PATH: Final = "/v1/traces"

log = logging.getLogger(__name__)

_propagator = TraceContextTextMapPropagator()


class Tracing:
    """The tracer of one process, and its exporter."""

    def __init__(self, settings: TelemetrySettings, part: str, instance_id: str) -> None:
        """``part``: "gateway" or "worker"."""
        if settings.otlp_endpoint is None:
            raise ValueError("telemetry.otlp_endpoint is not set")
        resource = Resource.create(
            {
                **settings.resource_attributes,
                names.SERVICE_NAME: f"{settings.service_name}-{part}",
                names.SERVICE_INSTANCE: instance_id,
            }
        )
        self._provider = TracerProvider(
            resource=resource,
            sampler=ParentBasedTraceIdRatio(settings.sample_ratio),
            span_limits=SpanLimits(max_events=MAX_EVENTS, max_attribute_length=MAX_ATTRIBUTE_CHARS),
            shutdown_on_exit=False,
        )
        exporter_url = settings.otlp_endpoint.rstrip("/") + TRACES_PATH
        exporter = OTLPSpanExporter(
            endpoint=exporter_url,
            headers=settings.headers,
            timeout=settings.export_timeout_s,
        )
        processor = BatchSpanProcessor(
            exporter,
            max_queue_size=settings.max_queued_spans,
            schedule_delay_millis=EXPORT_PERIOD_S * 1000,
            max_export_batch_size=SPANS_PER_EXPORT,
            export_timeout_millis=settings.export_timeout_s * 1000,
        )
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("spillway")
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)  # a line per lost batch, not per try
        log.info("traces go to %s", exporter_url)

    async def close(self) -> None:
        """Export the remaining spans within ``FLUSH_LIMIT_S``; the rest is lost."""
        # Not in the loop's thread pool, which the process waits for at its end without a limit.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True, name="last spans")
        closing.start()
        await asyncio.to_thread(closing.join, FLUSH_LIMIT_S)


def context_of(headers: Mapping[str, str]) -> Context:
    """Return the context of W3C trace headers; empty if they are missing or malformed."""
    return _propagator.extract(headers, context=Context())


def traceparent_of(span: Span) -> str:
    """Return a span's context as a W3C ``traceparent``."""
    context = span.get_span_context()
    return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{context.trace_flags:02x}"


def trace_id_of(span: Span) -> str:
    """Return the trace id of a span as 32 hexadecimal digits."""
    return format_trace_id(span.get_span_context().trace_id)
