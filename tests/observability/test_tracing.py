"""Spans when asked for, with the sender's as their parent; without, nothing is even imported."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from lora_fs.sidecar import tracing
from lora_fs.sidecar.errors import EngineRejected, InputError, TemporaryError, install_extra
from lora_fs.sidecar.logs import JsonLines
from lora_fs.sidecar.server.app import layers, passing
from tests.reconcile.conftest import Rig, make_rig
from tests.server.conftest import FakeReplica, replica
from tests.server.test_api import cut_off

__all__ = ["make_rig", "replica"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    yield exporter
    tracing.use(None)
    provider.shutdown()


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    """The one finished span of that name."""
    (found,) = [span for span in spans.get_finished_spans() if span.name == name]
    return found


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


@pytest.mark.anyio
async def test_a_load_is_a_part_of_the_request_that_waits_for_it(
    spans: InMemorySpanExporter, rig: Rig
) -> None:
    """The copy and the engine's load are spans of their own under the request's, the unload is one, too."""
    rig.volume.put("a")
    await rig.replica.reconcile()
    with tracing.span("request"):
        async with rig.replica.hold("a", 5):
            pass
    request = named(spans, "request")
    for name in ("stage", "load"):
        span = named(spans, name)
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id
        assert attributes(span) == {"lora_fs.adapter": "default/tiny/v1/a"}
    rig.volume.remove("a")
    await rig.settle()
    assert named(spans, "unload").end_time


@pytest.mark.anyio
async def test_an_error_is_told_by_its_kind_alone(spans: InMemorySpanExporter, rig: Rig) -> None:
    """Its text may quote what a client or another tenant wrote."""
    rig.engine.refuses["a-v1"] = EngineRejected("no: s3cret", reason="no")
    rig.volume.put("a")
    await rig.replica.reconcile()
    with pytest.raises(EngineRejected):
        async with rig.replica.hold("a", 5):
            pass
    span = named(spans, "load")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "EngineRejected"
    assert "s3cret" not in span.to_json()


@pytest.mark.parametrize(
    ("said", "answer", "status", "kind"),
    [
        (b"400 Bad\r\ncontent-length: 0\r\n\r\n", 400, StatusCode.UNSET, None),
        (b"500 Oops\r\ncontent-length: 0\r\n\r\n", 500, StatusCode.ERROR, None),
        (b"200 OK\r\ncontent-length: 9\r\n\r\n", 503, StatusCode.ERROR, "EngineUnavailable"),
        (b"200 OK\r\ncontent-length: 9\r\n\r\nthe be", 200, StatusCode.ERROR, "EngineUnavailable"),
    ],
    ids=["refused", "failed", "broken off before it began", "broken off within"],
)
def test_a_request_that_fails_is_an_error_of_its_span(
    spans: InMemorySpanExporter,
    replica: FakeReplica,
    said: bytes,
    answer: int,
    status: StatusCode,
    kind: str | None,
) -> None:
    """The span has the status that the client got. What the engine or the sidecar failed at is an error."""
    with suppress(httpx.RemoteProtocolError):
        assert cut_off(replica, b"HTTP/1.1 " + said).status_code == answer
    span = named(spans, "proxy")
    assert (span.status.status_code, attributes(span).get("error.type")) == (status, kind)
    assert attributes(span)["http.response.status_code"] == answer


@pytest.mark.parametrize(
    ("error", "answer", "status"),
    [
        (InputError("no"), 400, StatusCode.UNSET),
        (HTTPException(508, "no"), 508, StatusCode.ERROR),
        (TemporaryError("no replica is ready"), 503, StatusCode.ERROR),
    ],
    ids=["refused", "a loop", "none ready"],
)
def test_an_error_within_is_judged_by_its_answer(
    spans: InMemorySpanExporter, error: Exception, answer: int, status: StatusCode
) -> None:
    """What a gateway refuses is its client's error, and no failure of the gateway."""

    async def raises(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    app = Starlette(routes=[Mount("/x", raises, middleware=passing())], middleware=layers((), None, ()))
    assert TestClient(app).get("/x").status_code == answer
    span = named(spans, "proxy")
    assert span.status.status_code is status
    told = {"http.response.status_code": answer, "error.type": type(error).__name__}
    assert told.items() <= attributes(span).items()


def test_lines_name_their_span(spans: InMemorySpanExporter) -> None:
    """A line of JSON that is written in a span says which."""
    record = logging.LogRecord("x", logging.INFO, "", 0, "here", (), None)
    formatter = JsonLines(ids=tracing.ids)
    with tracing.span("outer"):
        inside = json.loads(formatter.format(record))
    outside = json.loads(formatter.format(record))
    assert inside["trace_id"] == f"{named(spans, 'outer').context.trace_id:032x}"
    assert "trace_id" not in outside


def test_nothing_is_imported_when_off() -> None:
    """The sidecar runs without the extra, and headers pass as they are."""
    program = """
import sys
for name in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.trace"):
    sys.modules[name] = None  # any import fails
from lora_fs.sidecar import tracing
import lora_fs.sidecar.cli.main, lora_fs.sidecar.server.app
tracing.start("off", "r")()
with tracing.span("x", carrier={}, a__b=1):
    tracing.note(a=1)
assert tracing.outgoing([("traceparent", "t")]) == [("traceparent", "t")]
assert tracing.ids() == {}
try:
    tracing.start("otlp", "r")
except Exception as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == f"LORA_FS_TRACES=otlp needs OpenTelemetry: {install_extra('otel')}"


def test_spans_leave_by_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of JSON a span, named as OTEL_SERVICE_NAME says; ending sends what is left."""
    program = """
from lora_fs.sidecar import tracing
end = tracing.start("console", "r7")
with tracing.span("stage", lora_fs__adapter="a"):
    pass
end()
"""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "fleet-a")
    ran = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    told = json.loads(ran.stdout)
    assert told["name"] == "stage"
    assert told["resource"]["attributes"]["service.name"] == "fleet-a"
    assert told["resource"]["attributes"]["service.instance.id"] == "r7"
