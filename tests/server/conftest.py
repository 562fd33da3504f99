"""A fake engine on a real socket, and the sidecar's app in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from lora_fs.sidecar.errors import NotFound
from lora_fs.sidecar.model import AdapterStatus, Condition, Download, JsonObject, Phase, RevisionUsage
from lora_fs.sidecar.reconcile.admin.uploads import Upload
from lora_fs.sidecar.reconcile.assembly import assemble
from lora_fs.sidecar.reconcile.catalog import Catalog, Served, Trial
from lora_fs.sidecar.reconcile.replica import Replica
from lora_fs.sidecar.reconcile.residents.engine_state import COUNTERS
from lora_fs.sidecar.reconcile.telemetry.conditions import Since
from lora_fs.sidecar.reconcile.telemetry.durations import Durations
from lora_fs.sidecar.reconcile.telemetry.events import EventLog
from lora_fs.sidecar.reconcile.telemetry.usage import UsageReport
from lora_fs.sidecar.registry.lifecycle.ingest import Registered
from lora_fs.sidecar.registry.lifecycle.undo import Made
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.connection import configured
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.ports import Loaded, LoadRequest, Readiness
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation, Report
from tests.reconcile.conftest import FakeEngine as InMemory
from tests.reconcile.test_plan import RECORD


@dataclass
class FakeReplica:
    """A replica port over a few names; counts its holds, its look-ups and the statuses it builds.

    ``phases`` tells the phase of names that are not simply Ready; only Ready ones are in the engine.
    """

    names: tuple[str, ...] = ("a1",)
    phases: Mapping[str, Phase] = field(default_factory=dict)
    replica_id: str = "fake"
    model: str = "tiny"
    engine_version: str | None = "0.33.0"
    namespaces: tuple[str, ...] = ("default",)
    holds: Counter[str] = field(default_factory=Counter)
    lookups: int = 0
    looks: int = 0
    built: int = 0
    version: int = 1
    ready: bool = True
    unread: Exception | None = None
    fetches: Mapping[str, Download] = field(default_factory=dict)
    uploaded: list[tuple[str, bytes]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    refusal: Exception | None = None
    load_refusal: Exception | None = None
    users: list[str | None] = field(default_factory=list)
    answers: list[tuple[str, int]] = field(default_factory=list)
    testers: tuple[str, ...] = ()
    trials: Mapping[str, Trial] = field(default_factory=dict)
    since: Since = field(default_factory=Since)
    events: EventLog = field(default_factory=EventLog)
    administration: Any = None  # tests of its routes have a real one
    loads: Durations = field(default_factory=Durations)
    _catalog: tuple[int, int, Catalog] | None = None

    def catalog(self) -> Catalog:
        if self._catalog is None or self._catalog[:2] != (self.version, id(self.names)):
            served = {name: Served(name, RECORD) for name in sorted(self.names)}
            self._catalog = self.version, id(self.names), Catalog(self.version, served, trials=self.trials)
        return self._catalog[2]

    def lookup(self, name: str) -> Served | None:
        self.lookups += 1
        return self.catalog().served.get(name)

    def check_read(self) -> None:
        if self.unread is not None:
            raise self.unread

    def choose(self, served: Served, user: str | None) -> Served:
        self.users.append(user)
        if user not in self.testers:
            return served
        record = RECORD.model_copy(update={"revision": "v2"})
        return Served(f"{served.name}@v2", record)

    def answered(self, served: Served, status: int) -> None:
        self.answers.append((served.record.revision, status))

    def usage(self) -> UsageReport:
        used = RevisionUsage(requests=5, errors_4xx=2, errors_5xx=1, loads=2, load_seconds=0.5)
        return UsageReport({RECORD.key._replace(name=name): used for name in self.names[:512]})

    def conditions(self, name: str, one: AdapterStatus) -> tuple[Condition, ...]:
        return self.since.conditions(name, one)

    def base_cards(self) -> tuple[JsonObject, ...]:
        return ({"id": "tiny", "object": "model", "created": 1, "owned_by": "vllm"},)

    def passes_through(self, name: str) -> bool:
        return name == "tiny"

    def kept_to(self, name: str) -> str | None:
        return None

    @asynccontextmanager
    async def hold(self, name: str, timeout_s: float) -> AsyncIterator[str]:
        if self.refusal is not None:
            raise self.refusal
        self.holds[name] += 1
        try:
            yield name
        finally:
            self.holds[name] -= 1

    def forget(self, engine_name: str) -> None:
        self.forgotten.append(engine_name)

    def engine_failed(self, problem: str | None) -> None:
        self.ready = self.ready and problem is None
        self.looks += 1

    async def changed(self) -> None:
        await asyncio.Event().wait()  # nothing ever does

    async def load_adapter(self, request: LoadRequest, *, writer: str) -> Loaded:
        if self.load_refusal is not None:
            raise self.load_refusal
        return Loaded(RECORD, Made(revision=RECORD.revision))

    async def unload_adapter(self, lora_name: str, *, writer: str) -> None:
        if lora_name not in self.names:
            raise NotFound(f"The lora adapter '{lora_name}' cannot be found.")

    def phase(self, name: str) -> Phase:
        return self.phases.get(name, Phase.READY)

    def status(self, name: str) -> AdapterStatus:
        self.built += 1
        namespace = self.catalog().served[name].record.namespace
        return AdapterStatus(key=(namespace, "tiny", "v1", name), generation=1, phase=self.phase(name))

    def notable(self) -> tuple[Mapping[str, AdapterStatus], Mapping[str, int]]:
        told = {name: self.status(name) for name in self.names if self.phase(name) is not Phase.UNLOADED}
        return told, Counter(self.phase(name) for name in self.names)

    def residency(self) -> Mapping[str, JsonObject]:
        return {
            name: {
                "in_flight": self.holds[name],
                "idle_s": 0.0,
                "path": "/s",
                "engine_name": name,
                "tier": None,
            }
            for name in self.names
            if self.phase(name) is Phase.READY
        }

    def downloads(self) -> Mapping[str, Download]:
        return self.fetches

    async def upload(self, upload: Upload, *, writer: str) -> Registered:
        self.uploaded = [(name, chunk) async for name, chunk in upload.files]
        return Registered(RECORD, True, Report((), None, None, ()))

    def staged(self, served: Served) -> bool:
        return self.phase(served.name) is Phase.READY

    def capacity(self) -> int | None:
        return 4

    def readiness(self) -> Readiness:
        return Readiness(self.ready, () if self.ready else ("EngineUnavailable: it is down",))

    def counters(self) -> Mapping[str, float]:
        return {**dict.fromkeys(COUNTERS, 0), "loads_total": 3}

    def durations(self) -> Mapping[str, Durations]:
        return {f"{kind}_seconds": self.loads for kind in ("pass", "stage", "load", "unload")}

    def tiers(self) -> Mapping[str, int]:
        return {"disk": 2, "engine": 1}

    def figures(self) -> Mapping[str, float]:
        return {"loads": 3, "tier_disk": 2, "requests_running": 2, "requests_waiting": 1}


class FakeEngine:
    """Answers /v1/completions; a streamed answer waits for ``go`` between its two chunks."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.left = threading.Event()
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.missing: set[str] = set()
        self.paths: list[bytes] = []
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/{path:path}", self.anything, methods=["GET", "POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def anything(self, request: Request) -> Response:
        query = request.scope["query_string"]
        self.paths.append(request.scope["raw_path"] + (b"?" + query if query else b""))
        if request.url.path.endswith("completions/"):  # as vLLM's routes do
            return RedirectResponse(str(request.url).removesuffix("/"))
        return JSONResponse({"path": request.url.path})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if body.get("model") in self.missing:
            message = f"The model `{body['model']}` does not exist."
            return JSONResponse(
                {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}, 404
            )
        if "previous_response_id" in body:
            return JSONResponse({"error": {"message": "Response with id 'x' not found.", "code": 404}}, 404)
        if not body.get("stream"):
            return JSONResponse({"model": body.get("model"), "choices": []})
        return StreamingResponse(self.chunks(), media_type="text/event-stream")

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            yield b"data: one\n\n"
            await asyncio.to_thread(self.go.wait, 60)
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise


