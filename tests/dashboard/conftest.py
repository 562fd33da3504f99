"""A real sidecar in this process, over a real registry, whose engine alone is in memory."""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import uvicorn

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.cli.serve.sidecar import Server
from lora_fs.sidecar.model import AdapterStatus, Download, Phase, ReplicaStatus, RevisionUsage, Scope
from lora_fs.sidecar.model.evaluation import Evaluation, Measured
from lora_fs.sidecar.model.gates import parse
from lora_fs.sidecar.reconcile.assembly import assemble
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store import evaluations
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.dashboard.fleet import Fleet
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import FakeEngine
from tests.registry.conftest import write_adapter

SCOPE = Scope("default", "tiny")
HERE = "here"
HEARTBEAT_S = 5.0


@dataclass
class Live:
    """A sidecar that answers at ``url``, and the volume under it."""

    url: str
    root: Path
    registry: Registry
    sources: Path
    engine: FakeEngine
    reports: dict[str, ReplicaStatus] = field(default_factory=dict)

    def register(self, name: str, scope: Scope = SCOPE, labels: Mapping[str, str] | None = None) -> None:
        """As the command does."""
        folder = write_adapter(self.sources / name, seed=hash(name) % 1000)
        wanted = Registration(name, folder, folder.as_uri(), labels=labels or {})
        ingest.register(self.registry, scope, wanted, Expectation(("tiny",)), writer="test")

    def revise(self, name: str, *, activate: bool = True, seed: int = 1) -> None:
        """Register other bytes under a name that is there: its next revision."""
        folder = write_adapter(self.sources / f"{name}-again{seed}", seed=hash(name) % 1000 + seed)
        wanted = Registration(name, folder, folder.as_uri(), activate=activate)
        ingest.register(self.registry, SCOPE, wanted, Expectation(("tiny",)), writer="another")

    def evaluate(self, name: str, revision: str, rate: float, gate: str, **more: Any) -> Path:
        """Keep an evaluation as the command does; returns its file."""
        record = release.chosen_of(self.registry, SCOPE, name, revision)[revision]
        figures = {"pass_rate": rate, "cases": 200.0}
        unmet = parse(gate).unmet(figures, {})
        evaluation = Evaluation(
            namespace=SCOPE.namespace,
            model=SCOPE.model,
            name=name,
            data="cases.jsonl",
            data_sha256=64 * "0",
            cases=200,
            concurrency=4,
            measured=Measured(revision=revision, digest=record.spec.digest, figures=figures),
            gate=gate,
            passed=not unmet,
            unmet=unmet,
            **more,
        )
        evaluations.write(self.registry, evaluation)
        return self.registry.layout.evaluation(record.key)

    def unregister(self, name: str, scope: Scope = SCOPE) -> None:
        """As the command does."""
        release.unregister(self.registry, scope, name, all_revisions=True, writer="test")

    @contextmanager
    def heartbeats(self, *alive: str) -> Iterator[None]:
        """Inside the block the other replicas live: each rewrites its last report, as a real one does.

        Args:
            alive: these alone; all of them if none is named.
        """
        over = threading.Event()

        def beat() -> None:
            while not over.wait(HEARTBEAT_S):
                for replica, status in list(self.reports.items()):
                    if alive and replica not in alive:
                        continue
                    now = datetime.datetime.now(datetime.UTC).isoformat()
                    again = status.model_copy(update={"updated_at": now})
                    atomic.replace(Layout(self.root).replica(replica), seal(again))

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def report(
        self,
        replica: str,
        phases: Mapping[str, Phase],
        message: str = "",
        *,
        conditions: tuple[str, ...] = (),
        downloads: Mapping[str, Download] | None = None,
        age_s: float = 0,
        engine: str = "ready",
        since: Mapping[str, str] | None = None,
        in_flight: int = 0,
        scope: Scope = SCOPE,
        usage: Mapping[str, RevisionUsage] | None = None,
        usage_left_out: int = 0,
        effect: Literal["some", "none"] | None = None,
    ) -> None:
        """Write what another replica would."""
        at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_s)
        status = ReplicaStatus(
            replica=replica,
            model=scope.model,
            namespaces=(scope.namespace,),
            engine=engine,
            updated_at=at.isoformat(),
            adapters={
                name: AdapterStatus(
                    key=(*scope, "v1", name.partition("@")[0]),
                    generation=1,
                    phase=phase,
                    message=message,
                    effect=effect,
                )
                for name, phase in phases.items()
            },
            conditions=conditions,
            conditions_since=dict(since or {}),
            downloads=dict(downloads or {}),
            usage=dict(usage or {}),
            usage_left_out=usage_left_out,
            figures={"tier_disk": 7, "request_hits": 90, "request_misses": 10, "in_flight": in_flight},
        )
        layout = Layout(self.root)
        layout.replicas.mkdir(exist_ok=True)
        atomic.replace(layout.replica(replica), seal(status))
        self.reports[replica] = status


@contextmanager
def sidecar(folder: Path, admin: Admin | None = None, **given: object) -> Iterator[Live]:
    """Start one, and end it."""
    root = folder / "volume"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "UNLINK_AFTER_S", 0.0)
        registry = Registry(root, create=True)
    settings = Settings(root=root, model="tiny", replica_id=HERE, stage_dir=folder / "stage", **given)
    servers: list[uvicorn.Server] = []
    engine = FakeEngine()

    async def serve() -> None:
        assembly = await assemble(settings, Expectation(("tiny",)), engine)
        app = create_app(
            assembly.replica,
            engine_url="http://127.0.0.1:9",
            admin=admin or Admin(None),
            background=assembly.running,
            fleet=Fleet(Layout(root)),
        )
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
        servers.append(Server(config, app.state.end))
        await servers[0].serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    while not (servers and servers[0].started):
        thread.join(0.01)
        assert thread.is_alive(), "the sidecar ended before it started"
    port = servers[0].servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, **LOCAL) as client:
        while client.get("/readyz").status_code != httpx.codes.OK:
            threading.Event().wait(0.02)
    try:
        yield Live(url, root, registry, folder / "sources", engine)
    finally:
        servers[0].should_exit = True
        thread.join(60)
        registry.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    with sidecar(tmp_path) as one:
        yield one
