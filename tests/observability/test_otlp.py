"""Spans over the wire: a real sidecar, a real receiver of OTLP, an engine that hears the context."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from lora_fs.demo.process import Process, child_environment
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.demo.volume import LORA_FS
from lora_fs.sidecar import __version__, tracing
from lora_fs.sidecar.model import Scope as Served
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.observability.receiver import Answers, Receiver, receiver
from tests.registry.conftest import write_adapter
from tests.server.conftest import serving

STUB = Path(__file__).parents[2] / "benchmarks/stub_engine.py"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT, ENGINE_KEY, CALLERS_KEY, QUERY = "prompt-4711", "engine-key-0815", "callers-key-42", "signature-99"


@dataclass
class Rig:
    """A sidecar process before an engine; ``heard`` is the headers of each completion that reached it."""

    sidecar: Process
    http: httpx.Client
    heard: list[Headers]

    def complete(self, model: str = "sql", **headers: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {ENGINE_KEY}", "x-api-key": CALLERS_KEY, **headers}
        body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
        return self.http.post(f"/v1/completions?sig={QUERY}", json=body, headers=headers)

    def end(self, within_s: float) -> None:
        """As a pod's end does it."""
        self.sidecar.terminate()
        assert self.sidecar.wait_ended(timeout_s=within_s), self.sidecar.log_tail()


Start = Callable[..., Rig]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with one adapter in it."""
    root = tmp_path_factory.mktemp("volume")
    folder = write_adapter(tmp_path_factory.mktemp("source"))
    registry = Registry(root, create=True)
    wanted = Registration("sql", folder, folder.as_uri())
    ingest.register(registry, Served("default", "tiny"), wanted, Expectation(), writer="test")
    registry.close()
    return root


@contextmanager
def engine() -> Iterator[tuple[str, list[Headers]]]:
    """The stub that the benchmarks use, and the headers of what it is asked to complete."""
    spec = importlib.util.spec_from_file_location("stub_engine", STUB)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stub, heard = module.StubEngine().app(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/v1/completions":
            heard.append(Headers(scope=scope))
        await stub(scope, receive, send)

    with serving(app) as url:
        yield url, heard


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Iterator[Start]:
    """``start(endpoint, **OTEL_…)``: a ready ``lora-fs sidecar`` that sends its spans there."""
    with ExitStack() as stack:

        def run(endpoint: str, **environment: str) -> Rig:
            url, heard = stack.enter_context(engine())
            process = start_sidecar(
                "sidecar",
                url,
                log=tmp_path / "sidecar.log",
                env={
                    "LORA_FS_ROOT": str(root),
                    "LORA_FS_MODEL": "tiny",
                    "LORA_FS_STAGE_DIR": str(tmp_path / "stage"),
                    "LORA_FS_REPLICA_ID": "pod-7",
                    "LORA_FS_ENGINE_API_KEY": ENGINE_KEY,
                    "LORA_FS_TRACES": "otlp",
                    "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
                    "NO_PROXY": "127.0.0.1",
                    **environment,
                },
            )
            stack.callback(process.stop)
            process.wait_ready("/readyz")
            http = httpx.Client(base_url=process.url, trust_env=False, timeout=60)
            return Rig(process, stack.enter_context(http), heard)

        yield run


@pytest.fixture
def takes() -> Iterator[Receiver]:
    with receiver() as one:
        yield one


def test_a_requests_spans_arrive(start: Start, takes: Receiver) -> None:
    """Named, of this replica, in the caller's trace, which the engine is told; nothing secret among them."""
    headers = "authorization=Basic%20b3RlbA"
    rig = start(takes.url, OTEL_BSP_SCHEDULE_DELAY="100", OTEL_EXPORTER_OTLP_HEADERS=headers)
    answer = rig.complete(traceparent=f"00-{TRACE}-{CALLER}-01", tracestate="vendor=1", baggage="tier=gold")
    assert answer.status_code == 200
    takes.wait_for(lambda: takes.spans("proxy"))
    (proxy,) = takes.spans("proxy")
    assert proxy.resource["service.name"] == "lora-fs"
    assert proxy.resource["service.version"] == __version__
    assert proxy.resource["service.instance.id"] == "pod-7"
    assert (proxy.trace_id, proxy.parent_id) == (TRACE, CALLER)
    assert proxy.span.kind == Span.SPAN_KIND_SERVER
    assert proxy.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "lora_fs.adapter": "default/tiny/v1/sql",
        "http.response.status_code": 200,
    }
    (heard,) = rig.heard
    assert heard["traceparent"] == f"00-{TRACE}-{proxy.span_id}-01"
    assert (heard["tracestate"], heard["baggage"]) == ("vendor=1", "tier=gold")
    for name in ("stage", "load"):
        (span,) = takes.spans(name)
        assert (span.trace_id, span.parent_id) == (TRACE, proxy.span_id)
        assert span.attributes == {"lora_fs.adapter": "default/tiny/v1/sql"}
    (one, *_) = takes.spans("reconcile")
    assert one.attributes == {"lora_fs.replica": "pod-7"}
    assert takes.headers[0]["authorization"] == "Basic b3RlbA"
    sent = b"".join(takes.bodies)
    for secret in (PROMPT, ENGINE_KEY, CALLERS_KEY, QUERY, "b3RlbA", "gold"):
        assert secret.encode() not in sent


