"""A whole replica on an event loop in a thread, without a server; its engine is in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
from fastapi import FastAPI

from lora_fs.sidecar.engine.protocol import Activity, Loaded
from lora_fs.sidecar.model import Policy, Record
from lora_fs.sidecar.reconcile.assembly import Assembly, assemble
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.routes import models
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation


class MemoryEngine:
    """Loads at once."""

    def __init__(self) -> None:
        self._adapters: dict[str, str] = {}

    async def loaded(self) -> Loaded:
        cards = {name: {"id": name, "root": path} for name, path in self._adapters.items()}
        return Loaded(({"id": "tiny"},), dict(self._adapters), cards)

    rereads, is_own = False, False

    async def version(self) -> str | None:
        return "0.32.0"

    async def holds_most(self) -> int | None:
        return None

    async def activity(self) -> Activity:
        return Activity(max_loras=8)

    def prefer(self, policies: Mapping[str, Policy]) -> None:
        pass

    async def load(self, name: str, path: str, record: Record, *, spare: bool = False) -> None:
        self._adapters[name] = path

    async def unload(self, name: str) -> None:
        self._adapters.pop(name, None)


class Running:
    """Runs until the process ends."""

    def __init__(self, root: Path, stage: Path, namespaces: tuple[str, ...], replica_id: str) -> None:
        self._settings = Settings(
            root=root,
            create=True,
            model="tiny",
            namespaces=namespaces,
            replica_id=replica_id,
            stage_dir=stage,
        )
        self._assembly: Assembly | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._process_s = self._loop_s = 0.0
        self._thread.start()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._assembly = await assemble(self._settings, Expectation(("tiny",)), MemoryEngine())
        app = FastAPI()
        app.include_router(models.router(self._assembly.replica, Admin(None)))
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://replica")
        async with self._assembly.running():
            await asyncio.Event().wait()

    def names(self) -> int:
        """How many it serves; waits until it has read the registry."""
        while self._assembly is None or not self._assembly.replica.readiness().ready:
            time.sleep(0.05)
        return len(self._assembly.replica.catalog().served)

    def list_models(self) -> int:
        """Ask its own route for the list; how many bytes it has."""

        async def ask() -> int:
            return len((await self._client.get("/v1/models")).content)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result()

    def took(self) -> dict[str, float]:
        """CPU seconds since this was asked last: of the process, and of the event loop in it."""
        assert self._thread.ident is not None
        process_s = time.process_time()
        loop_s = time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
        told = {"cpu_s": process_s - self._process_s, "loop_s": loop_s - self._loop_s}
        self._process_s, self._loop_s = process_s, loop_s
        return told
