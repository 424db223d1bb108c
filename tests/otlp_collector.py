"""A small OpenTelemetry collector: takes spans by OTLP over HTTP and remembers them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class TakenSpan:
    """One span as it came."""

    service: str
    resource: dict[str, Any]
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str  # empty: none
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[str, ...]  # span ids
    events: tuple[tuple[str, dict[str, Any]], ...]
    is_error: bool


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value") or ""
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def spans_of(body: bytes) -> Iterator[TakenSpan]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = _attributes(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield TakenSpan(
                    service=resource["service.name"],
                    resource=resource,
                    name=span.name,
                    kind=span.kind,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    links=tuple(link.span_id.hex() for link in span.links),
                    events=tuple((event.name, _attributes(event.attributes)) for event in span.events),
                    is_error=span.status.code == 2,
                )


@dataclass
class Collector:
    """Exports taken; ``hold`` keeps every export unanswered until it is set."""

    url: str
    spans: list[TakenSpan] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    hold: threading.Event | None = None

    def named(self, name: str) -> list[TakenSpan]:
        return [span for span in self.spans if span.name == name]

    def of(self, request_id: str) -> list[TakenSpan]:
        return [span for span in self.spans if span.attributes.get("spillway.request_id") == request_id]

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        self.paths.append(path)
        self.headers.append(headers)
        self.bodies.append(body)
        self.spans.extend(spans_of(body))
        if self.hold is not None:
            self.hold.wait(60)


@contextmanager
def running_collector() -> Iterator[Collector]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(lambda: collector))
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        if collector.hold is not None:
            collector.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(collector: Callable[[], Collector]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            collector().take(self.path, headers, body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    return Handler