def test_an_error_is_told_and_the_last_spans_arrive(start: Start, takes: Receiver) -> None:
    """What a pod did last is sent when it ends; of an error its kind, not what the client wrote."""
    named = {"OTEL_SERVICE_NAME": "fleet-a", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=prod"}
    rig = start(takes.url, OTEL_BSP_SCHEDULE_DELAY="60000", **named)
    assert rig.complete("no-such-name").status_code == 404
    assert takes.asked == 0
    rig.end(within_s=20)
    (proxy,) = takes.spans("proxy")
    assert proxy.resource["service.name"] == "fleet-a"
    assert proxy.resource["deployment.environment.name"] == "prod"
    assert (proxy.parent_id, proxy.attributes["error.type"]) == ("", "NotFound")
    assert proxy.span.status.code == Status.STATUS_CODE_UNSET
    assert not any(b"no-such-name" in body for body in takes.bodies)


def test_who_does_not_sample_is_heeded(start: Start, takes: Receiver) -> None:
    """A caller whose trace is not kept makes no span here, and the engine is told so."""
    rig = start(takes.url, OTEL_BSP_SCHEDULE_DELAY="100")
    assert rig.complete(traceparent=f"00-{TRACE}-{CALLER}-00").status_code == 200
    assert rig.complete().status_code == 200
    takes.wait_for(lambda: takes.spans("proxy"))
    assert [one.trace_id == TRACE for one in takes.spans("proxy")] == [False]
    first, second = (one["traceparent"].split("-") for one in rig.heard)
    sampled = [int(one[3], 16) & 1 for one in (first, second)]
    assert ([first[1], second[1]], sampled) == ([TRACE, takes.spans("proxy")[0].trace_id], [0, 1])


@pytest.mark.parametrize("answers", ["refuses", "hangs", "down"])
def test_a_receiver_that_fails_costs_nothing(start: Start, answers: Answers | str) -> None:
    """Requests are answered while it does, none waits for it, and the sidecar ends in its time."""
    with ExitStack() as stack:
        if answers == "down":
            with socket.create_server(("127.0.0.1", 0)) as closed:
                endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        else:
            one = stack.enter_context(receiver(answers))  # type: ignore[arg-type]
            endpoint = one.url
        rig = start(endpoint, OTEL_BSP_SCHEDULE_DELAY="50", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="2")
        rig.complete()
        if answers != "down":
            one.wait_for(lambda: one.asked)
        took = []
        for _ in range(50):
            began = time.monotonic()
            assert rig.complete().status_code == 200
            took.append(time.monotonic() - began)
        assert max(took) < 5  # an export takes 10 s to give up
        assert len(rig.heard) == 51
        rig.end(within_s=tracing.END_S + 12)  # all that waits would take 30 s
        log = rig.sidecar.log_text()
        assert "Traceback" not in log
        for secret in (PROMPT, ENGINE_KEY, CALLERS_KEY, QUERY):
            assert secret not in log


@pytest.mark.parametrize(
    "variable",
    [
        {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4096"},
        {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "many"},
        {"OTEL_PROPAGATORS": "tracecontext,not-installed"},
    ],
)
def test_a_variable_that_is_not_understood(root: Path, variable: dict[str, str]) -> None:
    """The start refuses it with the reason, as it refuses a setting of lora-fs's own."""
    environment = child_environment(
        {
            "LORA_FS_ROOT": str(root),
            "LORA_FS_MODEL": "tiny",
            "LORA_FS_TRACES": "otlp",
            **variable,
        }
    )
    ran = subprocess.run(
        [LORA_FS, "sidecar"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode != 0
    assert "look at the OTEL_* variables" in ran.stderr
    assert "Traceback" not in ran.stderr