def until(condition: Callable[[], object], what: str) -> None:
    """Wait, bounded, for something another thread makes true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.005)


@contextlib.contextmanager
def serving(app: Any, replica: Replica | None = None, *, send_timeout_s: float = 60.0) -> Iterator[str]:
    """Run an ASGI app on a free port of loopback; yields its URL.

    Args:
        replica: what the app starts in its background; the URL is yielded once it is ready.
    """
    config = configured(app, send_timeout_s=send_timeout_s, host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started or (replica is not None and not replica.readiness().ready):
        thread.join(0.01)
        assert thread.is_alive(), "the server ended before it started"
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive(), "the server did not end: it would take time from every later test"


@contextlib.contextmanager
def tenants(
    tmp_path: Path,
    admin: Admin,
    engine: InMemory | None = None,
    stage: str = "stage",
    engine_url: str = "http://127.0.0.1:9",
) -> Iterator[httpx.Client]:
    """A client of a sidecar of ``team-a`` and ``team-b``, whose volume is ``tmp_path/volume``.

    Args:
        engine: what it reads and loads into. engine_url: where it sends requests on to.
        stage: its stage folder, in ``tmp_path``.
    """
    settings = Settings(
        root=tmp_path / "volume",
        create=True,
        model="tiny",
        namespaces=("team-a", "team-b"),
        stage_dir=tmp_path / stage,
        replica_id="pod",
        allowed_sources=(str(tmp_path / "sources"),),
        resync_s=0.2,
    )
    assembly = asyncio.run(assemble(settings, Expectation(), engine or InMemory()))
    app = create_app(assembly.replica, engine_url=engine_url, admin=admin, background=assembly.running)
    with (
        serving(app, assembly.replica) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engine_url(engine: FakeEngine) -> Iterator[str]:
    with serving(engine.app) as url:
        yield url
        engine.go.set()  # a stream nobody reads any more ends at once


@pytest.fixture
def replica() -> FakeReplica:
    return FakeReplica()
