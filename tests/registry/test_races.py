"""Many processes on one name; writers killed at random: nothing acknowledged is lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.model import AdapterKey, Scope
from lora_fs.sidecar.registry.layout import parse_generation
from lora_fs.sidecar.registry.store import Registry
from tests.registry.conftest import MakeAdapter
from tests.registry.test_operations import put

FORK = multiprocessing.get_context("fork")
KEY = AdapterKey("default", "tiny", "v1", "a1")


def _write(root: Path, acknowledgements: Path, stop: Event) -> None:
    registry = Registry(root)
    handle = os.open(acknowledgements, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    while not stop.is_set():

        def label(newest: Any) -> dict[str, Any]:
            spec = newest.spec.model_dump(mode="json")
            return {"spec": {**spec, "labels": {"by": f"{os.getpid()}-{random.random()}"}}}

        try:
            done = registry.append(registry.records(KEY), KEY.scope, label, writer="race")
        except Exception as error:
            if type(error).__name__ != "Conflict":
                raise
            continue
        os.write(handle, f"{done.generation} {done.token}\n".encode())


@pytest.mark.parametrize("kills", [4, pytest.param(500, marks=pytest.mark.long)])
def test_killed_writers_lose_nothing_acknowledged(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path, kills: int
) -> None:
    """Every acknowledged generation is there, once, with its writer's token."""
    put(registry, scope, make_adapter())
    stop = FORK.Event()
    root = registry.layout.root
    log = tmp_path / "acknowledged"

    def start() -> Any:
        writer = FORK.Process(target=_write, args=(root, log, stop))
        writer.start()
        return writer

    writers = [start(), start()]
    for _ in range(kills):
        before = log.stat().st_size if log.exists() else 0
        deadline = time.monotonic() + 30
        while (not log.exists() or log.stat().st_size == before) and time.monotonic() < deadline:
            time.sleep(random.uniform(0.001, 0.01))
        victim = random.randrange(2)
        os.kill(writers[victim].pid, signal.SIGKILL)
        writers[victim].join()
        writers[victim] = start()
    stop.set()
    for writer in writers:
        writer.join(60)
    acknowledged = [line.split() for line in log.read_text().splitlines()]
    generations = [int(generation) for generation, _ in acknowledged]
    assert len(generations) > kills
    assert len(set(generations)) == len(generations)
    folder = registry.layout.revision(scope, "v1")
    parsed = {p[1].generation: p[1] for n in os.listdir(folder) if (p := parse_generation(n))}
    for generation, token in acknowledged:
        assert registry.read(registry.records(KEY), parsed[int(generation)]).token == token
    assert registry.latest(registry.records(KEY))[0].generation >= max(generations)
