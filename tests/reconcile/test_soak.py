"""Adapters come and go for a long time, and nothing of them stays in the process but their tombstones.

The registry, the replica and its app are real, on a real filesystem; the engine is in memory.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from filelock import SoftFileLease

from lora_fs.sidecar.reconcile.assembly import assemble
from lora_fs.sidecar.registry.volume import leases
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import FakeEngine
from tests.registry.conftest import write_adapter

WARM_UP = 12
AT_ONCE = 4
REST_S = 30
SLACK = 8  # a pass under way, a thread pool that fills up to its bound; far below one an adapter
COUNTED = (asyncio.Lock, asyncio.Event, asyncio.Task, asyncio.Future, threading.Event, SoftFileLease)


@asynccontextmanager
async def replica(folder: Path, engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A running replica, asked through its own app."""
    source = write_adapter(folder / "source")
    settings = Settings(
        root=folder / "root",
        create=True,
        model="tiny",
        replica_id="soak",
        stage_dir=folder / "stage",
        allowed_sources=(str(source),),
        resync_s=0.2,
    )
    assembly = await assemble(settings, Expectation(("tiny",)), engine)
    app = create_app(
        assembly.replica,
        engine_url="http://127.0.0.1:1",
        admin=Admin(None, insecure="loopback"),
        background=assembly.running,
    )
    transport = httpx.ASGITransport(app=app)
    asking = httpx.AsyncClient(transport=transport, base_url="http://soak", timeout=120)
    async with app.router.lifespan_context(app), asking as client:
        async with asyncio.timeout(60):
            await ready(client)
        yield client


async def ready(client: httpx.AsyncClient) -> None:
    """Ask until the replica is."""
    if (await client.get("/readyz")).status_code != 200:
        await asyncio.sleep(0.05)
        await ready(client)


async def cycle(client: httpx.AsyncClient, source: Path, name: str) -> None:
    """Register, list, withdraw."""
    body = {"lora_name": name, "lora_path": str(source)}
    (await client.post("/v1/load_lora_adapter", json=body)).raise_for_status()
    assert name in (await client.get("/v1/models")).text
    (await client.post("/v1/unload_lora_adapter", json={"lora_name": name})).raise_for_status()


async def cycles(client: httpx.AsyncClient, source: Path, first: int, count: int) -> None:
    """So many, a few at once."""
    numbers = iter(range(first, first + count))

    async def work() -> None:
        for number in numbers:
            await cycle(client, source, f"soak-{number:05d}")

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def left(client: httpx.AsyncClient) -> dict[str, int]:
    """What there is of what should not grow, after two passes and a status file."""
    await asyncio.sleep(1.0)
    lines = (await client.get("/metrics")).text.splitlines()
    gc.collect()
    # By its type: a dead weak proxy, of which other libraries leave some, cannot be asked what it is.
    kinds = (type(one) for one in gc.get_objects())
    objects = Counter(kind.__name__ for kind in kinds if issubclass(kind, COUNTED))
    return {
        "metric series": sum(not line.startswith("#") for line in lines),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "leases remembered": len(leases._contended),
        **{kind.__name__: objects[kind.__name__] for kind in COUNTED},
    }


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What there is more of."""
    return {what: (before[what], number) for what, number in after.items() if number > before[what] + SLACK}


async def at_rest(client: httpx.AsyncClient, before: dict[str, int]) -> dict[str, int]:
    """What is left once nothing more goes: idle threads end after 10 s, and hold what they did last."""
    after = await left(client)
    for _ in range(REST_S):
        if not grown(before, after):
            break
        after = await left(client)
    return after


@pytest.mark.parametrize(
    "count", [24, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(14400)])]
)
def test_nothing_is_left_of_adapters_that_went(tmp_path: Path, count: int) -> None:
    """No metric series, task, thread, lock, lease or file descriptor, and no name in the engine."""

    async def soak() -> tuple[dict[str, int], dict[str, int], str]:
        async with replica(tmp_path, engine := FakeEngine()) as client:
            await cycles(client, tmp_path / "source", 0, WARM_UP)
            before = await left(client)
            await cycles(client, tmp_path / "source", WARM_UP, count)
            after = await at_rest(client, before)
            assert engine.adapters == {}
            return before, after, (await client.get("/metrics")).text

    before, after, metrics = asyncio.run(soak())
    assert "soak-" not in metrics
    assert grown(before, after) == {}
    assert not [entry for entry in os.listdir(tmp_path / "root/.leases") if entry.endswith(".lock")]
