"""A receiver of OTLP over HTTP, as a collector is one, that reads with OpenTelemetry's own types."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_S = 60

Answers = Literal["takes", "refuses", "hangs"]


@dataclass
class Received:
    """A span as it came: the resource and the span, attributes by name."""

    span: Span
    resource: dict[str, object]
    attributes: dict[str, object]

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def span_id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        return self.span.parent_span_id.hex()


@dataclass
class Receiver:
    """What it does with a request, and what came: ``bodies`` unpacked, ``headers`` of each."""

    answers: Answers = "takes"
    url: str = ""
    asked: int = 0
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    news: threading.Condition = field(default_factory=threading.Condition)

    def spans(self, name: str | None = None) -> list[Received]:
        """All that came so far, or those of a name."""
        found = []
        for body in list(self.bodies):
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = _mapping(of_resource.resource.attributes)
                for of_scope in of_resource.scope_spans:
                    found += [Received(one, resource, _mapping(one.attributes)) for one in of_scope.spans]
        return [one for one in found if name in (None, one.span.name)]

    def wait_for(self, what: Callable[[], object]) -> None:
        """Until ``what`` holds, which is looked at when something came."""
        with self.news:
            assert self.news.wait_for(lambda: bool(what()), WAIT_S), (self.asked, len(self.bodies))

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """One request."""
        body = request.rfile.read(int(request.headers["content-length"]))
        with self.news:
            self.asked += 1
            self.news.notify_all()
        if self.answers == "hangs":
            self.over.wait()
            return
        if self.answers == "refuses":
            request.send_error(500)
            return
        packed = request.headers.get("content-encoding") == "gzip"
        with self.news:
            assert request.path == "/v1/traces"
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            self.bodies.append(gzip.decompress(body) if packed else body)
            self.news.notify_all()
        answer = ExportTraceServiceResponse().SerializeToString()
        request.send_response(200)
        request.send_header("content-type", "application/x-protobuf")
        request.send_header("content-length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)


def _mapping(attributes: Iterator[KeyValue]) -> dict[str, object]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in attributes}


@contextmanager
def receiver(answers: Answers = "takes") -> Iterator[Receiver]:
    """One on loopback; at the end whoever waits is let go."""
    one = Receiver(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            one.handle(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    one.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield one
    finally:
        one.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
