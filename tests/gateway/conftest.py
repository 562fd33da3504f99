"""A fleet of real sidecar processes, each with an engine's stand-in, and a gateway's process before them.

They are forked from one process that has imported them, unless a test says ``fleet.start = spawn``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from lora_fs.demo.process import LOCAL, Process, free_port
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.demo.volume import LORA_FS
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.gateway.forks import Forks, shared
from tests.registry.conftest import write_adapter

SCOPE = Scope("default", "tiny")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def stub() -> ModuleType:
    """Import the benchmarks' stand-in of an engine, which is in no package."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module("paced_engine")


@dataclass
class Stubs:
    """The processes of one fleet.

    ``start``: how each is started, as ``spawn`` does. ``env``: more settings of its sidecars.
    """

    root: Path
    run_dir: Path
    opened: ExitStack
    start: Callable[..., Process]
    sidecars: list[Process] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        *,
        port: int | None = None,
        engine: str | None = None,
        env: dict[str, str] | None = None,
        **pace: float,
    ) -> Process:
        """Start a replica; return when it is ready."""
        number, module = len(self.sidecars), stub()
        if engine is None:
            log = self.run_dir / f"engine-{number}.log"
            engine = self.opened.enter_context(
                module.paced_engine(log, module.Pace(**pace), start=self.start)
            )
        self.engines.append(engine)
        port = port or free_port()
        process = start_sidecar(
            f"sidecar-{number}",
            engine,
            *("--replica-id", f"r{number}", "--stage-dir", str(self.run_dir / f"stage-{number}")),
            *("--max-loaded", "4"),
            log=self.run_dir / f"sidecar-{number}.log",
            env={
                "LORA_FS_ROOT": str(self.root),
                "LORA_FS_MODEL": "tiny",
                "LORA_FS_ADVERTISE_URL": f"http://127.0.0.1:{port}",
                **self.env,
                **(env or {}),
            },
            port=port,
            start=self.start,
        )
        self.sidecars.append(process)
        self.opened.callback(process.stop)
        process.wait_ready("/readyz")
        return process

    def gateway(self, *options: str, **env: str) -> Process:
        """Start a gateway; by default it finds the replicas in the registry."""
        port = free_port()
        command = [LORA_FS, "gateway", "--host", "127.0.0.1", "--port", str(port), *options]
        found = {} if options else {"LORA_FS_ROOT": str(self.root), "LORA_FS_MODEL": "tiny"}
        log, url = self.run_dir / f"gateway-{port}.log", f"http://127.0.0.1:{port}"
        process = self.start("gateway", command, log=log, url=url, env=found | env)
        self.opened.callback(process.stop)
        return process

    def counts(self, number: int) -> dict[str, int]:
        """What the engine of a replica counted."""
        told: dict[str, int] = httpx.get(f"{self.engines[number]}/counts", **LOCAL).json()
        return told


@asynccontextmanager
async def stand_in(metadata: Handler, port: int | None = None, **posts: Handler) -> AsyncIterator[str]:
    """Answer for a replica; yields its URL. ``posts``: by path, in which ``all`` stands for every one."""
    app, port = web.Application(), port or free_port()
    app.router.add_get("/metadata", metadata)
    for path, post in posts.items():
        app.router.add_post("/{path:.*}" if path == "all" else f"/{path}", post)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


@contextmanager
def stubs(folder: Path, forks: Forks) -> Iterator[Stubs]:
    """An empty fleet on a registry with the adapters a0 to a7."""
    root, source = folder / "volume", folder / "source"
    write_adapter(source)
    with closing(Registry(root, create=True)) as registry:
        for number in range(8):
            wanted = Registration(f"a{number}", source, source.as_uri())
            ingest.register(registry, SCOPE, wanted, Expectation(("tiny",)), writer="test")
    with ExitStack() as opened:
        yield Stubs(root, folder / "run", opened, forks.start)


@pytest.fixture(scope="session")
def forks() -> Forks:
    return shared()


@pytest.fixture
def fleet(tmp_path: Path, forks: Forks) -> Iterator[Stubs]:
    """One fleet for a test."""
    with stubs(tmp_path, forks) as one:
        yield one


@pytest.fixture
def complete() -> Iterator[Callable[..., httpx.Response]]:
    """Ask for one completion."""
    with httpx.Client(timeout=60) as client:

        def ask(url: str, model: str, **fields: Any) -> httpx.Response:
            body = {"model": model, "prompt": "hello", **fields}
            return client.post(f"{url}/v1/completions", json=body)

        yield ask
