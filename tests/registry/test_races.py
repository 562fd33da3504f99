"""Two processes on one name; writers killed at random: nothing acknowledged is lost."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import Conflict, OverQuota
from lora_fs.sidecar.model import AdapterKey, Quota, Scope
from lora_fs.sidecar.registry.format.layout import parse_generation
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.store import quota
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume.leases import Turn
from tests.registry.conftest import MakeAdapter
from tests.registry.test_operations import put, served

FORK = multiprocessing.get_context("fork")
KEY = AdapterKey("default", "tiny", "v1", "a1")
GIVE_UP_S = 30.0


def _write(root: Path, acknowledgements: Path) -> None:
    """Write until killed; no lock is shared with the parent, for a killed holder would keep it."""
    registry = Registry(root)
    handle = os.open(acknowledgements, os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def label(newest: Any) -> dict[str, Any]:
        spec = newest.spec.model_dump(mode="json")
        return {"spec": {**spec, "labels": {"by": f"{os.getpid()}-{random.random()}"}}}

    while True:
        try:
            done = registry.append(registry.records(KEY), label, writer="race")
        except Conflict:
            continue
        os.write(handle, f"{done.generation} {done.token}\n".encode())


@pytest.mark.parametrize("kills", [8, pytest.param(600, marks=pytest.mark.long)])
def test_killed_writers_lose_nothing_acknowledged(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, tmp_path: Path, kills: int
) -> None:
    """Every acknowledged generation is there, once, with its writer's token; every file can be read."""
    put(registry, scope, make_adapter())
    root = registry.layout.root
    log = tmp_path / "acknowledged"
    log.touch()

    def start() -> Any:
        writer = FORK.Process(target=_write, args=(root, log), daemon=True)
        writer.start()
        return writer

    def kill(writer: Any) -> None:
        assert writer.is_alive(), "a writer ended by itself"
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()

    writers = [start(), start()]
    for _ in range(kills - len(writers)):
        before, deadline = log.stat().st_size, time.monotonic() + GIVE_UP_S
        while log.stat().st_size == before:
            assert time.monotonic() < deadline, "nobody can write any more"
            time.sleep(random.uniform(0.0005, 0.01))
        victim = random.randrange(2)
        kill(writers[victim])
        writers[victim] = start()
    for writer in writers:
        kill(writer)
    acknowledged = dict(line.split() for line in log.read_text().splitlines())
    assert len(acknowledged) == len(log.read_text().splitlines()) >= kills - 2
    names = os.listdir(registry.layout.revision(scope, "v1"))
    written = [p[1] for name in names if (p := parse_generation(name))]
    bodies = {str(g.generation): registry.read(registry.records(KEY), g) for g in written}
    assert {generation: bodies[generation].token for generation in acknowledged} == acknowledged
    assert sorted(map(int, bodies)) == list(range(1, len(bodies) + 1))
    print(f"{kills} kills, {len(acknowledged)} acknowledged, 0 lost, {len(bodies)} written, 0 unreadable")


def test_over_the_quota_beside_another(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer withdraws its record that is over the quota, unless another writer's registration of the
    same bytes was acknowledged meanwhile."""
    registry.accounts.write(Quota(namespace="default", adapters=1, writer="test", updated_at=""))
    late = Registry(registry.layout.root)
    publish, source = late.append, make_adapter("second", 21)

    @contextmanager
    def broken(path: Path, *, wait_s: float) -> Iterator[Turn]:
        yield Turn(held=True)

    def beside(*arguments: Any, **options: Any) -> Any:
        """Another host registers before the write, and the same bytes after it."""
        monkeypatch.setattr(late, "append", publish)
        put(registry, scope, make_adapter("first", 20), name="first")
        written = publish(*arguments, **options)
        put(registry, scope, source, name="second")
        return written

    monkeypatch.setattr(quota, "lease", broken)
    monkeypatch.setattr(late, "append", beside)
    with pytest.raises(OverQuota):
        put(late, scope, source, name="second")
    assert served(registry, scope) == {"first": "v1", "second": "v1"}
    assert list(release.present_revisions(registry, scope, "second")) == ["v1"]
